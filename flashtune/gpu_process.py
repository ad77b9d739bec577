"""The GPU process seen from outside: calls with a time limit, and a fresh one when it dies.

A launch can hang, abort, or poison its CUDA context. It then takes the process with it and not the
sweep: the config that ran gets the blame, and the next call starts a new process, which opens the
problem that it needs again.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flashtune.children import children_without_ctrl_c
from flashtune.errors import FlashtuneError
from flashtune.kernels import Kernel
from flashtune.records import Config, Problem, Status
from flashtune.results import Checked, Conditions, SdpaTiming, Timing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    Serve = Callable[[Connection, Kernel], None]

START_S = 300.0  # importing torch on a slow disk, and making a context
OPEN_S = 300.0  # a problem's inputs and references
MORE_S = 2.0  # for each further config of a round
LAUNCH_S = 30.0  # a check, a look, a round: milliseconds to seconds when all is well

Samples = tuple[float, ...]


class Lost(Exception):
    """A call ended without its result: the launch failed, or took the process with it."""

    def __init__(self, failure: Checked) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class GpuProcess:
    """One GPU process after another. Use it in a ``with`` statement.

    Methods raise FlashtuneError for what the user must mend, and Lost for what a config did.
    """

    def __init__(
        self, kernel: Kernel, serve: Serve | None = None, launch_s: float = LAUNCH_S
    ) -> None:
        """``serve`` is the process's main loop, worker.serve by default; it is started at once, so
        that it can load while something else happens."""
        self._kernel, self._serve, self._launch_s = kernel, serve, launch_s
        self._process: Any = None
        self._connection: Connection | None = None
        self._open: set[Problem] = set()
        self._opening: deque[Problem] = deque()  # asked for, not answered yet
        self._asked_to_open = 0.0  # when, on the monotonic clock
        self.started = 0  # processes so far
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(kill=True)  # it has nothing left to do, and takes seconds to leave by itself

    def sdpa(self, problem: Problem) -> list[SdpaTiming]:
        """SDPA's backends, each forced and timed, on the problem's inputs."""
        result: list[SdpaTiming] = self._on(problem, "sdpa", problem)
        return result

    def check(self, problem: Problem, config: Config) -> Checked:
        """One launch against the references. Never Lost: what a launch does is in the result."""
        return self._checked("check", problem, config)

    def repeat(self, problem: Problem, config: Config) -> Checked:
        """Several launches on the same inputs, which must agree. Never Lost, as ``check``."""
        return self._checked("repeat", problem, config)

    def time(self, problem: Problem, config: Config) -> Timing:
        """A full measurement of one config."""
        result: Timing = self._on(problem, "time", problem, config)
        return result

    def look(
        self, problem: Problem, config: Config, beside: Config | None, launches: int
    ) -> tuple[Samples, Samples]:
        """A few samples of ``config``, and of ``beside`` in turns with them."""
        result: tuple[Samples, Samples] = self._on(
            problem, "look", problem, config, beside, launches
        )
        return result

    def round(
        self, problem: Problem, configs: Sequence[Config], launches: int, turn: int
    ) -> tuple[Mapping[Config, Samples], Conditions]:
        """``launches`` samples of each config, in turns, and the card's state after them; ``turn``
        chooses the copy of the problem's tensors."""
        result: tuple[Mapping[Config, Samples], Conditions] = self._on(
            problem, "round", problem, tuple(configs), launches, turn, more=len(configs) - 1
        )
        return result

    def _checked(self, method: str, problem: Problem, config: Config) -> Checked:
        try:
            result: Checked = self._on(problem, method, problem, config)
        except Lost as lost:
            return lost.failure
        return result

    def prepare(self, problems: Iterable[Problem]) -> None:
        """Have the process open ``problems`` as soon as it has started, and do not wait for it."""
        self._asked_to_open = time.monotonic()
        for problem in problems:
            self._send("open", (problem,))
            self._opening.append(problem)

    def ready(self) -> bool:
        """Whether a call need not wait for a start: what was to be prepared is open, or the process
        died or took too long, which is the next call's to answer."""
        if self._connection is None or not self._process.is_alive():
            return True
        while self._opening and self._connection.poll():
            self._take_opened()
        return not self._opening or time.monotonic() > self._asked_to_open + START_S + OPEN_S

    def _on(self, problem: Problem, method: str, *arguments: object, more: int = 0) -> Any:
        if self._connection is not None and not self._process.is_alive():
            self._end()  # it died between two calls: no config's doing
        if self._connection is None:
            self._start()
        if problem not in self._open and problem not in self._opening:
            self.prepare([problem])
        while self._opening:  # all of them: answers come in order
            self._take_opened()
        self._send(method, arguments)
        return self._answer(self._launch_s + more * MORE_S)

    def _take_opened(self) -> None:
        """Wait for the next problem that is being opened."""
        problem = self._opening.popleft()  # whatever comes: the next answer is the next problem's
        try:
            self._answer(START_S + OPEN_S, self._asked_to_open)
        except Lost as lost:
            raise FlashtuneError(
                f"{problem}: the GPU process cannot prepare it: {lost.failure.reason}",
                "Look at the card with nvidia-smi; what is finished is kept.",
            ) from lost
        self._open.add(problem)

    def _send(self, method: str, arguments: tuple[object, ...]) -> None:
        assert self._connection is not None
        with suppress(ConnectionError):  # it died: the answer, which will not come, says how
            self._connection.send((method, arguments))

    def _answer(self, limit_s: float, asked: float | None = None) -> Any:
        """The next answer; the limit counts from ``asked`` on, by default from now."""
        connection = self._connection
        assert connection is not None
        left = limit_s if asked is None else max(0.0, asked + limit_s - time.monotonic())
        try:
            if not connection.poll(left):
                self._end(kill=True)
                reason = f"no answer in {limit_s:g} s: a launch hangs, and its process was killed"
                raise Lost(Checked(Status.TIMEOUT, reason, None))
            word, result = connection.recv()
        except (EOFError, ConnectionError) as error:
            raise Lost(Checked(Status.CRASHED, self._how_it_died(), None)) from error
        if word == "done":
            return result
        if word == "lost":
            self._end()
        if isinstance(result, FlashtuneError):
            raise result
        raise Lost(result)

    def _start(self) -> None:
        from flashtune.worker_main import run

        context = multiprocessing.get_context("spawn")  # a fork could not use CUDA
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=run, args=(theirs, self._kernel, self._serve), daemon=True
        )
        with children_without_ctrl_c():
            self._process.start()
        theirs.close()
        self._connection = ours
        self._open.clear()
        self._opening.clear()
        self.started += 1

    def _how_it_died(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        self._end(kill=True)
        if code is None:
            return "the GPU process closed its line and had to be killed"
        if code < 0:
            with suppress(ValueError):
                return f"the GPU process died ({signal.Signals(-code).name})"
        return f"the GPU process died (exit code {code})"

    def _end(self, kill: bool = False) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if kill:
            self._process.kill()
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
