"""One honest measurement: warm clocks, a cold L2 at every launch, every sample kept.

The method is triton.testing.do_bench's (a large buffer is zeroed before each launch, CUDA events
around it, the median), with a bound on the number of samples, so that slow configs do not take the
run and fast ones do not fill the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune.check import Inputs
from flashtune.records import Problem, SdpaTiming, Timing
from flashtune.stats import median, median_interval

WARM_UP_SECONDS = 1.0
"""The articles' finding: clocks settle only after some tenths of a second of unbroken work."""
MIN_SAMPLES, MAX_SAMPLES = 10, 100
SAMPLE_MS = 40.0
"""Aim for this much time inside the kernel a measurement, within the bounds above."""
_WARM_LAUNCHES = 3
_FLUSH_BYTES = 256 << 20  # do_bench's: over twice the largest L2
_SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Timer:
    """Times launches on the current CUDA device; holds the buffer that flushes its L2."""

    def __init__(self, sm_clock_mhz: Callable[[], int | None]) -> None:
        """``sm_clock_mhz`` reads the SM clock; it is called while the GPU is busy."""
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sm_clock_mhz = sm_clock_mhz

    def warm_clocks(self, seconds: float = WARM_UP_SECONDS) -> None:
        """Keep the tensor cores busy for ``seconds``, so that what follows runs at settled clocks."""
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()

    def time(self, launch: Callable[[], None]) -> Timing:
        """Median of 10 to 100 samples of ``launch`` in ms, each with a cold L2.

        Raises whatever ``launch`` or the GPU raises.
        """
        estimate = median(self._samples(launch, _WARM_LAUNCHES)[0])
        count = int(min(MAX_SAMPLES, max(MIN_SAMPLES, SAMPLE_MS / max(estimate, 1e-3))))
        samples, clock = self._samples(launch, count)
        interval = median_interval(samples)
        return Timing(
            ms=median(samples),
            ms_lo=interval[0] if interval else None,
            ms_hi=interval[1] if interval else None,
            samples_ms=tuple(samples),
            samples_round=(0,) * len(samples),
            sm_clock_mhz=clock,
            measured_at=datetime.now(UTC),
        )

    def _samples(self, launch: Callable[[], None], count: int) -> tuple[list[float], int | None]:
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for start, end in zip(starts, ends):
            # Zeroing takes longer than a launch costs the host, so launches queue up behind it and
            # the host's own time is not in the sample.
            self._flush.zero_()
            start.record()
            launch()
            end.record()
        clock = self._sm_clock_mhz()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends)], clock


def time_sdpa(timer: Timer, problem: Problem, inputs: Inputs) -> list[SdpaTiming]:
    """Each forced SDPA backend on the problem's own inputs; a refusal is a reason, not a time."""
    return [_time_backend(timer, name, problem, inputs) for name in _SDPA_BACKENDS]


def _time_backend(timer: Timer, name: str, problem: Problem, inputs: Inputs) -> SdpaTiming:
    def launch() -> None:
        F.scaled_dot_product_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            is_causal=problem.causal,
            enable_gqa=problem.H != problem.H_kv,
        )

    with sdpa_kernel([_SDPA_BACKENDS[name]]):
        try:
            launch()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if not _is_refusal(error):
                raise
            return SdpaTiming(name, None, str(error).strip().splitlines()[0])
        return SdpaTiming(name, timer.time(launch).ms, None)


def _is_refusal(error: RuntimeError) -> bool:
    """torch's answer when a forced backend does not take the inputs."""
    text = str(error)
    return "No available kernel" in text or "cuDNN" in text or "not support" in text
