"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v10_persistent.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: 4c137ac3758bd230
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v10_persistent --space ping_pong --D 64 --N
#     512,1024,2048,4096,8192 --both -q
#   flashtune sweep --kernel v10_persistent --space ping_pong --D 64 --N 16384 --B 1
#     --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=64 full bf16    256x64x4x2   1.101 ms    100.0%
#   [2]   B=1 H=8 N=16384 D=64 causal bf16  128x128x4x2  0.6097 ms   100.0%
#   [3]   B=4 H=8 N=512 D=64 full bf16      128x128x4x2  0.01416 ms  100.0%
#   [4]   B=4 H=8 N=512 D=64 causal bf16    128x128x4x1  0.01504 ms  99.2%
#   [5]   B=4 H=8 N=1024 D=64 full bf16     256x64x4x2   0.02829 ms  100.0%
#   [6]   B=4 H=8 N=1024 D=64 causal bf16   128x128x4x2  0.02342 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=64 full bf16     256x64x4x2   0.08038 ms  100.0%
#   [8]   B=4 H=8 N=2048 D=64 causal bf16   128x128x4x2  0.0553 ms   100.0%
#   [9]   B=4 H=8 N=4096 D=64 full bf16     256x64x4x2   0.2871 ms   100.0%
#   [10]  B=4 H=8 N=4096 D=64 causal bf16   128x128x4x2  0.1719 ms   100.0%
#   [11]  B=4 H=8 N=8192 D=64 full bf16     256x64x4x2   1.148 ms    100.0%
#   [12]  B=4 H=8 N=8192 D=64 causal bf16   128x128x4x2  0.6284 ms   100.0%
#
# Worst loss of the list on any shape: 0.8%.
# No single winner on [1]: 256x64x4x2, 256x64x4x3, 256x64x4x4 cannot be told apart,
# within 0.5%.
# No single winner on [2]: 128x128x4x2, 128x128x4x3, 256x64x4x3 cannot be told apart,
# within 0.5%.
# No single winner on [5]: 256x64x4x2, 256x64x4x3 cannot be told apart, within 0.5%.
# No single winner on [7]: 256x64x4x2, 256x64x4x3 cannot be told apart, within 0.4%.
# No single winner on [8]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 0.5%.
# No single winner on [9]: 256x64x4x2, 256x64x4x3, 256x64x4x4 cannot be told apart,
# within 0.6%.
# No single winner on [10]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 0.5%.
# No single winner on [11]: 256x64x4x2, 256x64x4x3, 256x64x4x4 cannot be told apart,
# within 0.5%.
# No single winner on [12]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 0.5%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, bf16 at D=128, fp16 at D=128.
# Has NO config that fits: fp32 at D=64, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps and num_stages out of the call, and let
# the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 128x128x4x4
    # [1]=92.4%  [2]=100.0%  [3]=94.0%  [4]=97.2%  [5]=91.7%  [6]=98.9%  [7]=93.0%
    # [8]=99.1%  [9]=94.6%  [10]=98.7%  [11]=91.2%  [12]=99.2%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, num_warps=4, num_stages=4),
    # 256x64x4x2
    # [1]=100.0%  [2]=99.4%  [3]=untimed  [4]=untimed  [5]=100.0%  [6]=untimed
    # [7]=100.0%  [8]=untimed  [9]=100.0%  [10]=93.0%  [11]=100.0%  [12]=98.4%
    triton.Config({"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64}, num_warps=4, num_stages=2),
    # 128x128x4x2
    # [1]=92.2%  [2]=99.9%  [3]=100.0%  [4]=99.2%  [5]=97.4%  [6]=100.0%  [7]=94.5%
    # [8]=100.0%  [9]=94.7%  [10]=100.0%  [11]=91.1%  [12]=100.0%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, num_warps=4, num_stages=2),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
