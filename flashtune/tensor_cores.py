"""Which tensor instructions a config's multiplies become, and where Triton puts a block's warps.

Source: Triton's AccelerateMatmul.cpp (getMMAVersionSafe, warpsPerTileV2 and its kin).
"""

from __future__ import annotations

from enum import StrEnum

from flashtune.gpu import GpuSpec
from flashtune.records import Config, Problem

WARP = 32  # threads
MMA_ROWS = 16  # of the output of one mma.sync, a warp's work
MMA_COLUMNS = 8  # of its output: keys in S
WGMMA_ROWS = 64  # of the output of one wgmma, four warps' work; it reads K or V once for them

_MMA_ALONE = frozenset({80, 86, 89, 120})  # compute capabilities with mma.sync and nothing else


class Instructions(StrEnum):
    """The tensor instructions that a config's multiplies become."""

    MMA = "mma"  # operands in registers
    WGMMA = "wgmma"  # Hopper: groups of 4 warps read K and V where they lie
    TCGEN05 = "tcgen05"  # datacentre Blackwell: the same, with results in tensor memory


def instructions(gpu: GpuSpec, config: Config) -> Instructions | None:
    """Which tensor instructions a config gets; None for a compute capability nobody checked."""
    cc = gpu.cc_number
    if cc in _MMA_ALONE:
        return Instructions.MMA
    if cc == 90:
        whole = config.num_warps % 4 == 0 and config.q_tile % WGMMA_ROWS == 0
        return Instructions.WGMMA if whole else Instructions.MMA
    if cc == 100:
        whole = config.num_warps in (4, 8) and config.q_tile % WGMMA_ROWS == 0
        return Instructions.TCGEN05 if whole else Instructions.MMA
    return None


def reads_in_place(kind: Instructions | None) -> bool:
    """Whether the tensor cores read K and V from shared memory themselves."""
    return kind in (Instructions.WGMMA, Instructions.TCGEN05)


def is_stacked(problem: Problem, config: Config, kind: Instructions | None) -> bool:
    """Whether each warp owns whole rows; else warps sit side by side along the keys."""
    return reads_in_place(kind) or config.q_tile >= problem.padded_D


def repeats(problem: Problem, config: Config, kind: Instructions | None) -> tuple[float, float]:
    """How often each element of S, and each of O, is computed: 1 unless warps outnumber the blocks
    of the output.

    Stacked warps beyond one per 16 rows repeat rows, in both multiplies. Side by side, each
    multiply has its own columns to share out: k_tile/8 blocks for Q K^T, D/8 for P V (the articles'
    Round 0: 16x16 with 4 warps runs Q K^T twice and P V once). tcgen05 runs once for all warps.
    """
    if kind is Instructions.TCGEN05:
        return 1.0, 1.0
    warps = config.num_warps
    if is_stacked(problem, config, kind):
        rows = max(1.0, warps * MMA_ROWS / config.q_tile)
        return rows, rows
    return (
        max(1.0, warps * MMA_COLUMNS / config.k_tile),
        max(1.0, warps * MMA_COLUMNS / problem.padded_D),
    )
