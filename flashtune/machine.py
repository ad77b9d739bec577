"""What one SM does in a clock: the cost model's constants, each with its meaning and its source.

Most are looked up. Those in CALIBRATED were fitted to the recorded H200 sweep of v6 at D=64 (bf16,
eight shapes; ``calibrate``) and rounded; other architectures keep those values, for want of
exhaustive sweeps of theirs, so their times are rougher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtune.gpu import GpuSpec


@dataclass(frozen=True)
class Machine:
    """Rates of one SM, and the delays that overlap cannot hide."""

    # Rates, from documents.
    tensor_flop: int
    """Dense tensor operations a clock with bf16 inputs, where the card's row does not say."""
    mma_v2_share: float
    """Of the tensor rate, what mma.sync reaches. 1 before Hopper. Hopper: 0.63, as measured by Luo
    et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
    Microbenchmarking" (2024). Datacentre Blackwell: assumed to run it as fast as Hopper does."""
    fp32_lanes: int
    """fp32 instructions' results a clock: CUDA programming guide, arithmetic throughput table."""
    special: int
    """exp2 results a clock (the MUFU, 4 in each of 4 sub-partitions): the same table."""
    shared_bytes: int
    """Shared memory moves 32 banks of 4 bytes a clock (the same guide)."""
    lsu_lanes: int
    """Threads whose shuffle or shared-memory instruction starts a clock: the load/store units in
    the architecture whitepapers' drawings of an SM, 4 a sub-partition or 8."""
    l2_bytes: float
    """From L2 a clock and SM. A100: 5,120 a clock (its whitepaper) over 108 SMs. Hopper: the 64 of
    an SM's port, since no lower limit showed in the recorded sweep (its 16-row tiles drew 37). Ada:
    the articles' 24 slices of 64 bytes at 2.02 GHz, over 56 SMs at 2.52 GHz; other consumer cards
    are taken to be like it."""

    tensor_share: float
    """Of the tensor rate, what long runs sustain: cuBLAS on an 8192^3 bf16 product reached 740 of
    the H200's 1,070 TFLOP/s at 1.98 GHz; a Triton product of that size reached 97.6% of an RTX
    4070 SUPER's peak under the profiler (the articles' Round 2)."""

    # Calibrated on the recorded H200 sweep (CALIBRATED).
    launch_us: float = 6.0
    """A launch that does nothing, as an event pair times it after the L2 was emptied."""
    start_cycles: float = 2700.0
    """A program's start and end: addresses, Q's tile from DRAM, the last sums, O's store."""
    load_cycles: float = 940.0
    """From issuing a tile's loads to its bytes being in shared memory, under load."""
    barrier_cycles: float = 17.0
    """One barrier, for every warp that it holds up."""
    lockstep: float = 0.3
    """How far barriers keep a block's warps in step, so that they want the same unit at the same
    time: 0 not at all, 1 wholly."""
    masked_step: float = 0.6
    """What a step of the second, masked loop takes longer: it compares, and is too short to fill
    the pipeline."""
    crosstalk: float = 0.25
    """Of the other units' busy time, what is not hidden behind the busiest unit's."""
    sharpness: float = 2.75
    """How suddenly waiting for a unit takes over from waiting for one's own results: the exponent
    that joins the two times, 1 for their sum and infinity for the longer one."""


CALIBRATED = (
    "launch_us", "start_cycles", "load_cycles", "barrier_cycles", "lockstep", "masked_step",
    "crosstalk", "sharpness",
)  # fmt: skip
"""The constants that were fitted to times; the others were looked up."""

_AMPERE = Machine(
    tensor_flop=512, mma_v2_share=1.0, fp32_lanes=128, special=16, shared_bytes=128,
    lsu_lanes=16, l2_bytes=22.0, tensor_share=0.976,
)  # fmt: skip
_HOPPER = Machine(
    tensor_flop=4096, mma_v2_share=0.63, fp32_lanes=128, special=16, shared_bytes=128,
    lsu_lanes=32, l2_bytes=64.0, tensor_share=0.7,
)  # fmt: skip
_BY_CC = {
    80: replace(_AMPERE, tensor_flop=2048, fp32_lanes=64, lsu_lanes=32, l2_bytes=47.4),
    86: _AMPERE,
    89: _AMPERE,
    90: _HOPPER,
    100: replace(_HOPPER, tensor_flop=8192, mma_v2_share=0.315),
    120: _AMPERE,
}
# MHz under attention's load, where somebody recorded it; elsewhere the data sheet's boost clock.
_CLOCKS = {
    "h200": 1980,  # sm_clock_mhz of every row of the recorded sweep
    "rtx-4070-super": 2640,  # the articles: 2.61 to 2.68 GHz at N = 4096
}


def machine(gpu: GpuSpec) -> Machine:
    """The card's constants: its architecture's."""
    known = [cc for cc in _BY_CC if cc <= gpu.cc_number]
    return _BY_CC.get(gpu.cc_number, _BY_CC[max(known, default=80)])


def clock_mhz(gpu: GpuSpec) -> float:
    """The SM clock to expect while a kernel runs."""
    return float(_CLOCKS.get(gpu.name, gpu.boost_clock_mhz))
