"""One honest measurement: warm clocks, a cold L2 at every launch, every sample kept.

The method is triton.testing.do_bench's (a large buffer is zeroed before each launch, CUDA events
around it, the median), with a bound on the number of samples, so that slow configs do not take the
run and fast ones do not fill the file.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

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
_LEAD_IN = 3  # launches before the first sample
_MOST_FLUSHES = 64
_CALM = 32  # launches in a row that were queued in time, before flushes become fewer
_PATIENCE = 10  # launches for each sample that is kept, before the host is called too slow
_FLUSH_BYTES = 256 << 20  # do_bench's: over twice the largest L2
SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_REFUSES = ("No available kernel", "No viable backend")  # torch's words, on a GPU and on a CPU
_RIVALS = ("flash", "cudnn")  # what a sweep times; the third is slower wherever flash will do

Samples = tuple[float, ...]


class Timer:
    """Times launches on the current CUDA device; holds the buffer that flushes its L2."""

    def __init__(self, sm_clock_mhz: Callable[[], int | None]) -> None:
        """``sm_clock_mhz`` reads the SM clock; it is called while the GPU is busy."""
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sm_clock_mhz = sm_clock_mhz

    def warm_clocks(self, launch: Callable[[], None], seconds: float = WARM_UP_SECONDS) -> None:
        """Repeat ``launch`` as it will be timed for ``seconds``, so that the clocks have settled.

        It is the work itself and not some matmul: on an H200 a second of matmuls draws so much
        power that what is timed next runs 15% slower until the clock recovers.
        """
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.samples(launch, _LEAD_IN)

    def time(self, launch: Callable[[], None]) -> Timing:
        """Median of 10 to 60 samples of ``launch`` in ms, each with a cold L2.

        Raises whatever ``launch`` or the GPU raises.
        """
        estimate = median(self.samples(launch, _LEAD_IN))
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

        A sample is clean when its launch was queued before the GPU had finished flushing, which
        the start event tells: were it already complete, the GPU would have waited for the host,
        and the host's time (30 to 60 us a Triton launch) would be in the sample.

        Raises FlashtuneError when the host is too slow to keep ahead of the GPU.
        """
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
        lead = Lead()
        lead_in = [i for i in range(len(launches)) for _ in range(_LEAD_IN)]
        there = [i for i in range(len(launches)) for _ in range(at_a_time)]
        back = there[::-1]
        for turn in range(1 + _PATIENCE * -(-count // at_a_time)):
            for i in lead_in if turn == 0 else there if turn % 2 else back:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for _ in range(lead.flushes):
                    self._flush.zero_()
                start.record()
                launches[i]()
                end.record()
                clean = not start.query()
                lead.saw(clean)
                if clean and turn > 0 and len(events[i]) < count:
                    events[i].append((start, end))
            if all(len(own) == count for own in events):
                break
        else:
            raise FlashtuneError(
                f"The host is too slow: of {_PATIENCE} launches for each sample that was asked for,"
                " too few were queued before the GPU was ready for them.",
                "Stop what else is running on this machine and run the same command again.",
            )
        clock = self._sm_clock_mhz()
        torch.cuda.synchronize()
        taken = (tuple(start.elapsed_time(end) for start, end in own) for own in events)
        return tuple(taken), clock


class Lead:
    """How many buffers are zeroed before each launch, so that the GPU stays behind the host.

    One where the host is fast. Each launch that the GPU waited for doubles them, and many in a row
    that it did not wait for halve them again: a host that was busy for a moment, with compiling
    say, must not make all later launches slow.
    """

    def __init__(self) -> None:
        self.flushes = 1
        self._clean = 0  # launches in a row

    def saw(self, clean: bool) -> None:
        """The last launch was queued in time, or was not."""
        if not clean:
            self.flushes, self._clean = min(2 * self.flushes, _MOST_FLUSHES), 0
            return
        self._clean += 1
        if self._clean == _CALM:
            self.flushes, self._clean = max(1, self.flushes // 2), 0


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
