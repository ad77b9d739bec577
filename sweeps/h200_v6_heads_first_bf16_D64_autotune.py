"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v6_heads_first.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: c6d6241320ea3082
# Measured: 2026-11-29, by
#   flashtune sweep --N 512,1024,2048,4096 --both --space article --exhaustive
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]  B=4 H=8 N=512 D=64 full bf16     64x64x4x3   0.01363 ms  100.0%
#   [2]  B=4 H=8 N=512 D=64 causal bf16   64x64x4x3   0.01334 ms  100.0%
#   [3]  B=4 H=8 N=1024 D=64 full bf16    128x64x8x4  0.02864 ms  100.0%
#   [4]  B=4 H=8 N=1024 D=64 causal bf16  64x64x4x4   0.02291 ms  100.0%
#   [5]  B=4 H=8 N=2048 D=64 full bf16    128x64x8x4  0.08803 ms  100.0%
#   [6]  B=4 H=8 N=2048 D=64 causal bf16  128x64x8x3  0.05362 ms  99.6%
#   [7]  B=4 H=8 N=4096 D=64 full bf16    128x64x8x4  0.3115 ms   100.0%
#   [8]  B=4 H=8 N=4096 D=64 causal bf16  64x64x4x3   0.1686 ms   100.0%
#
# Worst loss of the list on any shape: 0.4%.
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
    # [1]=100.0%  [2]=100.0%  [3]=99.9%  [4]=98.7%  [5]=98.2%  [6]=99.6%  [7]=96.6%
    # [8]=100.0%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 128x64x8x4
    # [1]=95.5%  [2]=88.8%  [3]=100.0%  [4]=89.8%  [5]=100.0%  [6]=95.6%  [7]=100.0%
    # [8]=97.5%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 64}, num_warps=8, num_stages=4),
    # 64x64x4x4
    # [1]=95.3%  [2]=96.9%  [3]=79.1%  [4]=100.0%  [5]=91.6%  [6]=94.0%  [7]=91.0%
    # [8]=93.9%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=4),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
