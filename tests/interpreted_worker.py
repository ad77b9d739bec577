"""The GPU worker's own code on the CPU: launches are interpreted, and the timer does not time.

Run with TRITON_INTERPRET=1: ``interpreted_worker.py KERNEL``; prints one JSON line for each config.
It shows what CI can show without a card: that a config is checked on guarded tensors, timed on the
others, and that what a launch raises becomes the right status.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import torch
from triton.runtime.errors import OutOfResources

from flashtune import worker
from flashtune.kernels import find_kernel
from flashtune.records import Config, Problem
from flashtune.results import Timing


class NoTimer:
    """Launches once where the real one launches a hundred times; its result is not a time."""

    def warm_clocks(self, launch: Callable[[], None]) -> None:
        launch()

    def time(self, launch: Callable[[], None]) -> Timing:
        launch()
        return Timing(1.0, None, None, (1.0,), (0,), None, datetime.now(UTC))


def on_the_cpu() -> None:
    inputs, outputs = worker.random_inputs, worker.guarded_outputs
    worker.random_inputs = lambda problem, _: inputs(problem, "cpu")
    worker.guarded_outputs = lambda problem, _: outputs(problem, "cpu")
    worker.time_sdpa = lambda *_: []
    torch.cuda.synchronize = lambda: None


def main() -> None:
    on_the_cpu()
    gpu = worker.GpuWorker(find_kernel(sys.argv[1]), NoTimer())
    assert gpu.open(Problem(1, 2, 1, 77, 53, 40, True, "fp16")) == []
    launch = worker.forward
    raised: list[Exception] = []

    def forward(*arguments: object) -> None:
        if raised:
            raise raised.pop()
        launch(*arguments)

    worker.forward = forward
    for error in (
        None,
        OutOfResources(262144, 232448, "shared memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines"),
        None,
    ):
        raised[:] = [] if error is None else [error]
        outcome = gpu.measure(Config(32, 16, 4, 2))
        same = None
        if outcome.timing is not None:
            opened = gpu._open
            same = torch.equal(opened.outputs[0], opened.guarded_outputs.o)
        record = {"status": outcome.status, "reason": outcome.reason, "timed_is_checked": same}
        print(json.dumps(record))


if __name__ == "__main__":
    main()
