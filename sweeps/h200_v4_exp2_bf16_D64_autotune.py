"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v4_exp2.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: b079e474c44af783
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v4_exp2 --N 512,1024,2048,4096 --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]  B=4 H=8 N=512 D=64 full bf16     64x64x4x3   0.01405 ms  100.0%
#   [2]  B=4 H=8 N=512 D=64 causal bf16   64x64x4x3   0.01427 ms  100.0%
#   [3]  B=4 H=8 N=1024 D=64 full bf16    64x64x4x3   0.02906 ms  100.0%
#   [4]  B=4 H=8 N=1024 D=64 causal bf16  64x64x4x3   0.0272 ms   100.0%
#   [5]  B=4 H=8 N=2048 D=64 full bf16    128x64x8x4  0.08752 ms  100.0%
#   [6]  B=4 H=8 N=2048 D=64 causal bf16  64x64x4x3   0.06523 ms  100.0%
#   [7]  B=4 H=8 N=4096 D=64 full bf16    128x64x8x4  0.3111 ms   100.0%
#   [8]  B=4 H=8 N=4096 D=64 causal bf16  64x64x4x3   0.1941 ms   100.0%
#
# Worst loss of the list on any shape: 0.0%.
# No single winner on [3]: 64x64x4x3, 128x64x8x4 cannot be told apart, within 0.5%.
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
    # [1]=100.0%  [2]=100.0%  [3]=99.9%  [4]=100.0%  [5]=98.3%  [6]=100.0%  [7]=99.0%
    # [8]=100.0%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 128x64x8x4
    # [1]=94.3%  [2]=91.9%  [3]=100.0%  [4]=91.9%  [5]=100.0%  [6]=90.0%  [7]=100.0%
    # [8]=94.7%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=8, num_stages=4),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
