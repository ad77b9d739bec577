"""The frozen records that say what to compute and how: problems, configs, verdicts, compiles.

What a sweep found out is in results.py. Nothing here imports the house.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Input dtypes that the kernels take, and their size in bytes."""


FURTHER_AXES = ("maxnreg", "warp_specialize")
"""The axes that a config may leave open, in the order of its text."""


class Status(StrEnum):
    """How a config ended. Every row has exactly one."""

    PRUNED = "pruned"  # never compiled: the budget's class and reason
    COMPILE_FAILED = "compile_failed"  # the compiler's one line
    OUT_OF_RESOURCES = "out_of_resources"  # what it required and the limit
    CRASHED = "crashed"  # the launch died, or failed in a way nobody has classified
    TIMEOUT = "timeout"
    WRONG = "wrong"  # largest error and where it is
    SCREENED = "screened"  # timed briefly: too slow to matter
    TIMED = "timed"
    COMPILED = "compiled"  # no GPU present: nothing was timed
    RANKED = "ranked"  # not compiled: the order puts it too low to be worth it


class OutClass(StrEnum):
    """Why the budget leaves a config out; the two are never mixed."""

    CANNOT = "cannot"  # certain not to compile or launch
    HOPELESS = "hopeless"  # runs, but is out for a stated rule with evidence


@dataclass(frozen=True, order=True)
class Problem:
    """One attention forward: Q is (B, H, N, D), K and V are (B, H_kv, N_k, D)."""

    B: int
    H: int
    H_kv: int
    N: int
    N_k: int
    D: int
    causal: bool
    dtype: str

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def padded_D(self) -> int:
        """D rounded up to a power of two, at least 16: what a tile row occupies in the kernel."""
        return max(16, 1 << (self.D - 1).bit_length())

    @property
    def flops(self) -> float:
        """The articles' count: two matmuls of N x N_k x D multiply-adds, halved when causal."""
        full = 4.0 * self.B * self.H * self.N * self.N_k * self.D
        return full / 2 if self.causal else full

    def tflops(self, ms: float) -> float:
        return self.flops / ms * 1e-9

    def __str__(self) -> str:
        heads = f"H={self.H}" if self.H == self.H_kv else f"H={self.H}/{self.H_kv}"
        length = f"N={self.N}" if self.N == self.N_k else f"N={self.N}x{self.N_k}"
        mask = "causal" if self.causal else "full"
        return f"B={self.B} {heads} {length} D={self.D} {mask} {self.dtype}"


@total_ordering
@dataclass(frozen=True)
class Config:
    """What the tuner chooses, written ``64x32x4x3`` everywhere. Two further axes are None where
    they are left open: ``64x32x4x3:maxnreg=168,warp_specialize=off`` sets both."""

    q_tile: int
    k_tile: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # the most registers that ptxas may give a thread; None: it chooses
    warp_specialize: bool | None = None  # for kernels that have it; None: the kernel's own default

    @property
    def further(self) -> dict[str, int | bool]:
        """The further axes that are set."""
        values = {name: getattr(self, name) for name in FURTHER_AXES}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def plain(self) -> Config:
        """The same tiles, warps and stages with the further axes left open."""
        return Config(self.q_tile, self.k_tile, self.num_warps, self.num_stages)

    def __str__(self) -> str:
        text = f"{self.q_tile}x{self.k_tile}x{self.num_warps}x{self.num_stages}"
        set_to = {True: "on", False: "off"}
        further = [
            f"{name}={set_to[value] if isinstance(value, bool) else value}"
            for name, value in self.further.items()
        ]
        return f"{text}:{','.join(further)}" if further else text

    def _key(self) -> tuple[int, ...]:
        """All axes as numbers, an open one below every value."""
        maxnreg = -1 if self.maxnreg is None else self.maxnreg
        warp_specialize = -1 if self.warp_specialize is None else self.warp_specialize
        return (
            self.q_tile, self.k_tile, self.num_warps, self.num_stages, maxnreg, warp_specialize,
        )  # fmt: skip

    def __lt__(self, other: Config) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        # Not the fields' own: before Python 3.12 None's hash, and so the order of a set of configs,
        # differs from process to process.
        return hash(self._key())


@dataclass(frozen=True)
class Verdict:
    """The budget's answer for one config: kept when ``out`` is None."""

    out: OutClass | None
    rule: str | None  # the rule's short name
    reason: str | None  # one sentence with the numbers

    @property
    def kept(self) -> bool:
        return self.out is None


KEEP = Verdict(out=None, rule=None, reason=None)


@dataclass(frozen=True)
class Compiled:
    """The compiler's facts about one config, or why there are none (``failure`` is set)."""

    config: Config
    shared: int | None = None  # bytes a block, metadata.shared
    regs: int | None = None  # registers a thread
    warps: int | None = None  # of a block, with those that warp specialisation adds
    spills: int | None = None  # Triton's n_spills: stack frame bytes / 4
    seconds: float | None = None  # wall time of a fresh compile; None when the cache had it
    code_hash: str | None = None  # of the machine code, its shared bytes and warps
    failure: Status | None = None  # COMPILE_FAILED, CRASHED or TIMEOUT
    reason: str | None = None
