"""The frozen records of what a sweep found out: checks, timings, rows, files, recommendations."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from flashtune.records import Config, Problem, Status

MEASURED = frozenset({Status.TIMED, Status.SCREENED})
"""Statuses whose rows carry times from a GPU."""


@dataclass(frozen=True)
class Check:
    """A launch against the references. Errors are absolute; None: a NaN or Inf took its place."""

    ok: bool
    reason: str | None
    max_abs_err: float | None  # O against an fp32 reference
    sdpa_abs_err: float | None  # SDPA's own O against the same reference
    lse_abs_err: float | None  # L against logsumexp of the scaled scores


@dataclass(frozen=True)
class Checked:
    """What a checked launch came to: ``failure`` None where all is well."""

    failure: Status | None
    reason: str | None
    check: Check | None  # None: it never answered
    config: Config | None = None  # whose launch it was, where several ran and it is known


@dataclass(frozen=True)
class Conditions:
    """The card's state at one moment. None where it does not say."""

    sm_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    throttle: str | None

    @property
    def held(self) -> bool:
        """Whether something keeps the clock down that nobody asked for, as a power cap does."""
        reasons = set((self.throttle or "none").split(", "))
        return bool(reasons - {"none", "idle", "application clocks", "display clocks"})


@dataclass(frozen=True)
class Timing:
    """Samples of one config on one problem, in milliseconds."""

    ms: float  # median
    ms_lo: float | None  # 95% interval of the median; None with too few samples
    ms_hi: float | None
    samples_ms: tuple[float, ...]
    samples_round: tuple[int, ...]  # which interleaved round each sample belongs to
    sm_clock_mhz: int | None
    measured_at: datetime


@dataclass(frozen=True)
class SdpaTiming:
    """One forced SDPA backend on a problem's own inputs: ``ms`` or the ``reason`` it refused."""

    backend: str  # flash or cudnn
    ms: float | None
    reason: str | None


@dataclass(frozen=True)
class Row:
    """One problem x config of the results file, its columns in order. None is 'not measured'."""

    run_id: str
    status: Status
    reason: str | None
    kernel: str
    gpu: str
    cc: str
    dtype: str
    B: int
    H: int
    H_kv: int
    N: int
    N_k: int
    D: int
    causal: bool
    q_tile: int
    k_tile: int
    num_warps: int
    num_stages: int
    shared_predicted: int | None = None
    shared: int | None = None
    shared_limit: int | None = None
    regs: int | None = None
    spills: int | None = None
    blocks_per_sm: int | None = None
    waves: float | None = None
    compile_s: float | None = None
    code_hash: str | None = None
    same_as: str | None = None
    predicted_ms: float | None = None
    ms: float | None = None
    ms_lo: float | None = None
    ms_hi: float | None = None
    tflops: float | None = None
    samples_ms: tuple[float, ...] | None = None
    samples_round: tuple[int, ...] | None = None
    max_abs_err: float | None = None
    sdpa_abs_err: float | None = None
    lse_abs_err: float | None = None
    sm_clock_mhz: int | None = None
    measured_at: datetime | None = None
    maxnreg: int | None = None  # None: the config leaves it open, as for warp_specialize
    warp_specialize: bool | None = None

    @property
    def config(self) -> Config:
        return Config(
            self.q_tile, self.k_tile, self.num_warps, self.num_stages, self.maxnreg,
            self.warp_specialize,
        )  # fmt: skip

    @property
    def problem(self) -> Problem:
        return Problem(self.B, self.H, self.H_kv, self.N, self.N_k, self.D, self.causal, self.dtype)


@dataclass(frozen=True)
class Provenance:
    """What must agree before rows of two runs may share a file, and what a reader wants to know."""

    gpu: str  # the driver's name, or the target's row in configs/gpus.toml
    cc: str
    sms: int
    measured: bool  # False: no GPU was present, nothing was timed
    driver: str | None
    torch: str | None
    triton: str
    cuda: str | None
    python: str
    kernel: str
    kernel_hash: str  # of the kernel's source
    sm_clock_mhz: int | None  # the card's maximum
    mem_clock_mhz: int | None
    power_limit_w: float | None
    git_commit: str | None  # with "-dirty" where the tree had changes

    @property
    def triton_release(self) -> tuple[int, int]:
        """(3, 6) for 3.6.0: what the budget's rules go by."""
        major, minor = self.triton.split(".")[:2]
        return int(major), int(minor)

    def differences(self, other: Provenance) -> list[str]:
        """What forbids continuing ``other``'s file: one 'name: theirs, here ours' a difference."""
        names = (
            "gpu", "cc", "sms", "measured", "driver", "torch", "triton", "kernel", "kernel_hash",
        )  # fmt: skip
        return [
            f"{name}: {getattr(other, name)} there, {getattr(self, name)} here"
            for name in names
            if getattr(other, name) != getattr(self, name)
        ]


@dataclass(frozen=True)
class RunInfo:
    """One run that contributed rows to a results file."""

    run_id: str
    command: str
    started: datetime
    git_commit: str | None  # the source it ran, with "-dirty" where the tree had changes


@dataclass(frozen=True)
class SdpaResult:
    """An SDPA timing and the problem and run it belongs to."""

    run_id: str
    problem: Problem
    timing: SdpaTiming


@dataclass(frozen=True)
class Tie:
    """A config that the race could not tell from the leader: behind it by this fraction of its
    time, and by no more than ``at_most`` with the race's confidence. ``equal``: that is little
    enough for the choice not to matter."""

    config: Config
    behind: float
    at_most: float
    equal: bool


@dataclass(frozen=True)
class RaceVerdict:
    """What a problem's race decided. Times in ms; the interval holds the median with 95%."""

    run_id: str
    problem: Problem
    chosen: Config
    leader: Config  # the smallest mean; the choice is it, or one shown equal and near to it
    ms: float  # of the chosen one
    ms_lo: float | None
    ms_hi: float | None
    rounds: int  # that count
    ties: tuple[Tie, ...]
    conditions: tuple[Conditions, ...]  # after each of them


@dataclass(frozen=True)
class SweepFile:
    """A results file in memory: its rows and everything the file's metadata says."""

    provenance: Provenance
    runs: tuple[RunInfo, ...]
    sdpa: tuple[SdpaResult, ...]
    notes: tuple[str, ...]  # what a reader must know: interpreter check, nothing was measured …
    rows: tuple[Row, ...]
    verdicts: tuple[RaceVerdict, ...] = ()  # the last one of each problem that was raced


@dataclass(frozen=True)
class Recommended:
    """One config of a recommended list and what it is worth."""

    config: Config
    share_of_best: tuple[tuple[Problem, float], ...]  # best ms / this ms, for each problem it ran
    kept_for: str | None = None  # why it is in the list when no problem needed it


@dataclass(frozen=True)
class Recommendation:
    """A short list of configs that serves every problem, with its worst loss."""

    gpu: str
    cc: str
    kernel: str
    measured: bool
    configs: tuple[Recommended, ...]
    winners: tuple[tuple[Problem, Config, float], ...]  # per problem: the best config and its ms
    worst_loss: float | None  # 1 - the smallest share of the best that the list reaches
    serves: tuple[tuple[str, int], ...]  # (dtype, D) with at least one config that fits
    unserved: tuple[tuple[str, int], ...]
    barred: tuple[tuple[Config, str], ...] = ()  # never listed, and the row that forbids it
    # Problems without a single winner: who cannot be told apart, and within which fraction.
    undecided: tuple[tuple[Problem, tuple[Config, ...], float], ...] = ()
