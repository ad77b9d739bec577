"""Configs for triton.autotune, chosen by flashtune."""

# Made for the kernel v9_ping_pong.
#
# GPU: h200, compute capability 9.0, driver 580.159.04
# Software: torch 2.11.0, Triton 3.6.0
# Kernel source: 0980261b06b5dfee
# Measured: 2026-11-30, by
#   flashtune sweep --kernel v9_ping_pong --space ping_pong --D 64 --N
#     512,1024,2048,4096,8192 --both -q
#   flashtune sweep --kernel v9_ping_pong --space ping_pong --D 64 --N 16384 --B 1
#     --both -q
#
# Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), that
# config's time, and the share of that speed the list reaches. Beside each config of the
# list are its own shares:
#   [1]   B=1 H=8 N=16384 D=64 full bf16    256x64x4x3              1.134 ms    100.0%
#   [2]   B=1 H=8 N=16384 D=64 causal bf16  64x128x4x2:maxnreg=128  0.6041 ms   99.9%
#   [3]   B=4 H=8 N=512 D=64 full bf16      128x128x4x2             0.0137 ms   98.4%
#   [4]   B=4 H=8 N=512 D=64 causal bf16    64x128x4x1:maxnreg=128  0.01306 ms  99.0%
#   [5]   B=4 H=8 N=1024 D=64 full bf16     256x64x4x3              0.0273 ms   100.0%
#   [6]   B=4 H=8 N=1024 D=64 causal bf16   64x64x4x1:maxnreg=80    0.02091 ms  100.0%
#   [7]   B=4 H=8 N=2048 D=64 full bf16     256x64x4x3              0.08144 ms  100.0%
#   [8]   B=4 H=8 N=2048 D=64 causal bf16   64x64x4x1:maxnreg=80    0.05158 ms  100.0%
#   [9]   B=4 H=8 N=4096 D=64 full bf16     256x64x4x3              0.285 ms    100.0%
#   [10]  B=4 H=8 N=4096 D=64 causal bf16   64x64x4x2:maxnreg=80    0.1624 ms   100.0%
#   [11]  B=4 H=8 N=8192 D=64 full bf16     256x64x4x3              1.106 ms    100.0%
#   [12]  B=4 H=8 N=8192 D=64 causal bf16   64x64x4x2:maxnreg=80    0.595 ms    100.0%
#
# Worst loss of the list on any shape: 1.6%.
# No single winner on [2]: 64x128x4x2:maxnreg=128, 64x128x4x3:maxnreg=128 cannot be told
# apart, within 0.5%.
# No single winner on [12]: 64x64x4x2:maxnreg=80, 64x64x4x3:maxnreg=80 cannot be told
# apart, within 0.5%.
# Has a config that fits: bf16 at D=64, fp16 at D=64, bf16 at D=128, fp16 at D=128.
# Has NO config that fits: fp32 at D=64, fp32 at D=128.
#
# Use, above the kernel's @triton.jit:
#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)
# Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps, num_stages and maxnreg out of the call,
# and let the grid be a function of the config that is tried.

import triton

AUTOTUNE_CONFIGS = [
    # 64x64x4x3:maxnreg=80
    # [1]=untimed  [2]=97.9%  [3]=93.4%  [4]=94.7%  [5]=untimed  [6]=93.5%  [7]=92.0%
    # [8]=97.9%  [9]=91.1%  [10]=99.3%  [11]=89.1%  [12]=99.7%
    triton.Config(
        {"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3, maxnreg=80
    ),
    # 256x64x4x3
    # [1]=100.0%  [2]=95.2%  [3]=untimed  [4]=untimed  [5]=100.0%  [6]=untimed
    # [7]=100.0%  [8]=88.5%  [9]=100.0%  [10]=90.2%  [11]=100.0%  [12]=95.9%
    triton.Config({"Q_TILE_SIZE": 256, "K_TILE_SIZE": 64}, num_warps=4, num_stages=3),
    # 64x64x4x2:maxnreg=80
    # [1]=untimed  [2]=98.2%  [3]=98.4%  [4]=97.1%  [5]=untimed  [6]=96.6%  [7]=92.9%
    # [8]=99.1%  [9]=91.5%  [10]=100.0%  [11]=untimed  [12]=100.0%
    triton.Config(
        {"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=2, maxnreg=80
    ),
    # 64x64x4x1:maxnreg=80
    # [1]=untimed  [2]=98.3%  [3]=untimed  [4]=97.8%  [5]=untimed  [6]=100.0%
    # [7]=untimed  [8]=100.0%  [9]=untimed  [10]=96.8%  [11]=untimed  [12]=95.6%
    triton.Config(
        {"Q_TILE_SIZE": 64, "K_TILE_SIZE": 64}, num_warps=4, num_stages=1, maxnreg=80
    ),
    # 64x128x4x2:maxnreg=128
    # [1]=90.9%  [2]=99.9%  [3]=96.0%  [4]=99.0%  [5]=untimed  [6]=92.4%  [7]=untimed
    # [8]=93.2%  [9]=92.0%  [10]=95.3%  [11]=untimed  [12]=99.0%
    triton.Config(
        {"Q_TILE_SIZE": 64, "K_TILE_SIZE": 128}, num_warps=4, num_stages=2, maxnreg=128
    ),
]
AUTOTUNE_KEY = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
