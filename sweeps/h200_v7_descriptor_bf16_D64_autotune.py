"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v7_descriptor.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: d2c8a4165fafc696
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v7_descriptor --D 64 --N 512,1024,2048,4096,8192 --both -q
#   flashtune sweep --kernel v7_descriptor --D 64 --N 16384 --B 1 --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=64 full bf16    64x128x4x3  1.27 ms     100.0%
#   [2]   B=1 H=8 N=16384 D=64 causal bf16  64x128x4x2  0.6283 ms   100.0%
#   [3]   B=4 H=8 N=512 D=64 full bf16      64x64x4x3   0.01706 ms  100.0%
#   [4]   B=4 H=8 N=512 D=64 causal bf16    64x128x4x3  0.01638 ms  100.0%
#   [5]   B=4 H=8 N=1024 D=64 full bf16     128x64x4x3  0.03174 ms  100.0%
#   [6]   B=4 H=8 N=1024 D=64 causal bf16   64x64x4x3   0.02602 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=64 full bf16     128x64x8x3  0.09318 ms  99.2%
#   [8]   B=4 H=8 N=2048 D=64 causal bf16   128x64x4x3  0.05834 ms  100.0%
#   [9]   B=4 H=8 N=4096 D=64 full bf16     128x64x8x3  0.3223 ms   99.6%
#   [10]  B=4 H=8 N=4096 D=64 causal bf16   128x64x4x3  0.1816 ms   100.0%
#   [11]  B=4 H=8 N=8192 D=64 full bf16     128x64x8x3  1.294 ms    99.9%
#   [12]  B=4 H=8 N=8192 D=64 causal bf16   64x64x4x3   0.6712 ms   100.0%
#
# Worst loss of the list on any shape: 0.8%.
# No single winner on [2]: 64x128x4x2, 64x64x4x3 cannot be told apart, within 0.6%.
# No single winner on [5]: 128x64x4x3, 128x64x8x3 cannot be told apart, within 0.5%.
# No single winner on [9]: 128x64x8x3, 128x64x8x4, 128x64x8x5 cannot be told apart,
# within 0.5%.
# No single winner on [10]: 128x64x4x3, 128x64x8x3 cannot be told apart, within 0.5%.
# No single winner on [11]: 128x64x8x3, 128x64x8x4, 128x64x8x5, 128x128x4x3 cannot be
# told apart, within 0.6%.
# No single winner on [12]: 64x64x4x3, 128x64x8x3, 128x64x8x4, 64x64x4x4 cannot be told
# apart, within 0.5%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, fp32 at D=64, bf16 at D=128, fp16
# at D=128, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps and num_stages out of the call, and let
# the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 128x64x8x5
    # [1]=99.2%  [2]=96.8%  [3]=91.5%  [4]=85.8%  [5]=96.5%  [6]=88.1%  [7]=98.7%
    # [8]=95.7%  [9]=99.6%  [10]=98.5%  [11]=99.9%  [12]=99.6%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=8, num_stages=5),
    # 64x64x4x3
    # [1]=95.6%  [2]=100.0%  [3]=100.0%  [4]=98.3%  [5]=untimed  [6]=100.0%  [7]=94.7%
    # [8]=93.1%  [9]=95.4%  [10]=98.6%  [11]=95.2%  [12]=100.0%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 128x64x4x3
    # [1]=97.9%  [2]=97.3%  [3]=94.8%  [4]=untimed  [5]=100.0%  [6]=untimed  [7]=99.2%
    # [8]=100.0%  [9]=98.7%  [10]=100.0%  [11]=95.9%  [12]=98.6%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 64x128x4x3
    # [1]=100.0%  [2]=98.5%  [3]=97.6%  [4]=100.0%  [5]=85.5%  [6]=untimed  [7]=91.7%
    # [8]=untimed  [9]=95.2%  [10]=91.0%  [11]=96.5%  [12]=96.0%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 128}, num_warps=4, num_stages=3),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
