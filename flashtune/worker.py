"""The process that owns the GPU: checks and times configs, and may be killed and replaced.

:func:`serve` is its main loop, which answers the calls of :mod:`flashtune.gpu_process` one by one.
An error that leaves the CUDA context unusable is answered, and then the process ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from flashtune.check import (
    Inputs,
    Outputs,
    References,
    bit_sums,
    check,
    checksum,
    guarded_inputs,
    guarded_outputs,
    random_inputs,
    references,
)
from flashtune.driver import clock_reader
from flashtune.errors import FlashtuneError
from flashtune.kernels import Kernel, load_kernel
from flashtune.kernels.launch import forward
from flashtune.records import Config, Problem, Status
from flashtune.results import Checked, Conditions, SdpaTiming, Timing
from flashtune.timing import Timer, sdpa_launch, time_sdpa

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_IDLE_S = 0.25  # after a pause as long as this the clocks have to be warmed again
_WARM_S, _STILL_WARM_S = 1.0, 0.1
_REPEATS = 32
"""Launches of a finalist that must agree with themselves bit for bit: one that is wrong in every
tenth launch passes in 3% of cases, and its rounds are still to come."""
_PLACEMENTS = 4
"""Copies of a problem's tensors that rounds take in turns. Where tensors lie in memory moves the
difference of two configs, in one process and not in the next: this way it is in the interval."""
_ROOM_FOR = 8
"""Another copy is made only while so many would fit: on a small card fewer take turns, and what a
check needs in passing still finds room."""
_DIFFERS = "its answers differ from launch to launch on the same inputs"

Samples = tuple[float, ...]


class InputsChanged(Exception):
    """A launch stored into Q, K or V."""


class AnswersDiffer(Exception):
    """A timed launch left other bits in O and L than an earlier launch on the same inputs."""

    def __init__(self, config: Config) -> None:
        super().__init__(_DIFFERS)
        self.config = config


@dataclass(frozen=True)
class _Placement:
    """One copy of what timed launches read and write."""

    inputs: Inputs
    o: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class _Open:
    refs: References
    placements: tuple[_Placement, ...]  # what is timed; SDPA too, in the first
    guarded_inputs: Inputs  # what is checked: the same values
    guarded_outputs: Outputs
    checksums: tuple[int, ...]  # of Q, K and V, the same in each copy
    answers: dict[Config, tuple[int, ...]]  # checksums of O and L

    def changed(self) -> bool:
        """Whether a launch stored into any copy of the inputs, its own or another's."""
        copies = [place.inputs for place in self.placements] + [self.guarded_inputs]
        sums = checksum(*(tensor for copy in copies for tensor in (copy.q, copy.k, copy.v)))
        return sums != self.checksums * len(copies)


