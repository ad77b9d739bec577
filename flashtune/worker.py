"""The owner of the GPU: checks and times one config after another on the problem that is open."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from flashtune.check import (
    Inputs,
    Outputs,
    References,
    check,
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
from flashtune.results import Check, SdpaTiming, Timing
from flashtune.timing import Timer, sdpa_launch, time_sdpa


@dataclass(frozen=True)
class Outcome:
    """What became of one config on one problem."""

    status: Status
    reason: str | None = None
    check: Check | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class _Open:
    problem: Problem
    refs: References
    inputs: Inputs  # what is timed, SDPA too
    outputs: tuple[torch.Tensor, torch.Tensor]  # O and L of the timed launches
    guarded_inputs: Inputs  # what is checked: the same values
    guarded_outputs: Outputs


class GpuWorker:
    """Holds the CUDA context, one problem's tensors and references, and the timer."""

    def __init__(self, kernel: Kernel, timer: Timer) -> None:
        self._kernel = kernel
        self._jit_function = load_kernel(kernel).flash_fwd_kernel
        self._timer = timer
        self._open: _Open | None = None

    def open(self, problem: Problem) -> list[SdpaTiming]:
        """Draw the problem's inputs, compute its references, warm the clocks and time SDPA.

        Raises FlashtuneError when the card's memory is too small for the problem.
        """
        self._open = None  # the last problem's tensors go before this one's come
        try:
            inputs = random_inputs(problem, "cuda")
            refs = references(problem, inputs)
            o, lse = torch.empty_like(inputs.q), torch.empty_like(refs.lse)
            guarded = guarded_inputs(inputs), guarded_outputs(problem, "cuda")
        except torch.cuda.OutOfMemoryError as error:
            raise FlashtuneError(
                f"{problem}: the card's memory is too small ({str(error).splitlines()[0]})",
                "Choose a smaller --B, --H or --N.",
            ) from error
        self._open = _Open(problem, refs, inputs, (o, lse), *guarded)
        self._timer.warm_clocks(sdpa_launch(problem, inputs))
        return time_sdpa(self._timer, problem, inputs)

    def measure(self, config: Config) -> Outcome:
        """Check one launch of ``config`` on the open problem and, if it is right, time it."""
        assert self._open is not None, "open() a problem first"
        now = self._open
        answer = now.guarded_outputs
        answer.poison()
        try:
            self._launch(config, now.guarded_inputs, answer.o, answer.lse)
            torch.cuda.synchronize()
            checked = check(now.refs, answer)
            if not checked.ok:
                return Outcome(Status.WRONG, checked.reason, checked)
            timing = self._timer.time(lambda: self._launch(config, now.inputs, *now.outputs))
        except OutOfResources as error:
            return Outcome(Status.OUT_OF_RESOURCES, _required_and_limit(error))
        except Exception as error:  # whatever a launch can raise is this config's row
            first = (str(error).strip().splitlines() or [""])[0]
            return Outcome(Status.CRASHED, f"{type(error).__name__}: {first}"[:300])
        return Outcome(Status.TIMED, None, checked, timing)

    def still_works(self) -> bool:
        """Whether the CUDA context survived: an illegal access poisons it for good."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def _launch(self, config: Config, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor) -> None:
        assert self._open is not None
        q, k, v = inputs.q, inputs.k, inputs.v
        causal = self._open.problem.causal
        forward(self._kernel, self._jit_function, q, k, v, o, lse, causal, config)


@contextmanager
def gpu_worker(kernel: Kernel) -> Iterator[GpuWorker]:
    """A worker on the current CUDA device, with NVML open for the clock readings."""
    with clock_reader() as read:

        def sm_clock_mhz() -> int | None:
            clocks = read()
            return None if clocks is None else clocks.sm_clock_mhz

        yield GpuWorker(kernel, Timer(sm_clock_mhz))


def _required_and_limit(error: OutOfResources) -> str:
    text = str(error)
    found = re.search(r"out of resource: (.*?)\. ?Reducing", text)
    return found.group(1) if found else text.splitlines()[0]
