"""The recommended list of recorded sweeps: the room that joins recommend with the budget.

The budget says which configs of a list would fit dtypes and head dimensions that were not swept,
and gives unmeasured rows the order in which they were to be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flashtune.budget import assess, verdict
from flashtune.cost import order
from flashtune.errors import FlashtuneError
from flashtune.export import python_module, write_new
from flashtune.gpu import GpuSpec, known_gpus, present_gpu
from flashtune.kernels import KERNELS, Kernel
from flashtune.recommend import recommend
from flashtune.records import ELEMENT_BYTES, Config, Problem, Status
from flashtune.results import Recommendation, Row, SweepFile

COMMON_HEAD_DIMENSIONS = (64, 128)
"""A list claims to serve these in every dtype, beside what was swept."""


def recommend_for(
    files: Sequence[SweepFile], max_configs: int = 5, regret: float = 0.01
) -> Recommendation:
    """The list for sweeps of one GPU and kernel. Raises FlashtuneError as recommend does."""
    swept = sorted({(row.dtype, row.D) for file in files for row in file.rows})
    dims = sorted({D for _, D in swept} | set(COMMON_HEAD_DIMENSIONS))
    serve = [(dtype, D) for D in dims for dtype in ELEMENT_BYTES]
    provenance = files[0].provenance
    gpu, kernel = _spec(provenance.gpu), KERNELS.get(provenance.kernel)
    if gpu is None or kernel is None:  # a card or a kernel that the budget does not know
        return recommend(files, max_configs=max_configs, regret=regret, serve=swept)
    triton = provenance.triton_release
    if not any(file.provenance.measured for file in files):
        files = [_in_order(file, gpu, kernel, triton) for file in files]
    return recommend(
        files,
        max_configs=max_configs,
        regret=regret,
        # Where the budget cannot say what fits, only what ran counts.
        serve=serve if kernel.shared_modelled else swept,
        fits=_fits(gpu, kernel, triton) if kernel.shared_modelled else None,
    )


def list_path(results: Path) -> Path:
    """Where the list of a results file goes: beside it."""
    return results.with_name(results.stem + "_autotune.py")


def write_list(results: Path, file: SweepFile) -> tuple[Recommendation, Path] | None:
    """Recommend from one results file and write the list beside it; None: no config is usable.

    The list is made from the results anew each time: an older one is replaced, or removed where
    nothing is left to recommend.
    """
    usable = Status.TIMED if file.provenance.measured else Status.COMPILED
    recommendation = None
    if any(row.status is usable for row in file.rows):
        with suppress(FlashtuneError):  # no config is right on every shape
            recommendation = recommend_for([file])
    if recommendation is None:
        list_path(results).unlink(missing_ok=True)
        return None
    text = python_module(recommendation, provenance=file.provenance, runs=file.runs, param_names={})
    write_new(list_path(results), text, force=True)
    return recommendation, list_path(results)


def _fits(
    gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int]
) -> Callable[[Config, str, int], bool]:
    def fits(config: Config, dtype: str, D: int) -> bool:
        problem = Problem(1, 1, 1, 1024, 1024, D, False, dtype)
        budget = assess(problem, config, gpu, kernel, triton)
        return budget.shared is not None and verdict(budget, gpu).kept

    return fits


def _in_order(file: SweepFile, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int]) -> SweepFile:
    """The file with its rows in the order of promise, problem by problem."""
    by_problem: dict[Problem, dict[Config, Row]] = {}
    for row in file.rows:
        by_problem.setdefault(row.problem, {})[row.config] = row
    rows: list[Row] = []
    for problem, configs in by_problem.items():
        budgets = [assess(problem, config, gpu, kernel, triton) for config in configs]
        verdicts = [verdict(b, gpu) for b in budgets]
        costs = order(problem, budgets, verdicts, gpu, kernel)
        rows += [configs[cost.config] for cost in costs]
    return replace(file, rows=tuple(rows))


def _spec(name: str) -> GpuSpec | None:
    known = known_gpus()
    if name in known:
        return known[name]
    try:
        present = present_gpu()
    except FlashtuneError:  # the card here is not the one that was swept
        return None
    return present if present is not None and present.name == name else None