class GpuWorker:
    """Holds the CUDA context, the open problems' tensors and references, and the timer."""

    def __init__(self, kernel: Kernel, timer: Timer, conditions: Callable[[], Conditions]) -> None:
        self._kernel = kernel
        self._jit_function = load_kernel(kernel).flash_fwd_kernel
        self._timer = timer
        self._conditions = conditions
        self._open: dict[Problem, _Open] = {}
        self._last_launch = 0.0
        self._last_problem: Problem | None = None

    def open(self, problem: Problem) -> None:
        """Draw the problem's inputs and compute its references, unless it is open.

        Raises FlashtuneError when the card's memory is too small for this problem alone.
        """
        self._at(problem)

    def _at(self, problem: Problem) -> _Open:
        """The problem, open; others are closed for it where the memory is short."""
        if problem not in self._open:
            self._make_room_and_open(problem)
        return self._open[problem]

    def _make_room_and_open(self, problem: Problem) -> None:
        with suppress(torch.cuda.OutOfMemoryError):
            self._open[problem] = self._opened(problem)
            return
        # The failed attempt's tensors live as long as its traceback: until here, not in a handler.
        self._open.clear()
        torch.cuda.empty_cache()
        try:
            self._open[problem] = self._opened(problem)
        except torch.cuda.OutOfMemoryError as error:
            raise FlashtuneError(
                f"{problem}: the card's memory is too small ({str(error).splitlines()[0]})",
                "Choose a smaller --B, --H or --N.",
            ) from error

    def _opened(self, problem: Problem) -> _Open:
        inputs = random_inputs(problem, "cuda")
        refs = references(problem, inputs)
        guarded = guarded_inputs(inputs), guarded_outputs(problem, "cuda")
        placements = [_Placement(inputs, torch.empty_like(inputs.q), torch.empty_like(refs.lse))]
        one_copy = 2 * inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes
        while len(placements) < _PLACEMENTS and _free_bytes() > _ROOM_FOR * one_copy:
            copy = Inputs(inputs.q.clone(), inputs.k.clone(), inputs.v.clone())
            o, lse = torch.empty_like(inputs.q), torch.empty_like(refs.lse)
            placements.append(_Placement(copy, o, lse))
        sums = checksum(inputs.q, inputs.k, inputs.v)
        return _Open(refs, tuple(placements), *guarded, sums, {})

    def sdpa(self, problem: Problem) -> list[SdpaTiming]:
        """Time SDPA's backends, each forced, on the problem's inputs; with warm clocks."""
        self._warm(problem, after_another=True)
        timings = time_sdpa(self._timer, problem, self._at(problem).placements[0].inputs)
        self._ran(problem)
        return timings

    def check(self, problem: Problem, config: Config) -> Checked:
        """Check one launch of ``config``: its answers, and that it left its inputs alone."""
        now = self._at(problem)
        self._launch_guarded(now, config)
        self._verify_inputs(problem)  # first: with others no answer is right
        checked = check(now.refs, now.guarded_outputs)
        if not checked.ok:
            return Checked(Status.WRONG, checked.reason, checked)
        return Checked(None, None, checked)

    def repeat(self, problem: Problem, config: Config) -> Checked:
        """Launch ``config`` many times on the same inputs: the answers must be the same bits."""
        now = self._at(problem)
        self._warm(problem)  # its rounds follow
        outputs, launches = now.guarded_outputs, []
        for _ in range(_REPEATS):  # not waited for in between
            self._launch_guarded(now, config)
            launches.append(bit_sums(outputs.o, outputs.lse))
        answers = [tuple(sums) for sums in torch.stack(launches).tolist()]
        self._ran(problem)
        expected = now.answers.setdefault(config, answers[0])
        if any(answer != expected for answer in answers):
            return Checked(Status.WRONG, _DIFFERS, None)
        checked = check(now.refs, outputs)
        if not checked.ok:
            return Checked(Status.WRONG, f"launched again: {checked.reason}", checked)
        return Checked(None, None, None)

    def time(self, problem: Problem, config: Config) -> Timing:
        """A full measurement of ``config`` by itself."""
        place = self._at(problem).placements[0]
        self._warm(problem, after_another=True)
        timing = self._timer.time(self._launcher(problem, config, place))
        self._ran(problem)
        self._verify(problem, config, place)
        return timing

    def look(
        self, problem: Problem, config: Config, beside: Config | None, launches: int
    ) -> tuple[Samples, Samples]:
        """A few samples of ``config``, and of ``beside`` taken in turns with them."""
        place = self._at(problem).placements[0]
        both = [config] if beside is None else [beside, config]
        launchers = [self._launcher(problem, c, place) for c in both]
        self._keep_warm(launchers[0])
        taken = self._timer.in_turns(launchers, launches, at_a_time=2)  # both at all four places
        self._launch_and_verify(problem, config, place)
        return taken[-1], (taken[0] if beside is not None else ())

    def round(
        self, problem: Problem, configs: Sequence[Config], launches: int, turn: int
    ) -> tuple[Mapping[Config, Samples], Conditions]:
        """``launches`` samples of each of ``configs``, some of each in turn, and the card's state.
        Rounds of different ``turn`` run on different copies of the tensors.

        Raises InputsChanged when a launch stored into its inputs and AnswersDiffer when it left
        other answers than before, as ``look`` and ``time`` do.
        """
        placements = self._at(problem).placements
        place = placements[turn % len(placements)]
        self._warm(problem)
        launchers = [self._launcher(problem, config, place) for config in configs]
        samples = self._timer.in_turns(launchers, launches)
        for config in configs:
            self._launch_and_verify(problem, config, place)
        return dict(zip(configs, samples, strict=True)), self._conditions()

    def still_works(self) -> bool:
        """Whether the CUDA context survived: an illegal access poisons it for good."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _launch_and_verify(self, problem: Problem, config: Config, place: _Placement) -> None:
        """After launches in turns, which leave the answers of whoever came last."""
        self._launcher(problem, config, place)()
        self._ran(problem)
        self._verify(problem, config, place)

    def _verify(self, problem: Problem, config: Config, place: _Placement) -> None:
        """After timed launches: the inputs are as they were, and so is the answer."""
        self._verify_inputs(problem)
        answer = checksum(place.o, place.lse)
        if self._open[problem].answers.setdefault(config, answer) != answer:
            raise AnswersDiffer(config)

    def _verify_inputs(self, problem: Problem) -> None:
        if self._open[problem].changed():
            del self._open[problem]  # the next config gets fresh ones
            raise InputsChanged("its launch changed the inputs Q, K or V")

    def _ran(self, problem: Problem) -> None:
        self._last_launch, self._last_problem = time.perf_counter(), problem

    def _warm(self, problem: Problem, after_another: bool = False) -> None:
        """Warm the clocks with SDPA on the problem's inputs: a second of it after a pause. What is
        timed by itself wants it ``after_another`` problem too, whose work left another clock."""
        other = after_another and problem != self._last_problem
        if other or time.perf_counter() - self._last_launch > _IDLE_S:
            inputs = self._at(problem).placements[0].inputs
            self._timer.warm_clocks(sdpa_launch(problem, inputs), _WARM_S)
            self._ran(problem)

    def _keep_warm(self, launch: Callable[[], None]) -> None:
        """Before a short look: some launches that count for nothing, after a pause."""
        if time.perf_counter() - self._last_launch > _IDLE_S:
            self._timer.warm_clocks(launch, _STILL_WARM_S)

    def _launcher(self, problem: Problem, config: Config, place: _Placement) -> Callable[[], None]:
        kernel, function, causal = self._kernel, self._jit_function, problem.causal
        q, k, v = place.inputs.q, place.inputs.k, place.inputs.v
        o, lse = place.o, place.lse
        return lambda: forward(kernel, function, q, k, v, o, lse, causal, config)

    def _launch_guarded(self, now: _Open, config: Config) -> None:
        """One launch between the guards, into poisoned outputs; not waited for."""
        inputs, answer = now.guarded_inputs, now.guarded_outputs
        answer.poison()
        forward(
            self._kernel, self._jit_function, inputs.q, inputs.k, inputs.v, answer.o, answer.lse,
            now.refs.problem.causal, config,
        )  # fmt: skip


def _free_bytes() -> int:
    """Of the card's memory, what nobody has taken."""
    free: int = torch.cuda.mem_get_info()[0]
    return free


