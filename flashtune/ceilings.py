"""A card's ceilings as it reaches them: a large matmul and a copy, and the clock meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flashtune.bench import Ceilings
from flashtune.check import TORCH_DTYPES, fp32_matmuls
from flashtune.driver import Clocks
from flashtune.timing import Timer

MATMUL_SIZE = 8192  # the articles' ceiling: cuBLAS on 8192^3
COPY_BYTES = 512 << 20  # many times the largest L2
_MATMUL_WARM_S = 0.1  # longer, and a large card lowers its clock for the power that they draw


class ClockLog:
    """Reads the card's state while it is busy, for the Timer, and remembers what it said."""

    def __init__(self, read: Callable[[], Clocks | None]) -> None:
        self._read = read
        self.seen: list[Clocks] = []

    def __call__(self) -> int | None:
        now = self._read()
        if now is None:
            return None
        self.seen.append(now)
        return now.sm_clock_mhz

    def sm_clock_mhz(self) -> tuple[int, int] | None:
        """The lowest and the highest; None where the card did not say."""
        mhz = [clocks.sm_clock_mhz for clocks in self.seen if clocks.sm_clock_mhz is not None]
        return (min(mhz), max(mhz)) if mhz else None

    def throttle(self) -> tuple[str, ...]:
        """Every reason given for a clock that was held down."""
        held = {clocks.throttle for clocks in self.seen} - {None, "none", "idle"}
        return tuple(sorted(map(str, held)))


def ceilings(timer: Timer, log: ClockLog, dtype: str, runs: int) -> Ceilings:
    """The rates of a large matmul (fp32 as tf32, which is what the kernels use) and a copy.

    Behind everything else: a large card is slower for a while after the power that matmuls draw.
    """
    shape, kind = (MATMUL_SIZE, MATMUL_SIZE), TORCH_DTYPES[dtype]
    a, b = (torch.randn(shape, device="cuda", dtype=kind) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)

    def matmul() -> None:
        torch.matmul(a, b, out=product)

    def copy() -> None:
        target.copy_(source)

    with fp32_matmuls("tf32"):
        timer.warm_clocks(copy)
        log.seen.clear()
        copies = [timer.time(copy).ms for _ in range(runs)]
        timer.warm_clocks(matmul, _MATMUL_WARM_S)
        matmuls = [timer.time(matmul).ms for _ in range(runs)]
    return Ceilings(
        tuple(2.0 * MATMUL_SIZE**3 / ms * 1e-9 for ms in matmuls),
        tuple(2.0 * COPY_BYTES / ms * 1e-6 for ms in copies),
        log.sm_clock_mhz(),
    )
