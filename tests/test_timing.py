"""How many cache flushes go before a launch, on a simulated host and GPU. The rest needs a card."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flashtune.timing import Lead

FLUSH_US, KERNEL_US = 57.0, 14.0  # on an H200: 256 MB zeroed, and N=512


def launched(count: int, host_us: Callable[[int], float]) -> tuple[int, float]:
    """Launches that were queued in time, and the mean number of flushes, where launch ``n`` takes
    the host ``host_us(n)``."""
    lead = Lead()
    host = gpu = 0.0  # when each is done with what it was asked so far
    clean = flushed = 0
    for n in range(count):
        start = max(gpu, host) + lead.flushes * FLUSH_US  # the GPU records it after the flushes
        host += host_us(n)
        in_time = host < start
        gpu = max(start, host) + KERNEL_US
        flushed += lead.flushes
        lead.saw(in_time)
        clean += in_time
    return clean, flushed / count


@pytest.mark.parametrize("host_us", [20, 60, 80, 120, 250, 1000])
def test_the_gpu_hardly_ever_waits_for_a_steady_host(host_us: float) -> None:
    clean, flushes = launched(1000, lambda _: host_us)
    assert clean >= 900
    needed = max(1.0, (host_us - KERNEL_US) / FLUSH_US)
    assert flushes <= 2 * needed


def test_a_host_that_was_busy_once_is_forgiven() -> None:
    clean, flushes = launched(1000, lambda n: 3000 if n == 100 else 50)
    assert clean >= 940
    assert flushes < 2.5


def test_a_host_that_is_often_disturbed() -> None:
    clean, flushes = launched(1000, lambda n: 400 if n % 10 == 0 else 50)
    assert clean >= 850
    assert flushes < 4


def test_a_hopeless_host_is_not_waited_for_without_end() -> None:
    clean, flushes = launched(200, lambda _: 1e5)
    assert clean == 0
    assert flushes <= 64
