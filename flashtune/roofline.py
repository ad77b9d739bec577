"""The articles' roofline: operations, bytes, and the time that each ceiling alone would take.

A kernel's intensity at a level of memory is operations over the bytes that the level moves; at a
given intensity nothing is faster than bandwidth x intensity, nor than the tensor cores' peak. The
counts are those of :mod:`flashtune.operations`. Nothing here is a measurement; ceilings may be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.machine import clock_mhz, machine
from flashtune.operations import operations
from flashtune.records import Config, Problem


@dataclass(frozen=True)
class Roofs:
    """A card's ceilings. ``tensor_tflops`` is 10^12 operations a second in the problem's dtype,
    None where no table has it; bandwidths are 10^9 bytes a second."""

    tensor_tflops: float | None
    dram_gb_s: float
    l2_gb_s: float
    measured: bool  # tensor and DRAM, in this run; L2 always is an architecture's figure


def published_roofs(gpu: GpuSpec, dtype: str) -> Roofs:
    """Ceilings from tables: the tensor rate at the data sheet's clock, DRAM as published (or by
    the driver), and what the SMs take from L2 a clock (machine.py has the sources)."""
    rate = gpu.tensor_flop_per_clock_per_sm(dtype)
    return Roofs(
        tensor_tflops=None if rate is None else rate * gpu.sms * gpu.boost_clock_mhz * 1e-6,
        dram_gb_s=gpu.dram_gb_s,
        l2_gb_s=machine(gpu).l2_bytes * gpu.sms * clock_mhz(gpu) * 1e-3,
        measured=False,
    )


def measured_roofs(published: Roofs, matmul_tflops: float, copy_gb_s: float) -> Roofs:
    """The same with what a matmul and a copy reached on the card."""
    return replace(published, tensor_tflops=matmul_tflops, dram_gb_s=copy_gb_s, measured=True)


@dataclass(frozen=True)
class Roofline:
    """One launch against the ceilings. Operations count a multiply-add as 2."""

    problem: Problem
    kernel: str
    config: Config
    needed: float  # operations: two multiplies of N x N_k x D a head, half of it when causal
    executed: float  # with what the config repeats, the diagonal and padding
    dram_bytes: int  # Q, K and V read once, O and L written once
    l2_bytes: float  # Q once, K and V once for each query tile that visits them
    tensor_ms: float | None  # what each ceiling alone would take; None: the ceiling is not known
    dram_ms: float
    l2_ms: float
    dram_ridge: float | None  # operations a byte below which DRAM is the lower ceiling

    @property
    def dram_intensity(self) -> float:
        """Useful operations a byte of DRAM: N / 2 for bf16 without a mask, but for L."""
        return self.needed / self.dram_bytes

    @property
    def l2_intensity(self) -> float:
        """Executed operations a byte from L2, as the profiler places its dot."""
        return self.executed / self.l2_bytes

    @property
    def bound(self) -> str:
        """The ceiling that takes the longest alone."""
        times = {"tensor cores": self.tensor_ms or 0.0, "DRAM": self.dram_ms, "L2": self.l2_ms}
        return max(times, key=lambda name: times[name])


def roofline(
    problem: Problem, kernel: Kernel, config: Config, gpu: GpuSpec, roofs: Roofs
) -> Roofline:
    """Count one launch of ``kernel`` with ``config`` and hold it against ``roofs``."""
    counted = operations(problem, config, gpu, kernel)
    dram_bytes = int(counted.dram_read_bytes + counted.dram_write_bytes)
    tensor = roofs.tensor_tflops
    return Roofline(
        problem=problem,
        kernel=kernel.name,
        config=config,
        needed=counted.tensor_needed,
        executed=counted.tensor_executed,
        dram_bytes=dram_bytes,
        l2_bytes=counted.l2_read_bytes,
        tensor_ms=None if tensor is None else counted.tensor_executed / tensor * 1e-9,
        dram_ms=dram_bytes / roofs.dram_gb_s * 1e-6,
        l2_ms=counted.l2_read_bytes / roofs.l2_gb_s * 1e-6,
        dram_ridge=None if tensor is None else tensor * 1e3 / roofs.dram_gb_s,
    )
