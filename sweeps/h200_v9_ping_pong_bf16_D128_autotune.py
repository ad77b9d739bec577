"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v9_ping_pong.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: 0980261b06b5dfee
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v9_ping_pong --space ping_pong --D 128 --N
#     512,1024,2048,4096,8192 --both -q
#   flashtune sweep --kernel v9_ping_pong --space ping_pong --D 128 --N 16384 --B 1
#     --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=128 full bf16    128x128x4x3            1.739 ms    99.9%
#   [2]   B=1 H=8 N=16384 D=128 causal bf16  128x128x4x2            0.8658 ms   100.0%
#   [3]   B=4 H=8 N=512 D=128 full bf16      128x128x4x2            0.01686 ms  100.0%
#   [4]   B=4 H=8 N=512 D=128 causal bf16    64x64x4x2:maxnreg=128  0.01725 ms  100.0%
#   [5]   B=4 H=8 N=1024 D=128 full bf16     128x128x4x2            0.03966 ms  100.0%
#   [6]   B=4 H=8 N=1024 D=128 causal bf16   64x64x4x2:maxnreg=128  0.03018 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=128 full bf16     128x128x4x2            0.1221 ms   100.0%
#   [8]   B=4 H=8 N=2048 D=128 causal bf16   128x128x4x2            0.07634 ms  100.0%
#   [9]   B=4 H=8 N=4096 D=128 full bf16     128x128x4x2            0.4297 ms   100.0%
#   [10]  B=4 H=8 N=4096 D=128 causal bf16   128x128x4x2            0.2425 ms   100.0%
#   [11]  B=4 H=8 N=8192 D=128 full bf16     128x128x4x2            1.823 ms    99.9%
#   [12]  B=4 H=8 N=8192 D=128 causal bf16   128x128x4x2            0.8775 ms   100.0%
#
# Worst loss of the list on any shape: 0.1%.
# No single winner on [1]: 128x128x4x3, 128x128x4x2 cannot be told apart, within 0.9%.
# No single winner on [2]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 1.3%.
# No single winner on [4]: 64x64x4x2:maxnreg=128, 64x128x4x1:maxnreg=128 cannot be told
# apart, within 0.6%.
# No single winner on [6]: 64x64x4x2:maxnreg=128, 128x128x4x2 cannot be told apart,
# within 0.5%.
# No single winner on [9]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 0.5%.
# No single winner on [11]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 0.4%.
# No single winner on [12]: 128x128x4x2, 128x128x4x3 cannot be told apart, within 0.5%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, bf16 at D=128, fp16 at D=128.
# Has NO config that fits: fp32 at D=64, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps, num_stages and maxnreg out of the call,
# and let the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 128x128x4x2
    # [1]=99.9%  [2]=100.0%  [3]=100.0%  [4]=95.9%  [5]=100.0%  [6]=99.8%  [7]=100.0%
    # [8]=100.0%  [9]=100.0%  [10]=100.0%  [11]=99.9%  [12]=100.0%
    triton.Config({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, num_warps=4, num_stages=2),
    # 64x64x4x2:maxnreg=128
    # [1]=untimed  [2]=89.3%  [3]=93.8%  [4]=100.0%  [5]=92.2%  [6]=100.0%  [7]=89.2%
    # [8]=94.8%  [9]=untimed  [10]=91.7%  [11]=untimed  [12]=untimed
    triton.Config(
        {"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=2, maxnreg=128
    ),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
