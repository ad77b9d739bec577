"""One honest measurement: warm clocks, a cold L2 at every launch, every sample kept.

The method is triton.testing.do_bench's (a large buffer is zeroed before each launch, CUDA events
around it, the median), with the GPU always behind the host, and a bound on the number of samples,
so that slow configs do not take the run and fast ones do not fill the file.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.check import Inputs
from flashtune.errors import FlashtuneError
from flashtune.records import Problem
from flashtune.results import SdpaTiming, Timing
from flashtune.stats import median, median_interval

WARM_UP_SECONDS = 1.0
"""The articles' finding: clocks settle only after some tenths of a second of unbroken work."""
MIN_SAMPLES, MAX_SAMPLES = 10, 60
SAMPLE_MS = 30.0
"""Aim for this much time inside the kernel a measurement, within the bounds above."""
TURN_MS = 1.0
"""Of one launch's samples before it is another's turn. An H200 changes its clock within tens of
milliseconds: two equal launches of 1.4 ms differed by 1.5 to 3% between blocks of 8 to 28 samples
(standard deviation), and by 0.2% one by one. At 14 us it is the other way round: one by one they
differ by four times as much as in blocks."""
_WARM_CALL_S = 0.02  # a warm-up's calls grow to this, so that they are as what is timed
_BEHIND = 4
"""Launches that the GPU has to be behind the host, and that go before the first sample. From the
third on an H200's times are those of a long queue."""
_FLUSH_BYTES = 256 << 20  # do_bench's: over twice the largest L2
_FLUSH_KERNELS = 2
"""Kernels that zero it. A launch's time depends on how many kernels went before it: on an H200 with
period four, and one launch of the four takes 0.7 to 1.2 us longer than the next. With two for the
buffer, three in all, each launch comes to the next of the four places. (With one, as in do_bench,
every other place is never come to.)"""
_FIRST_BURST, _LONGEST_BURST = 16, 256  # times the buffer: 1 and 16 ms on an H200
_TRIES_A_SAMPLE, _TRIES_BESIDES = 10, 200
"""Launches of each before the host is called too slow. Beside compiling it is disturbed so often
that a single sample took over ten."""
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_REFUSES = ("No available kernel", "No viable backend")  # torch's words, on a GPU and on a CPU
_RIVALS = ("flash", "cudnn")  # what a sweep times; the third is slower wherever flash will do

Samples = tuple[float, ...]


