"""How fast the budget answers: ranking the article's 625 configs, and `flashtune budget` whole.

    python benchmarks/ranking.py [--runs 9]

Prints medians: the ranking (assess, verdict, predict, sort) in this process, and whole processes of
`flashtune budget 64x32x4x3` beside `python -c "import typer, rich"`, taken in turns. Processor time
is given too: on a machine with other work it varies less.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashtune.budget import assess, verdict  # noqa: E402
from flashtune.cost import order  # noqa: E402
from flashtune.gpu import find_gpu  # noqa: E402
from flashtune.kernels import DEFAULT_KERNEL, KERNELS  # noqa: E402
from flashtune.records import Problem  # noqa: E402
from flashtune.space import load_space  # noqa: E402

TYPER_RICH = [sys.executable, "-c", "import typer, rich"]
BUDGET = [sys.executable, "-m", "flashtune", "budget", "64x32x4x3", "--gpu", "rtx-4070-super"]


@dataclass(frozen=True)
class Took:
    """Milliseconds of one run."""

    wall: float
    processor: float


def took(work: Callable[[], object]) -> Took:
    wall, cpu = perf_counter(), processor_seconds()
    work()
    return Took((perf_counter() - wall) * 1e3, (processor_seconds() - cpu) * 1e3)


def processor_seconds() -> float:
    """Of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


def ranking(gpu_name: str, causal: bool) -> Callable[[], object]:
    """What a sweep does before it compiles anything, for one problem at N = 4096."""
    configs, gpu, kernel = load_space("article"), find_gpu(gpu_name), KERNELS[DEFAULT_KERNEL]
    problem = Problem(4, 8, 8, 4096, 4096, 64, causal, "bf16")

    def rank() -> object:
        budgets = [assess(problem, config, gpu, kernel, (3, 6)) for config in configs]
        verdicts = [verdict(budget, gpu) for budget in budgets]
        return order(problem, budgets, verdicts, gpu, kernel)

    return rank


def process(command: list[str]) -> Callable[[], object]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return lambda: subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    for gpu_name in ("h200", "rtx-4070-super"):
        for causal in (False, True):
            rank = ranking(gpu_name, causal)
            name = f"ranking 625 configs, {gpu_name}, {'causal' if causal else 'full'}"
            report(name, [took(rank) for _ in range(runs)])
    plain, budget = process(TYPER_RICH), process(BUDGET)
    pairs = [(took(plain), took(budget)) for _ in range(runs)]
    report("python -c 'import typer, rich'", [pair[0] for pair in pairs])
    report("flashtune budget 64x32x4x3", [pair[1] for pair in pairs])
    wall = median(ours.wall / base.wall for base, ours in pairs)
    processor = median(ours.processor / base.processor for base, ours in pairs)
    print(f"ratio, median of {runs} pairs: wall {wall:.2f}, processor {processor:.2f}")


def report(name: str, runs: list[Took]) -> None:
    wall, processor = (median(getattr(run, kind) for run in runs) for kind in ("wall", "processor"))
    print(f"{name}: median {wall:.1f} ms, processor {processor:.1f} ms")


if __name__ == "__main__":
    main()
