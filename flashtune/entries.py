"""Who takes part in a bench: kernels, and the configs to run each with on one problem."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flashtune.choose import choose, predicted, unlike
from flashtune.errors import FlashtuneError
from flashtune.gpu import GpuSpec
from flashtune.kernels import KERNELS, Kernel, check_axes, find_kernel
from flashtune.ladder import LADDER, Tuned
from flashtune.recommend import recommend
from flashtune.records import Config, Problem
from flashtune.results import Recommendation
from flashtune.store import find, read, results_path


@dataclass(frozen=True)
class Entry:
    """A kernel and the configs that may be the fastest with it on one problem."""

    name: str
    kernel: Kernel
    configs: tuple[Config, ...]  # of several, the fastest on the card runs; none: none can launch
    source: str  # where the configs come from, or why there are none


def entry_names(asked: str | None) -> tuple[str, ...]:
    """The names in ``asked``, a list with commas; without it the whole ladder.

    Raises FlashtuneError for a name that is no step of the ladder, nor a file (FILE.py).
    """
    if asked is None:
        return tuple(LADDER)
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in LADDER and not name.endswith(".py"):
            raise FlashtuneError(
                f"--kernels: {name!r} is no step of the ladder",
                f"There are {', '.join(LADDER)}; a file of your own works by its path (FILE.py).",
            )
    return names


def entries(
    names: Sequence[str], problem: Problem, gpu: GpuSpec, sweeps: Path, triton: tuple[int, int]
) -> list[Entry]:
    """The steps and kernel files called ``names``, with the configs to run on ``problem``.

    A recorded sweep in the folder ``sweeps`` of this GPU, dtype and D goes before the lists that
    come with flashtune. What has neither runs what the cost model puts first with Triton
    ``triton``. Raises FlashtuneError for a broken results file or kernel file.
    """
    return [_entry(name, problem, gpu, sweeps, triton) for name in names]


def _entry(
    name: str, problem: Problem, gpu: GpuSpec, sweeps: Path, triton: tuple[int, int]
) -> Entry:
    step = LADDER.get(name)
    kernel = find_kernel(name) if step is None else KERNELS[step.body]
    swept: str | None = kernel.name
    if step is not None:
        swept = step.choice.swept if isinstance(step.choice, Tuned) else None
    if swept is not None:
        path = results_path(sweeps, gpu.name, swept, problem.dtype, problem.D, True)
        recorded = _recommended(path)
        if recorded is not None:
            return _recorded_entry(name, kernel, swept, problem, recorded, path)
    shown = kernel.name if step is None else name
    try:
        if step is None:
            first = predicted(problem, gpu, kernel, triton)[:1]
            return Entry(shown, kernel, first, "the cost model's first choice")
        choice = choose(step, problem, gpu, triton)
    except FlashtuneError as error:
        return Entry(shown, kernel, (), error.message)
    return Entry(shown, kernel, choice.configs, choice.origin)


def _recorded_entry(
    name: str,
    kernel: Kernel,
    swept: str,
    problem: Problem,
    recorded: Recommendation,
    path: Path,
) -> Entry:
    """The shape's winner where this very kernel was swept on it, or else that of the shape most
    like it and all that is good there."""
    shown = name if name in LADDER else kernel.name
    nearest, winner, _ = min(recorded.winners, key=lambda won: unlike(won[0], problem))
    if nearest == problem and swept == kernel.name:
        listed, origin = [winner], f"{path}: the winner"
    else:
        listed = [winner, *(item.config for item in recorded.configs)]
        origin = f"{path}: the nearest winner and its list"
    if swept != kernel.name:  # its further axes are about its own code
        listed = [config.plain for config in listed]
    try:
        check_axes(kernel, listed)
    except FlashtuneError as error:
        return Entry(shown, kernel, (), error.message)
    return Entry(shown, kernel, tuple(dict.fromkeys(listed)), origin)


@lru_cache(maxsize=64)  # asked for once a shape, and reading takes a second
def _recommended(path: Path) -> Recommendation | None:
    """What a results file recommends; None where there is no file, or no config of it is usable."""
    if not path.parent.is_dir() or path not in find(path.parent):
        return None
    file = read(path)
    with suppress(FlashtuneError):
        return recommend([file])
    return None
