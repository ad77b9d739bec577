"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v7_descriptor.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: 08ec9ebdddac268d
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v7_descriptor --D 128 --N 512,1024,2048,4096,8192 --both
#   flashtune sweep --kernel v7_descriptor --D 128 --N 16384 --B 1 --both
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=128 full bf16    128x128x8x3  1.91 ms     100.0%
#   [2]   B=1 H=8 N=16384 D=128 causal bf16  128x128x8x3  0.9619 ms   100.0%
#   [3]   B=4 H=8 N=512 D=128 full bf16      128x64x8x3   0.02069 ms  100.0%
#   [4]   B=4 H=8 N=512 D=128 causal bf16    64x64x4x3    0.02027 ms  100.0%
#   [5]   B=4 H=8 N=1024 D=128 full bf16     256x64x8x3   0.04534 ms  100.0%
#   [6]   B=4 H=8 N=1024 D=128 causal bf16   64x64x4x3    0.03638 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=128 full bf16     256x64x8x3   0.1426 ms   100.0%
#   [8]   B=4 H=8 N=2048 D=128 causal bf16   256x64x8x3   0.09483 ms  100.0%
#   [9]   B=4 H=8 N=4096 D=128 full bf16     256x64x8x3   0.506 ms    100.0%
#   [10]  B=4 H=8 N=4096 D=128 causal bf16   128x128x8x3  0.2981 ms   100.0%
#   [11]  B=4 H=8 N=8192 D=128 full bf16     128x128x8x3  1.972 ms    100.0%
#   [12]  B=4 H=8 N=8192 D=128 causal bf16   128x128x8x3  1.043 ms    100.0%
#
# Worst loss of the list on any shape: 0.0%.
# No single winner on [9]: 256x64x8x3, 128x128x8x3, 256x64x8x4 cannot be told apart,
# within 0.8%.
# No single winner on [10]: 128x128x8x3, 256x64x8x3 cannot be told apart, within 0.5%.
# No single winner on [11]: 128x128x8x3, 256x64x8x3 cannot be told apart, within 6.1%.
# No single winner on [12]: 128x128x8x3, 256x64x8x3, 256x64x8x4 cannot be told apart,
# within 4.1%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, fp32 at D=64, bf16 at D=128, fp16
# at D=128, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps and num_stages out of the call, and let
# the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 128x128x8x3
    # [1]=100.0%  [2]=100.0%  [3]=97.5%  [4]=90.4%  [5]=91.0%  [6]=91.3%  [7]=95.9%
    # [8]=95.5%  [9]=99.5%  [10]=99.7%  [11]=100.0%  [12]=100.0%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, num_warps=8, num_stages=3),
    # 64x64x4x3
    # [1]=93.0%  [2]=94.4%  [3]=98.3%  [4]=100.0%  [5]=89.9%  [6]=100.0%  [7]=92.2%
    # [8]=98.4%  [9]=92.8%  [10]=98.3%  [11]=92.6%  [12]=95.3%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 256x64x8x3
    # [1]=94.5%  [2]=95.2%  [3]=untimed  [4]=untimed  [5]=100.0%  [6]=untimed
    # [7]=100.0%  [8]=100.0%  [9]=100.0%  [10]=100.0%  [11]=97.0%  [12]=99.3%
    triton.Config({"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64}, num_warps=8, num_stages=3),
    # 128x64x8x3
    # [1]=87.5%  [2]=89.6%  [3]=100.0%  [4]=91.9%  [5]=88.8%  [6]=92.1%  [7]=91.0%
    # [8]=92.6%  [9]=93.3%  [10]=94.3%  [11]=91.2%  [12]=93.1%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=8, num_stages=3),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
