"""Registers a thread and spills, predicted from a config alone: an estimate, not a count.

ptxas hands out registers, and nobody replays it. What a config needs most registers for is known,
though: its share of S and of O, the addresses of what it copies, and in a kernel with two loops the
mask. Weights of these were fitted to compiled configs (benchmarks/fit_registers.py), and
``flashtune audit registers`` scores them on configs that the installed Triton compiles.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from flashtune.kernels import Kernel
from flashtune.records import Config, Problem
from flashtune.tensor_cores import WARP, WGMMA_ROWS, Instructions, reads_in_place, repeats

COPY_BYTES = 16  # of one asynchronous copy
WGMMA_OVERHEAD = 26
"""Registers that ptxas wants beside a wgmma's own results: it asks for 154 for 128 of them, and for
90 for 64 (its error C7602)."""


class Weights(NamedTuple):
    """What each need counts for; see :func:`needs`."""

    base: float
    scores: float
    outputs: float
    copies: float
    masked_loop: float
    fp32_scores: float


class Registers(NamedTuple):
    """A prediction. ``low`` to ``high`` held 9 of 10 configs that the weights were fitted to."""

    wanted: float  # registers a thread, were there no cap
    expected: int  # under the cap
    low: int
    high: int
    spill_probability: float


class _Predictor(NamedTuple):
    registers: Weights
    spread: float  # half the width of the range
    spills: Weights  # shares of the cap
    threshold: float


_PREDICTORS = {
    Instructions.MMA: _Predictor(
        Weights(43.9, 1.14, 1.37, 2.16, 12.8, 0.18), 31,
        Weights(236.0, 11.3, 9.15, 18.4, 76.7, 3.5), 7.9,
    ),
    Instructions.WGMMA: _Predictor(
        Weights(1.35, 1.82, 1.4, 1.88, 3.18, 1.25), 32,
        Weights(-516.0, 15.0, 15.5, 23.6, 120.0, 18.6), 9.2,
    ),
    Instructions.TCGEN05: _Predictor(  # from 59 configs: rough
        Weights(31.6, 1.19, 1.28, 1.43, 14.9, 0.0), 55,
        Weights(-444.0, 4.85, 4.28, 2.97, 81.5, 0.0), 1.7,
    ),
}  # fmt: skip


def needs(
    problem: Problem, config: Config, kernel: Kernel, kind: Instructions | None
) -> tuple[float, float, float, float, float, float]:
    """What takes registers in one thread, in the order of :class:`Weights`: 1, elements of S, of O,
    copies of K and V, 1 in a loop that masks beside one that does not, and S again in fp32.

    Through descriptors no thread holds a copy's address. With mma.sync its share of K and V counts
    all the same, as operands in registers.
    """
    threads = WARP * config.num_warps
    repeated_s, repeated_o = repeats(problem, config, kind)
    scores = config.q_tile * config.k_tile / threads * repeated_s
    outputs = config.q_tile * problem.padded_D / threads * repeated_o
    copied = 2 * config.k_tile * problem.padded_D * problem.element_bytes
    if kernel.loads == "descriptor" and reads_in_place(kind):
        copied = 0
    masks = 1.0 if kernel.key_loops == 2 and problem.causal else 0.0
    fp32_scores = scores if problem.element_bytes == 4 else 0.0
    return 1.0, scores, outputs, copied / COPY_BYTES / threads, masks, fp32_scores


def predict_registers(
    problem: Problem, config: Config, kernel: Kernel, kind: Instructions | None, cap: int
) -> Registers:
    """What ptxas will likely use, and how likely it is to spill. ``cap`` is what it may use."""
    predictor = _PREDICTORS[kind or Instructions.MMA]
    need = needs(problem, config, kernel, kind)
    wanted = sum(map(float.__mul__, need, predictor.registers))
    pressure = sum(map(float.__mul__, need, predictor.spills)) / cap - predictor.threshold
    return Registers(
        wanted=wanted,
        expected=int(min(cap, wanted)),
        low=int(min(cap, max(16, wanted - predictor.spread))),
        high=int(min(cap, wanted + predictor.spread)),
        spill_probability=1 / (1 + exp(-max(-30.0, min(30.0, pressure)))),
    )


def wgmma_registers(problem: Problem, config: Config) -> int:
    """Registers a thread that the widest wgmma of a config needs at once, or ptxas refuses it.

    One instruction computes 64 rows and up to 256 columns with 128 threads. 0 where groups of 4
    warps outnumber the blocks of 64 rows: they share out the columns, and nothing is certain.
    """
    groups, blocks = config.num_warps // 4, config.q_tile // WGMMA_ROWS
    if groups > blocks:
        return 0
    columns = min(256, max(config.k_tile, problem.padded_D))
    return WGMMA_ROWS * columns // 128 + WGMMA_OVERHEAD
