"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v7_descriptor.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: d2c8a4165fafc696
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v7_descriptor --D 128 --N 512,1024,2048,4096,8192 --both -q
#   flashtune sweep --kernel v7_descriptor --D 128 --N 16384 --B 1 --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=128 full bf16    128x128x8x3  1.978 ms    100.0%
#   [2]   B=1 H=8 N=16384 D=128 causal bf16  128x128x8x3  1.016 ms    100.0%
#   [3]   B=4 H=8 N=512 D=128 full bf16      128x64x8x3   0.02086 ms  100.0%
#   [4]   B=4 H=8 N=512 D=128 causal bf16    64x64x4x3    0.02035 ms  100.0%
#   [5]   B=4 H=8 N=1024 D=128 full bf16     256x64x8x3   0.04542 ms  100.0%
#   [6]   B=4 H=8 N=1024 D=128 causal bf16   64x64x4x3    0.03637 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=128 full bf16     256x64x8x3   0.1424 ms   100.0%
#   [8]   B=4 H=8 N=2048 D=128 causal bf16   256x64x8x3   0.09478 ms  100.0%
#   [9]   B=4 H=8 N=4096 D=128 full bf16     128x128x8x3  0.5215 ms   100.0%
#   [10]  B=4 H=8 N=4096 D=128 causal bf16   128x128x8x3  0.301 ms    100.0%
#   [11]  B=4 H=8 N=8192 D=128 full bf16     128x128x8x3  2.127 ms    100.0%
#   [12]  B=4 H=8 N=8192 D=128 causal bf16   128x128x8x3  1.126 ms    100.0%
#
# Worst loss of the list on any shape: 0.0%.
# No single winner on [9]: 128x128x8x3, 256x64x8x3 cannot be told apart, within 0.5%.
# No single winner on [10]: 128x128x8x3, 256x64x8x3 cannot be told apart, within 0.5%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, fp32 at D=64, bf16 at D=128, fp16
# at D=128, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps and num_stages out of the call, and let
# the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 64x64x4x3
    # [1]=93.1%  [2]=95.3%  [3]=98.5%  [4]=100.0%  [5]=89.8%  [6]=100.0%  [7]=91.7%
    # [8]=98.0%  [9]=92.5%  [10]=98.1%  [11]=95.6%  [12]=97.4%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 256x64x8x3
    # [1]=95.4%  [2]=94.4%  [3]=untimed  [4]=untimed  [5]=100.0%  [6]=untimed
    # [7]=100.0%  [8]=100.0%  [9]=99.9%  [10]=100.0%  [11]=96.8%  [12]=97.7%
    triton.Config({"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64}, num_warps=8, num_stages=3),
    # 128x128x8x3
    # [1]=100.0%  [2]=100.0%  [3]=97.8%  [4]=untimed  [5]=90.8%  [6]=91.1%  [7]=95.7%
    # [8]=95.5%  [9]=100.0%  [10]=99.6%  [11]=100.0%  [12]=100.0%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, num_warps=8, num_stages=3),
    # 128x64x8x3
    # [1]=89.5%  [2]=90.1%  [3]=100.0%  [4]=92.7%  [5]=88.4%  [6]=92.3%  [7]=90.8%
    # [8]=92.9%  [9]=89.8%  [10]=94.6%  [11]=91.1%  [12]=92.4%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=8, num_stages=3),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
