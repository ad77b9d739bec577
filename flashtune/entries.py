"""Who takes part in a bench: kernels, and the configs to run each with on one problem."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashtune.errors import FlashtuneError
from flashtune.gpu import GpuSpec
from flashtune.kernels import KERNELS, Kernel, find_kernel
from flashtune.plan import plan_problem
from flashtune.recommend import recommend
from flashtune.records import Config, Problem
from flashtune.results import Recommendation
from flashtune.space import load_space
from flashtune.store import find, read, results_path

_SPACE = "article"  # what the cost model chooses from where nothing was recorded


@dataclass(frozen=True)
class Entry:
    """A kernel and the configs that may be the fastest with it on one problem."""

    name: str
    kernel: Kernel
    configs: tuple[Config, ...]  # of several, the fastest on the card runs; none: none can launch
    source: str  # where the configs come from


def entry_names(asked: str | None) -> tuple[str, ...]:
    """The names in ``asked``, a list with commas; without it the whole ladder.

    Raises FlashtuneError for a name that is no kernel of the ladder, nor a file (FILE.py).
    """
    if asked is None:
        return tuple(KERNELS)
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in KERNELS and not name.endswith(".py"):
            raise FlashtuneError(
                f"--kernels: {name!r} is no kernel of the ladder",
                f"There are {', '.join(KERNELS)}; a file of your own works by its path (FILE.py).",
            )
    return names


def entries(
    names: Sequence[str], problem: Problem, gpu: GpuSpec, sweeps: Path, triton: tuple[int, int]
) -> list[Entry]:
    """The kernels called ``names``, with the configs to run on ``problem``.

    With a recorded sweep of the kernel on this GPU in the folder ``sweeps``: the problem's winner,
    or, where only other shapes of its dtype and D were swept, the list recommended for those.
    Without one: the config that the cost model puts first among those that the budget keeps with
    Triton ``triton``. Raises FlashtuneError for a broken results file or kernel file.
    """
    return [_entry(find_kernel(name), problem, gpu, sweeps, triton) for name in names]


def _entry(
    kernel: Kernel, problem: Problem, gpu: GpuSpec, sweeps: Path, triton: tuple[int, int]
) -> Entry:
    path = results_path(sweeps, gpu.name, kernel.name, problem.dtype, problem.D, True)
    recorded = _recommended(path)
    if recorded is None:
        plan = plan_problem(
            problem, load_space(_SPACE), gpu, kernel, triton, exhaustive=False, top=1
        )
        return Entry(kernel.name, kernel, plan.tried, "the cost model's first choice")
    for swept, winner, _ in recorded.winners:
        if swept == problem:
            return Entry(kernel.name, kernel, (winner,), f"{path}: the winner")
    configs = tuple(item.config for item in recorded.configs)
    return Entry(kernel.name, kernel, configs, f"{path}: the list for other shapes")


@lru_cache(maxsize=64)  # asked for once a shape, and reading takes a second
def _recommended(path: Path) -> Recommendation | None:
    """What a results file recommends; None where there is no file, or no config of it is usable."""
    if not path.parent.is_dir() or path not in find(path.parent):
        return None
    file = read(path)
    with suppress(FlashtuneError):
        return recommend([file])
    return None
