"""What a kernel executes with one config: tensor operations, key steps and bytes, counted exactly.

The counts are those of the articles' profiler (Round 0 and Round 2: 206.2 G operations and 8.6 GB
from L2 for v0 with 16x16x4x3, 137.4 G and 2.16 GB with 64x32x4x3; Round 4: 69.8 G causal).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.records import Config, Problem
from flashtune.tensor_cores import (
    MMA_ROWS,
    WGMMA_ROWS,
    Instructions,
    instructions,
    is_stacked,
    reads_in_place,
    repeats,
)

BANK_BYTES = 128  # what shared memory moves in one wavefront: 32 banks of 4 bytes
# Shuffles and shared-memory instructions of a row maximum or sum across warps, for each warp and
# 16 rows (the articles' Round 0, problem 2).
_CROSS_WARP_REDUCTION = 11
_SUM_BYTES = 4  # L is fp32


class KeySteps(NamedTuple):
    """How many key tiles the programs of one head visit."""

    total: int
    masked: int  # of them in the loop that masks
    longest_first: tuple[int, ...]  # every program's, in falling order; one entry if all are equal
    programs: int


@dataclass(frozen=True)
class Operations:
    """One launch's work. A multiply and an add count as 2, as the profiler's roofline counts."""

    tensor_needed: float  # two multiplies of N x N_k x D a head; half of it when causal
    tensor_executed: float  # with repeated rows or columns, the diagonal and padding
    exponentials: float
    key_steps: int  # iterations of the key loop, over all programs
    masked_steps: int  # of them with a mask
    l2_read_bytes: float  # from L2 into the SMs
    dram_read_bytes: float  # Q, K and V once
    dram_write_bytes: float  # O and L once
    shared_wavefronts: float  # 128 bytes each

    @property
    def repeats(self) -> float:
        return self.tensor_executed / self.tensor_needed


class StepWork(NamedTuple):
    """What one program does for one key tile."""

    tensor: float  # operations
    scores: float  # elements of S that are computed, repeats included
    outputs: float  # elements of O that are rescaled, repeats included
    rows: float  # rows of running maxima and sums, repeats included
    copies: float  # 16-byte pieces of K and V that are copied in
    l2_bytes: float
    wavefronts: float  # of shared memory, for tiles
    exchanges: float  # shuffle and shared-memory instructions of row reductions across warps


def operations(problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel) -> Operations:
    """Count one launch's work exactly, but for shared_wavefronts, which is within a tenth."""
    steps, heads = key_steps(problem, config, kernel), problem.B * problem.H
    work = step_work(problem, config, instructions(gpu, config))
    reads, writes = dram_bytes(problem)
    total = heads * steps.total
    q_bytes = config.q_tile * problem.D * problem.element_bytes
    return Operations(
        tensor_needed=problem.flops,
        tensor_executed=total * work.tensor,
        exponentials=total * (work.scores + work.rows),
        key_steps=total,
        masked_steps=heads * steps.masked,
        l2_read_bytes=heads * steps.programs * q_bytes + total * work.l2_bytes,
        dram_read_bytes=reads,
        dram_write_bytes=writes,
        shared_wavefronts=total * (work.wavefronts + work.exchanges),
    )


def dram_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes that must be read (Q, K, V) and written (O, L), each once."""
    row = problem.D * problem.element_bytes
    queries = problem.B * problem.H * problem.N
    keys = problem.B * problem.H_kv * problem.N_k
    return (queries + 2 * keys) * row, queries * (row + _SUM_BYTES)


def key_steps(problem: Problem, config: Config, kernel: Kernel) -> KeySteps:
    """The key tiles that one head's programs visit, as the kernel's loops bound them."""
    skips = kernel.skips_causal_tiles and problem.causal
    two_loops = kernel.key_loops == 2
    return _key_steps(problem.N, problem.N_k, config.q_tile, config.k_tile, skips, two_loops)


@lru_cache(maxsize=4096)
def _key_steps(
    N: int, N_k: int, q_tile: int, k_tile: int, skips: bool, two_loops: bool
) -> KeySteps:
    programs = -(-N // q_tile)
    whole, every = N_k // k_tile, -(-N_k // k_tile)
    if not skips:
        masked = every - whole if two_loops else every
        return KeySteps(programs * every, programs * masked, (every,), programs)
    counts, masked = [], 0
    for q_start in range(0, N, q_tile):
        unmasked = min(q_start // k_tile, whole)
        stop = min(q_start + q_tile, N_k)
        diagonal = max(0, -(-(stop - unmasked * k_tile) // k_tile))
        counts.append(unmasked + diagonal)
        masked += diagonal
    return KeySteps(sum(counts), masked, tuple(sorted(counts, reverse=True)), programs)


def step_work(problem: Problem, config: Config, kind: Instructions | None) -> StepWork:
    """One key step's work, on the tensor instructions ``kind``."""
    q, k, warps = config.q_tile, config.k_tile, config.num_warps
    D, e = problem.padded_D, problem.element_bytes
    in_place, stacked = reads_in_place(kind), is_stacked(problem, config, kind)
    repeats_s, repeats_o = repeats(problem, config, kind)
    q_bytes, kv_bytes, copied = q * D * e, k * D * e, 2 * k * problem.D * e
    if in_place:  # K and V once for every 64 rows
        read = repeats_s * (q_bytes + max(1.0, q / WGMMA_ROWS) * 2 * kv_bytes)
    elif stacked:  # every warp reads all of K and V, and its own rows of Q again each time
        read = warps * 2 * kv_bytes + repeats_s * q_bytes
    else:  # every warp reads all of Q and of P, and its own columns of K and V
        p_bytes = q * k * e
        read = warps * (q_bytes + p_bytes) + kv_bytes * (repeats_s + repeats_o) + p_bytes
    slices = max(1.0, q / MMA_ROWS)
    return StepWork(
        tensor=2.0 * q * k * D * (repeats_s + repeats_o),
        scores=q * k * repeats_s,
        outputs=q * D * repeats_o,
        rows=q * repeats_s,
        copies=copied / 16,
        l2_bytes=copied,
        wavefronts=(read + copied) / BANK_BYTES,
        exchanges=0.0 if stacked else 2 * _CROSS_WARP_REDUCTION * warps * slices,
    )
