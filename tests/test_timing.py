"""Timing on a simulated host and GPU; what it gives on a card is in benchmarks/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from flashtune.errors import FlashtuneError
from flashtune.timing import Lead, Timer

FLUSH_US, KERNEL_US = 57.0, 14.0  # on an H200: 256 MB zeroed, and N=512


class Machine:
    """When host and GPU are done with what they were asked so far, in us."""

    def __init__(self, host_us: Callable[[int], float] = lambda n: 50.0) -> None:
        """Launch ``n`` takes the host ``host_us(n)``, and all else no time."""
        self.host = self.gpu = 0.0
        self.kernels = self.launches = 0
        self.host_us = host_us

    def kernel(self, us: float) -> None:
        self.gpu = max(self.gpu, self.host) + us
        self.kernels += 1

    def launch(self) -> None:
        """One launch in four takes longer, by how many kernels went before."""
        self.host += self.host_us(self.launches)
        self.launches += 1
        self.kernel(KERNEL_US + (self.kernels % 4 == 0))


class Event:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.at = 0.0

    def record(self) -> None:
        self.at = max(self.machine.gpu, self.machine.host)

    def query(self) -> bool:
        return self.at <= self.machine.host

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) / 1e3


class Buffer:
    def __init__(self, machine: Machine, us: float) -> None:
        self.machine = machine
        self.us = us

    def chunk(self, parts: int) -> tuple[Buffer, ...]:
        return (Buffer(self.machine, self.us / parts),) * parts

    def zero_(self) -> None:
        self.machine.kernel(self.us)


def timer_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Timer:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: Buffer(machine, FLUSH_US))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(machine))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Timer(lambda: None)


@pytest.mark.parametrize("at_a_time", [None, 1, 2, 3, 4])
@pytest.mark.parametrize("configs", [1, 2, 3, 4, 7])
def test_each_launch_comes_to_all_four_places(
    configs: int, at_a_time: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    launches = [machine.launch] * configs
    for samples in timer_on(machine, monkeypatch).in_turns(launches, 64, at_a_time):
        times = Counter(round(1e3 * ms, 3) for ms in samples)
        slow = times.pop(KERNEL_US + 1)
        assert times == {KERNEL_US: 64 - slow}
        assert slow == 16 or (at_a_time == 3 and 14 <= slow <= 18)


@pytest.mark.parametrize("host_us", [20, 80, 93, 250, 1000])
def test_no_sample_holds_the_hosts_time(host_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda _: host_us)
    samples = timer_on(machine, monkeypatch).samples(machine.launch, 128)
    assert len(samples) == 128
    assert {round(1e3 * ms, 3) for ms in samples} == {KERNEL_US, KERNEL_US + 1}


def test_a_hopeless_host_is_said_to_be_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda _: 1e5)
    with pytest.raises(FlashtuneError, match="host is too slow"):
        timer_on(machine, monkeypatch).samples(machine.launch, 5)
    assert machine.launches < 300


def launched(count: int, host_us: Callable[[int], float]) -> tuple[list[float], float]:
    """How long the GPU was behind, in us, at each launch that counts, and the mean number of
    flushes."""
    lead, machine = Lead(), Machine(host_us)
    behind, flushed = [], 0
    for _ in range(count):
        flushes = 1 + lead.burst()
        for _ in range(flushes):
            machine.kernel(FLUSH_US)
        flushed += flushes
        start = Event(machine)
        start.record()
        machine.launch()
        if lead.queued(start):
            behind.append(start.at - machine.host)
    return behind, flushed / count


@pytest.mark.parametrize("host_us", [20, 60, 80, 120, 250, 1000])
def test_the_gpu_stays_behind_a_steady_host(host_us: float) -> None:
    behind, flushes = launched(1000, lambda _: host_us)
    assert len(behind) >= 650
    assert min(behind) > 4 * (FLUSH_US + KERNEL_US)
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
