"""What a bench found out, and the figures that are made of it.

In a run every kernel and SDPA backend is timed on every problem, in interleaved rounds, and leaves
one median. As in the articles' harness tables a time is the median over the runs, and "% of SDPA"
is the median of each run's own ratio: what changes from run to run is then in neither. Nothing here
touches a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from flashtune.entries import Entry
from flashtune.operations import dram_bytes
from flashtune.records import Config, Problem, Status
from flashtune.results import Provenance
from flashtune.stats import median


@dataclass(frozen=True)
class KernelRuns:
    """One kernel on one problem. ``ms`` has the median of each run; it is empty where the kernel
    was not timed, and ``failure`` and ``reason`` say why."""

    entry: Entry
    config: Config | None  # the one that ran; None: none did
    ms: tuple[float, ...]
    failure: Status | None
    reason: str | None
    left_out: tuple[str, ...]  # configs of the entry that did not launch or answered wrong, and why
    max_abs_err: float | None  # of O against an fp32 reference; None: no answer, or a NaN in it


@dataclass(frozen=True)
class BackendRuns:
    """One forced SDPA backend on one problem: the median of each run, or why it refused."""

    backend: str
    ms: tuple[float, ...]
    reason: str | None


@dataclass(frozen=True)
class ShapeRuns:
    """Everything that was timed on one problem. Run i of one is beside run i of the others."""

    problem: Problem
    kernels: tuple[KernelRuns, ...]
    backends: tuple[BackendRuns, ...]
    sm_clock_mhz: tuple[int, int] | None  # the lowest and highest seen while it was timed
    throttle: tuple[str, ...]  # why the clock was held down meanwhile


@dataclass(frozen=True)
class Ceilings:
    """What the card reached in this run: one figure a run each."""

    matmul_tflops: tuple[float, ...]  # torch.matmul, 8192^3, the problems' dtype
    copy_gb_s: tuple[float, ...]  # device to device, 10^9 bytes read and written a second
    sm_clock_mhz: tuple[int, int] | None  # while they were measured


@dataclass(frozen=True)
class Bench:
    """One bench: where and when, and what was found."""

    provenance: Provenance
    title: str  # the GPU's name for people
    cudnn: str | None
    started: datetime
    command: str
    runs: int
    dtype: str
    shapes: tuple[ShapeRuns, ...]
    ceilings: Ceilings
    notes: tuple[str, ...]


class Spread(NamedTuple):
    """The median over runs and the extremes."""

    median: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the range, as a fraction of the median: the figure after the ±."""
        return (self.high - self.low) / 2 / self.median


@dataclass(frozen=True)
class Line:
    """One kernel or SDPA backend on one problem, as tables and JSON show it. None: not timed."""

    problem: Problem
    name: str
    sdpa: bool
    runs_ms: tuple[float, ...]
    ms: Spread | None
    tflops: float | None
    shares: dict[str, Spread | None]  # by SDPA backend: its time over ours, so 1.0 is equally fast
    of_matmul: float | None  # TFLOP/s over the measured matmul rate
    of_copy: float | None  # DRAM's minimum traffic over the time, over the measured copy rate
    reason: str | None
    kernel: KernelRuns | None  # None: SDPA


def spread(values: Sequence[float]) -> Spread | None:
    """Median and extremes; None where there is nothing."""
    return Spread(median(values), min(values), max(values)) if values else None


def paired_share(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """``theirs`` over ``ours``, run by run; None where one of them was not timed.

    Raises ValueError when the two have different numbers of runs.
    """
    if not ours or not theirs:
        return None
    return spread([their / our for our, their in zip(ours, theirs, strict=True)])


def lines(shape: ShapeRuns, ceilings: Ceilings) -> list[Line]:
    """A line for each kernel, in order, then for each SDPA backend."""
    found = [_line(shape, k.entry.name, k.ms, k.reason, k, ceilings) for k in shape.kernels]
    return found + [_line(shape, b.backend, b.ms, b.reason, None, ceilings) for b in shape.backends]


def _line(
    shape: ShapeRuns,
    name: str,
    ms: tuple[float, ...],
    reason: str | None,
    kernel: KernelRuns | None,
    ceilings: Ceilings,
) -> Line:
    problem, time = shape.problem, spread(ms)
    tflops = None if time is None else problem.tflops(time.median)
    gb_s = None if time is None else sum(dram_bytes(problem)) / time.median * 1e-6
    return Line(
        problem=problem,
        name=name,
        sdpa=kernel is None,
        runs_ms=ms,
        ms=time,
        tflops=tflops,
        shares={b.backend: paired_share(ms, b.ms) for b in shape.backends},
        of_matmul=_share(tflops, ceilings.matmul_tflops),
        of_copy=_share(gb_s, ceilings.copy_gb_s),
        reason=reason,
        kernel=kernel,
    )


def _share(reached: float | None, ceiling: Sequence[float]) -> float | None:
    return reached / median(ceiling) if reached is not None and ceiling else None
