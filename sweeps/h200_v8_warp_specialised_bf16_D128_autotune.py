"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v8_warp_specialised.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: fc68209382fdaffd
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v8_warp_specialised --space specialised --exhaustive --D
#     128 --N 1024,4096 --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]  B=4 H=8 N=1024 D=128 full bf16    256x64x4x2:warp_specialize=on   0.04579 ms  100.0%
#   [2]  B=4 H=8 N=1024 D=128 causal bf16  64x64x4x3:warp_specialize=off   0.03704 ms  99.1%
#   [3]  B=4 H=8 N=4096 D=128 full bf16    256x64x4x2:warp_specialize=on   0.5104 ms   100.0%
#   [4]  B=4 H=8 N=4096 D=128 causal bf16  128x128x4x2:warp_specialize=on  0.2996 ms   100.0%
#
# Worst loss of the list on any shape: 0.9%.
# Has a config that fits: bf16 at D=128.
# Never listed, because Triton's autotuner checks no answer and survives no crash:
#   64x32x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   64x32x4x4:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   64x64x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   64x64x4x4:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   64x128x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   128x32x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   128x32x4x4:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   128x64x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   128x64x4x4:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   256x32x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   256x32x4x4:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   256x64x4x3:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#   256x64x4x4:warp_specialize=on: wrong on B=4 H=8 N=1024 D=128 full bf16
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps, num_stages and WARP_SPECIALIZE out of
# the call, and let the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 128x128x4x2:warp_specialize=on
    # [1]=93.1%  [2]=99.1%  [3]=99.3%  [4]=100.0%
    triton.Config(
        {"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128, "WARP_SPECIALIZE": True},
        num_warps=4,
        num_stages=2,
    ),
    # 256x64x4x2:warp_specialize=on
    # [1]=100.0%  [2]=76.5%  [3]=100.0%  [4]=96.9%
    triton.Config(
        {"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64, "WARP_SPECIALIZE": True},
        num_warps=4,
        num_stages=2,
    ),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