class Timer:
    """Times launches on the current CUDA device; holds the buffer whose zeroing flushes its L2."""

    def __init__(self, sm_clock_mhz: Callable[[], int | None]) -> None:
        """``sm_clock_mhz`` reads the SM clock; it is called while the GPU is busy."""
        flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._flush = flush.chunk(_FLUSH_KERNELS)
        self._sm_clock_mhz = sm_clock_mhz

    def warm_clocks(self, launch: Callable[[], None], seconds: float = WARM_UP_SECONDS) -> None:
        """Repeat ``launch`` as it will be timed for ``seconds``, so that the clocks have settled.

        It is the work itself and not some matmul: on an H200 a second of matmuls draws so much
        power that what is timed next runs 15% slower until the clock recovers.
        """
        began = time.perf_counter()
        count, now = 1, began
        while now < began + seconds:
            self.samples(launch, count)
            before, now = now, time.perf_counter()
            if now - before < _WARM_CALL_S:
                count *= 2

    def time(self, launch: Callable[[], None]) -> Timing:
        """Median of 10 to 60 samples of ``launch`` in ms, each with a cold L2.

        Raises whatever ``launch`` or the GPU raises.
        """
        (estimate,) = self.samples(launch, 1)
        count = int(min(MAX_SAMPLES, max(MIN_SAMPLES, SAMPLE_MS / max(estimate, 1e-3))))
        (samples,), clock = self._samples([launch], count)
        interval = median_interval(samples)
        return Timing(
            ms=median(samples),
            ms_lo=interval[0] if interval else None,
            ms_hi=interval[1] if interval else None,
            samples_ms=samples,
            samples_round=(0,) * len(samples),
            sm_clock_mhz=clock,
            measured_at=datetime.now(UTC),
        )

    def samples(self, launch: Callable[[], None], count: int) -> Samples:
        """``count`` samples of ``launch`` in ms, each with a cold L2. Raises what it raises."""
        return self._samples([launch], count)[0][0]

    def in_turns(
        self, launches: Sequence[Callable[[], None]], count: int, at_a_time: int | None = None
    ) -> tuple[Samples, ...]:
        """``count`` samples of each of ``launches``, ``at_a_time`` of each in turn, there and back:
        what changes meanwhile changes for all of them. By default a turn is about ``TURN_MS`` of
        the slowest, and at most half of the samples."""
        if at_a_time is None:
            slowest = max(max(own) for own in self._samples(launches, 1)[0])
            at_a_time = max(1, min(count // 2, int(TURN_MS / max(slowest, 1e-3))))
        return self._samples(launches, count, at_a_time)[0]

    def _samples(
        self, launches: Sequence[Callable[[], None]], count: int, at_a_time: int = 1
    ) -> tuple[tuple[Samples, ...], int | None]:
        """``count`` samples in ms of each, in turns, that hold nothing of the host's time, and the
        SM clock meanwhile.

        A sample counts when the GPU was ``_BEHIND`` launches behind as it was queued. Were it not
        behind at all, it would have waited for the host, whose time (30 to 60 us a Triton launch)
        would be in the sample.

        Raises FlashtuneError when the host is too slow to keep ahead of the GPU.
        """
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
        lead = Lead()
        lead_in = list(range(len(launches))) * -(-_BEHIND // len(launches))
        there = [i for i in range(len(launches)) for _ in range(at_a_time)]
        back = there[::-1]
        tries = _TRIES_A_SAMPLE * count + _TRIES_BESIDES
        for turn in range(1 + -(-tries // at_a_time)):
            if turn % 2:  # one kernel more: where a turn is short, others come to its places
                self._flush[0].zero_()
            for i in lead_in if turn == 0 else there if turn % 2 else back:
                if len(events[i]) == count:
                    continue
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for part in self._flush * (1 + lead.burst()):
                    part.zero_()
                start.record()
                launches[i]()
                end.record()
                if lead.queued(start) and turn > 0:
                    events[i].append((start, end))
            if all(len(own) == count for own in events):
                break
        else:
            raise FlashtuneError(
                f"The host is too slow: of {tries} launches, fewer than {count} were queued while"
                f" the GPU was {_BEHIND} launches behind.",
                "Stop what else is running on this machine and run the same command again.",
            )
        clock = self._sm_clock_mhz()
        torch.cuda.synchronize()
        taken = (tuple(start.elapsed_time(end) for start, end in own) for own in events)
        return tuple(taken), clock


class Mark(Protocol):
    """What the GPU comes past: a CUDA event."""

    def query(self) -> bool:
        """Whether the GPU is past it."""


class Lead:
    """Keeps the GPU some launches behind the host.

    The same launch takes another time where the GPU has just, or nearly, caught up with what was
    queued: on an H200 12.6 us instead of 13.3, and 27.7 instead of 28.5. A burst of zeroing sets
    it back; where it comes too near again, the host is slow, and the next burst is longer.
    """

    def __init__(self) -> None:
        self._ahead: deque[Mark] = deque(maxlen=_BEHIND)  # starts of the last launches
        self._burst = 0

    def burst(self) -> int:
        """How often more to zero the buffer before the next launch; 0 where the GPU is behind."""
        if self._ahead:
            return 0
        self._burst = min(max(2 * self._burst, _FIRST_BURST), _LONGEST_BURST)
        return self._burst

    def queued(self, start: Mark) -> bool:
        """A launch was queued, with ``start`` before it. Whether the GPU was behind enough."""
        enough = len(self._ahead) == _BEHIND
        if enough and self._ahead[0].query():
            self._ahead.clear()
            return False
        self._ahead.append(start)
        return enough


def sdpa_launch(problem: Problem, inputs: Inputs) -> Callable[[], None]:
    """A call of SDPA on the problem's inputs, with whatever backend is chosen when it is called."""

    def launch() -> None:
        q, k, v = inputs.q, inputs.k, inputs.v
        gqa = problem.H != problem.H_kv
        F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa)

    return launch


def time_sdpa(timer: Timer, problem: Problem, inputs: Inputs) -> list[SdpaTiming]:
    """SDPA's flash and cuDNN backends, each forced, on the problem's own inputs; a refusal is a
    reason, not a time."""
    timings, launch = [], sdpa_launch(problem, inputs)
    for backend in _RIVALS:
        reason = refusal(backend, launch)
        with sdpa_kernel([SDPA_BACKENDS[backend]]):
            ms = timer.time(launch).ms if reason is None else None
        timings.append(SdpaTiming(backend, ms, reason))
    return timings


def refusal(backend: str, launch: Callable[[], None]) -> str | None:
    """Why SDPA's ``backend``, a key of SDPA_BACKENDS, does not take what ``launch`` calls it with;
    None when it does. Raises what else the call raises."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch warns why a backend refuses, then raises
        try:
            forced(backend, launch)()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if not any(words in str(error) for words in _REFUSES):
                raise
            why = [str(w.message).split(" (Triggered")[0] for w in said]
            return "; ".join([str(error).splitlines()[0], *why])[:300]
    return None


def forced(backend: str, launch: Callable[[], None]) -> Callable[[], None]:
    """``launch`` with SDPA's ``backend`` chosen for each call, so that calls can take turns."""

    def launch_forced() -> None:
        with sdpa_kernel([SDPA_BACKENDS[backend]]):
            launch()

    return launch_forced
