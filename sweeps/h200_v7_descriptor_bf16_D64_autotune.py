"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v7_descriptor.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: 08ec9ebdddac268d
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v7_descriptor --D 64 --N 512,1024,2048,4096,8192 --both
#   flashtune sweep --kernel v7_descriptor --D 64 --N 16384 --B 1 --both
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=64 full bf16    64x128x4x3  1.218 ms    100.0%
#   [2]   B=1 H=8 N=16384 D=64 causal bf16  64x64x4x3   0.6163 ms   100.0%
#   [3]   B=4 H=8 N=512 D=64 full bf16      64x64x4x3   0.01709 ms  100.0%
#   [4]   B=4 H=8 N=512 D=64 causal bf16    64x128x4x3  0.01645 ms  100.0%
#   [5]   B=4 H=8 N=1024 D=64 full bf16     128x64x4x3  0.03186 ms  100.0%
#   [6]   B=4 H=8 N=1024 D=64 causal bf16   64x64x4x3   0.02637 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=64 full bf16     128x64x8x3  0.09357 ms  100.0%
#   [8]   B=4 H=8 N=2048 D=64 causal bf16   128x64x4x3  0.05872 ms  100.0%
#   [9]   B=4 H=8 N=4096 D=64 full bf16     128x64x8x3  0.318 ms    100.0%
#   [10]  B=4 H=8 N=4096 D=64 causal bf16   128x64x4x3  0.1823 ms   100.0%
#   [11]  B=4 H=8 N=8192 D=64 full bf16     128x64x8x5  1.222 ms    99.7%
#   [12]  B=4 H=8 N=8192 D=64 causal bf16   128x64x8x3  0.6213 ms   100.0%
#
# Worst loss of the list on any shape: 0.3%.
# No single winner on [1]: 64x128x4x3, 128x64x8x4, 128x64x8x3, 128x64x8x5, 128x128x4x3
# cannot be told apart, within 3.5%.
# No single winner on [5]: 128x64x4x3, 128x64x8x3 cannot be told apart, within 0.5%.
# No single winner on [9]: 128x64x8x3, 128x64x8x4, 128x64x8x5 cannot be told apart,
# within 0.5%.
# No single winner on [10]: 128x64x4x3, 128x64x8x3 cannot be told apart, within 0.5%.
# No single winner on [11]: 128x64x8x5, 128x64x8x4, 128x128x4x3, 128x64x8x3, 64x128x4x3,
# 128x64x4x3 cannot be told apart, within 4.9%.
# No single winner on [12]: 128x64x8x3, 128x64x8x4 cannot be told apart, within 0.4%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, fp32 at D=64, bf16 at D=128, fp16
# at D=128, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps and num_stages out of the call, and let
# the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 128x64x4x3
    # [1]=97.9%  [2]=98.1%  [3]=95.4%  [4]=85.6%  [5]=100.0%  [6]=90.1%  [7]=99.0%
    # [8]=100.0%  [9]=98.0%  [10]=100.0%  [11]=98.1%  [12]=97.5%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 64x64x4x3
    # [1]=93.5%  [2]=100.0%  [3]=100.0%  [4]=97.9%  [5]=untimed  [6]=100.0%  [7]=94.4%
    # [8]=93.3%  [9]=94.8%  [10]=98.7%  [11]=94.3%  [12]=98.2%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 64x128x4x3
    # [1]=100.0%  [2]=96.6%  [3]=97.6%  [4]=100.0%  [5]=untimed  [6]=88.6%  [7]=91.4%
    # [8]=untimed  [9]=94.7%  [10]=91.1%  [11]=98.4%  [12]=94.3%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 128}, num_warps=4, num_stages=3),
    # 128x64x8x3
    # [1]=99.7%  [2]=96.5%  [3]=96.0%  [4]=untimed  [5]=99.9%  [6]=91.3%  [7]=100.0%
    # [8]=97.1%  [9]=100.0%  [10]=99.6%  [11]=99.7%  [12]=100.0%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=8, num_stages=3),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
