"""Whether the GPU stays behind the host, on a simulated host and GPU. The rest needs a card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from flashtune.timing import Lead

FLUSH_US, KERNEL_US = 57.0, 14.0  # on an H200: 256 MB zeroed, and N=512


@dataclass
class Clocks:
    """When each is done with what it was asked so far."""

    host: float = 0.0
    gpu: float = 0.0


@dataclass
class Start:
    clocks: Clocks
    at: float

    def query(self) -> bool:
        return self.at <= self.clocks.host


def launched(count: int, host_us: Callable[[int], float]) -> tuple[list[float], float]:
    """How long the GPU was behind, in us, at each launch that counts, and the mean number of
    flushes, where launch ``n`` takes the host ``host_us(n)``."""
    lead, clocks = Lead(), Clocks()
    behind, flushed = [], 0
    for n in range(count):
        flushes = 1 + lead.burst()
        begin = max(clocks.gpu, clocks.host) + flushes * FLUSH_US
        clocks.host += host_us(n)
        clocks.gpu = max(begin, clocks.host) + KERNEL_US
        flushed += flushes
        if lead.queued(Start(clocks, begin)):
            behind.append(begin - clocks.host)
    return behind, flushed / count


@pytest.mark.parametrize("host_us", [20, 60, 80, 120, 250, 1000])
def test_the_gpu_stays_behind_a_steady_host(host_us: float) -> None:
    behind, flushes = launched(1000, lambda _: host_us)
    assert len(behind) >= 650
    assert min(behind) > 3 * (FLUSH_US + KERNEL_US) - host_us
    needed = max(1.0, (host_us - KERNEL_US) / FLUSH_US)
    assert flushes <= 1.5 * needed


def test_a_host_that_was_busy_once_is_forgiven() -> None:
    behind, flushes = launched(1000, lambda n: 3000 if n == 10 else 50)
    assert len(behind) >= 980
    assert flushes < 1.2


def test_a_host_that_is_often_disturbed() -> None:
    behind, flushes = launched(1000, lambda n: 1500 if n % 10 == 0 else 50)
    assert len(behind) >= 850
    assert flushes < 4


def test_a_hopeless_host_is_not_waited_for_without_end() -> None:
    behind, flushes = launched(200, lambda _: 1e5)
    assert behind == []
    assert flushes <= 256 / 5 + 2
