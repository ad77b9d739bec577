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
from flashtune.results import Conditions, Timing


class NoTimer:
    """Launches once where the real one launches a hundred times; its result is not a time."""

    def warm_clocks(self, launch: Callable[[], None], seconds: float) -> None:
        launch()

    def time(self, launch: Callable[[], None]) -> Timing:
        launch()
        return Timing(1.0, None, None, (1.0,), (0,), None, datetime.now(UTC))

    def samples(self, launch: Callable[[], None], count: int) -> tuple[float, ...]:
        launch()
        return (1.0,) * count

    def in_turns(
        self, launches: list[Callable[[], None]], count: int, at_a_time: int | None = None
    ) -> tuple[tuple[float, ...], ...]:
        for launch in (*launches, *reversed(launches)):  # there and back, as the real one
            launch()
        return tuple((1.0,) * count for _ in launches)


def on_the_cpu() -> None:
    inputs, outputs = worker.random_inputs, worker.guarded_outputs
    worker.random_inputs = lambda problem, _: inputs(problem, "cpu")
    worker.guarded_outputs = lambda problem, _: outputs(problem, "cpu")
    worker.time_sdpa = lambda *_: []
    torch.cuda.synchronize = lambda: None
    worker._free_bytes = lambda: 1 << 40
    worker._REPEATS = 3  # a launch takes a second here


PROBLEM = Problem(1, 2, 1, 77, 53, 40, True, "fp16")
CONFIG, OTHER = Config(32, 16, 4, 2), Config(16, 16, 4, 2)


class Line:
    """A pipe's end: hands out calls, keeps the answers."""

    def __init__(self, calls: list[tuple[str, tuple[object, ...]]]) -> None:
        self.calls, self.answers = calls, list[tuple[str, object]]()

    def recv(self) -> tuple[str, tuple[object, ...]]:
        if not self.calls:
            raise EOFError
        return self.calls.pop(0)

    def send(self, answer: tuple[str, object]) -> None:
        self.answers.append(answer)


def main() -> None:
    on_the_cpu()
    conditions = Conditions(None, None, None, None)
    gpu = worker.GpuWorker(find_kernel(sys.argv[1]), NoTimer(), lambda: conditions)
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
        line = Line([
            ("open", (PROBLEM,)),
            ("check", (PROBLEM, CONFIG)),
            ("repeat", (PROBLEM, CONFIG)),
            ("look", (PROBLEM, CONFIG, OTHER, 2)),
            ("time", (PROBLEM, CONFIG)),
        ])  # fmt: skip
        worker.answer_calls(line, gpu)
        _, (word, checked), repeated, looked, timed = line.answers
        opened = gpu._open[PROBLEM]
        record = {
            "word": word,
            "failure": checked.failure,
            "reason": checked.reason,
            "repeat": repeated[1].failure,
            "look": looked[1],
            "timed": timed[0],
            "timed_is_checked": torch.equal(opened.placements[0].o, opened.guarded_outputs.o),
        }
        print(json.dumps(record))
    first, *_, last = gpu._open[PROBLEM].placements
    last.o.fill_(7.0)
    assert not torch.equal(first.o, last.o)
    calls = [("round", (PROBLEM, (CONFIG,), 2, turn)) for turn in range(5)]
    line = Line(calls)
    worker.answer_calls(line, gpu)
    assert [word for word, _ in line.answers] == ["done"] * 5, line.answers
    assert torch.equal(first.o, last.o)  # each copy had its turn

    def flaky(*arguments: object) -> None:
        launch(*arguments)
        arguments[5][0, 0, 3, 5] += 1  # O, in this launch only

    worker.forward = flaky
    line = Line([("round", (PROBLEM, (CONFIG,), 2, 0)), ("time", (PROBLEM, CONFIG))])
    worker.answer_calls(line, gpu)
    for word, answer in line.answers:
        print(json.dumps({"word": word, "reason": answer.reason}))

    worker.forward = launch
    first.inputs.k[0, 0, 3, 5] += 1  # as a kernel that stores astray would
    line = Line([("time", (PROBLEM, CONFIG)), ("time", (PROBLEM, CONFIG))])
    worker.answer_calls(line, gpu)
    for word, answer in line.answers:
        print(json.dumps({"word": word, "reason": getattr(answer, "reason", None)}))

    def astray(*arguments: object) -> None:
        launch(*arguments)
        gpu._open[PROBLEM].guarded_inputs.k[0, 0, 3, 5] += 1  # another copy than its own
        worker.forward = launch

    worker.forward = astray
    line = Line([("time", (PROBLEM, CONFIG)), ("check", (PROBLEM, OTHER))])
    worker.answer_calls(line, gpu)
    for word, answer in line.answers:
        print(json.dumps({"word": word, "reason": answer.reason}))


if __name__ == "__main__":
    main()