def serve(connection: Connection, kernel: Kernel) -> None:
    """Answer calls until the other side hangs up or the CUDA context is lost."""
    with clock_reader() as read:

        def conditions() -> Conditions:
            clocks = read()
            if clocks is None:
                return Conditions(None, None, None, None)
            return Conditions(
                clocks.sm_clock_mhz, clocks.power_w, clocks.temperature_c, clocks.throttle
            )

        driver.active.get_current_device()  # builds Triton's own driver, if it is not in the cache
        timer = Timer(lambda: conditions().sm_clock_mhz)
        answer_calls(connection, GpuWorker(kernel, timer, conditions))


def answer_calls(connection: Connection, worker: Any) -> None:
    """Each call is (method, arguments). Each answer is ("done", result), ("failed", failure), or
    ("lost", failure), after which the process ends, since nothing more can be launched in it."""
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = ("done", getattr(worker, method)(*arguments))
        except Exception as error:  # whatever a launch can raise is the caller's to judge
            answer = ("failed" if worker.still_works() else "lost", failure(error))
        connection.send(answer)
        if answer[0] == "lost":
            return


def failure(error: Exception) -> FlashtuneError | Checked:
    """An error as the caller gets it: one for the user, or one that is a config's own row."""
    if isinstance(error, FlashtuneError):
        return error
    if isinstance(error, OutOfResources):
        return Checked(Status.OUT_OF_RESOURCES, _required_and_limit(error), None)
    if isinstance(error, AnswersDiffer):
        return Checked(Status.WRONG, str(error), None, error.config)
    if isinstance(error, InputsChanged):
        return Checked(Status.WRONG, str(error), None)
    first = (str(error).strip().splitlines() or [""])[0]
    return Checked(Status.CRASHED, f"{type(error).__name__}: {first}"[:300], None)


def _required_and_limit(error: OutOfResources) -> str:
    text = str(error)
    found = re.search(r"out of resource: (.*?)\. ?Reducing", text)
    return found.group(1) if found else text.splitlines()[0]
