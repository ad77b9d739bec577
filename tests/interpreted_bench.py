"""A bench's own code on the CPU: launches are interpreted, and the timer does not time.

Run with TRITON_INTERPRET=1: ``interpreted_bench.py WRONG_KERNEL``; prints the JSON document of a
bench and then, a line each, the order in which each round had its contenders. The times are made
up, by who launches: they are for seeing what is done with times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from flashtune import bench_on_gpu, timing
from flashtune.bench import Ceilings
from flashtune.cli.bench import as_document
from flashtune.cli.render import json_text
from flashtune.compiler import CompileJob
from flashtune.entries import Entry
from flashtune.gpu import find_gpu
from flashtune.kernels import find_kernel
from flashtune.records import Compiled, Config, Problem, Status

PROBLEM = Problem(1, 2, 2, 77, 77, 40, True, "fp16")
SLOW, FAST, REFUSED = Config(32, 16, 4, 2), Config(16, 16, 4, 2), Config(64, 16, 4, 2)
MS = {str(SLOW): 2.0, str(FAST): 1.0, "SDPA": 0.5}

who = ["SDPA"]  # has launched last
rounds: list[list[str]] = []


class MadeUpTimer:
    def __init__(self, sm_clock_mhz: Callable[[], int | None]) -> None:
        self.run = 0

    def warm_clocks(self, launch: Callable[[], None], seconds: float = 1.0) -> None:
        launch()
        self.run += 1  # a tuning and each run begin with it: each is slower than the last

    def in_turns(
        self, launches: Sequence[Callable[[], None]], count: int
    ) -> tuple[tuple[float, ...], ...]:
        order = []
        for launch in launches:
            who[:] = ["SDPA"]
            launch()
            order += who
        rounds.append(order)
        return tuple((MS[name] * self.run,) * count for name in order)


def compile_all(jobs: Sequence[CompileJob], n_jobs: int) -> Iterator[tuple[CompileJob, Compiled]]:
    for job in jobs:
        failure = Status.COMPILE_FAILED if job.config == REFUSED else None
        reason = None if failure is None else "ptxas fatal: made up"
        yield job, Compiled(job.config, failure=failure, reason=reason)


def on_the_cpu() -> None:
    inputs, outputs = bench_on_gpu.random_inputs, bench_on_gpu.guarded_outputs
    launch = bench_on_gpu.forward

    def forward(*arguments: object) -> None:
        launch(*arguments)
        who[:] = [str(arguments[-1])]

    bench_on_gpu.random_inputs = lambda problem, _: inputs(problem, "cpu")
    bench_on_gpu.guarded_outputs = lambda problem, _: outputs(problem, "cpu")
    bench_on_gpu.forward = forward
    bench_on_gpu.Timer = MadeUpTimer
    bench_on_gpu.compile_all = compile_all
    bench_on_gpu.ceilings = lambda *_: Ceilings((100.0, 104.0), (1000.0, 1000.0), None)
    torch.cuda.synchronize = lambda: None
    torch.cuda.is_available = lambda: True


def main() -> None:
    on_the_cpu()
    right, wrong = find_kernel("v6_heads_first"), find_kernel(sys.argv[1])
    plan = [
        (
            PROBLEM,
            [
                Entry("right", right, (SLOW, REFUSED, FAST), "made up"),
                Entry("wrong", wrong, (FAST,), "made up"),
                Entry("refused", right, (REFUSED,), "made up"),
                Entry("none", right, (), "made up"),
            ],
        )
    ]
    assert timing.SDPA_BACKENDS  # asked for real: torch on a CPU has some of them
    gpu = find_gpu("h200")
    result = bench_on_gpu.run(plan, gpu, 3, "a test", lambda *_: nullcontext(lambda: None))
    sys.stdout.write(json_text(as_document(result, [], None, gpu)))
    Path("rounds.json").write_text(json.dumps(rounds))


if __name__ == "__main__":
    main()
