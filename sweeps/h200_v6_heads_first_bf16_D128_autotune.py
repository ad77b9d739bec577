"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v6_heads_first.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: c6d6241320ea3082
# Measured: 2026-11-29, by
#   flashtune sweep --D 128 --N 1024,4096 --both --exhaustive --out res
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]  B=4 H=8 N=1024 D=128 full bf16    256x64x16x3  0.04563 ms  100.0%
#   [2]  B=4 H=8 N=1024 D=128 causal bf16  64x64x4x3    0.03165 ms  100.0%
#   [3]  B=4 H=8 N=4096 D=128 full bf16    128x128x8x3  0.5642 ms   100.0%
#   [4]  B=4 H=8 N=4096 D=128 causal bf16  64x64x4x3    0.298 ms    100.0%
#
# Worst loss of the list on any shape: 0.0%.
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
    # [1]=96.5%  [2]=100.0%  [3]=93.9%  [4]=100.0%
    triton.Config({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 256x64x16x5
    # [1]=98.7%  [2]=63.8%  [3]=98.4%  [4]=92.2%
    triton.Config({"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64}, num_warps=16, num_stages=5),
    # 128x128x8x3
    # [1]=95.4%  [2]=86.8%  [3]=100.0%  [4]=96.2%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, num_warps=8, num_stages=3),
    # 256x64x16x3
    # [1]=100.0%  [2]=65.2%  [3]=98.4%  [4]=91.8%
    triton.Config({"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64}, num_warps=16, num_stages=3),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
