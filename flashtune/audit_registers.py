"""How far the predicted registers and spills can be trusted: a random sample, compiled to the end.

ptxas has the last word on registers, so a case takes a second where ``audit_budget`` takes a tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashtune.audit_budget import Case, draw
from flashtune.budget import Budget, assess, verdict
from flashtune.compiler import CompileJob
from flashtune.cost import LIKELY_SPILLS
from flashtune.fan_out import compile_all
from flashtune.gpu import GpuSpec
from flashtune.records import Compiled, OutClass

_MOST_STAGES = 5  # of a case: more only make shared memory scarcer
_REFUSED = "C7602"  # ptxas: an instruction needs more registers than the cap


@dataclass(frozen=True)
class RegisterFinding:
    """A case with the prediction and the compiler's answer."""

    case: Case
    budget: Budget
    predicted_refusal: bool  # ptxas will refuse it
    compiled: Compiled

    @property
    def refused(self) -> bool:
        return _REFUSED in (self.compiled.reason or "")

    @property
    def called(self) -> bool:
        """Whether spilling was predicted."""
        return self.budget.registers.spill_probability >= LIKELY_SPILLS

    @property
    def spilled(self) -> bool:
        return bool(self.compiled.spills)

    @property
    def free(self) -> bool:
        """Whether the cap did not decide how many registers are used."""
        regs = self.compiled.regs
        return regs is not None and not self.spilled and regs < self.budget.register_cap - 3

    @property
    def in_range(self) -> bool:
        regs = self.compiled.regs
        return regs is not None and (
            self.budget.registers.low <= regs <= self.budget.registers.high
        )


@dataclass(frozen=True)
class RegisterScore:
    """Counts over findings. ``false_alarms`` did not spill and were said to."""

    total: int  # that compiled
    free: int  # of them, those whose registers no cap decided
    in_range: int  # of the free ones
    spilled: int
    recalled: int  # of those that spilled, said to
    false_alarms: int
    refused: int  # by ptxas, for want of registers
    refusals_predicted: int  # of them
    wrong_refusals: int  # predicted, and compiled all the same

    @property
    def recall(self) -> float | None:
        """Of the configs that spill, the share that was predicted to; None where none does."""
        return self.recalled / self.spilled if self.spilled else None

    @property
    def false_alarm_rate(self) -> float | None:
        """Of the configs that do not spill, the share that was predicted to."""
        clean = self.total - self.spilled
        return self.false_alarms / clean if clean else None


def draw_fitting(
    count: int, seed: int, gpus: Sequence[GpuSpec], triton: tuple[int, int]
) -> list[tuple[Case, Budget]]:
    """``count`` random cases of aligned inputs that shared memory does not rule out."""
    found: list[tuple[Case, Budget]] = []
    batch = 0
    while len(found) < count:
        for case in draw(4 * count, seed * 1_000 + batch, gpus):
            if case.odd_address or case.odd_strides or case.config.num_stages > _MOST_STAGES:
                continue
            budget = assess(case.problem, case.config, case.gpu, case.kernel, triton)
            if budget.shared is not None and budget.shared <= budget.shared_limit:
                found.append((case, budget))
        batch += 1
    return found[:count]


def audit(
    cases: Sequence[tuple[Case, Budget]], n_jobs: int, done: Callable[[], None] = lambda: None
) -> list[RegisterFinding]:
    """Compile every case with the installed Triton; ``done`` is called after each."""
    jobs = {CompileJob(c.kernel, c.problem, c.config, c.gpu.cc_number): (c, b) for c, b in cases}
    findings = []
    for job, compiled in compile_all(list(jobs), n_jobs):
        case, budget = jobs[job]
        judged = verdict(budget, case.gpu, exhaustive=True)
        refusal = judged.out is OutClass.CANNOT
        findings.append(RegisterFinding(case, budget, refusal, compiled))
        done()
    return sorted(findings, key=lambda f: (f.case.gpu.cc_number, str(f.case)))


def score(findings: Sequence[RegisterFinding]) -> RegisterScore:
    """The counts of some findings."""
    answered = [f for f in findings if f.compiled.regs is not None]
    free = [f for f in answered if f.free]
    refused = [f for f in findings if f.refused]
    return RegisterScore(
        total=len(answered),
        free=len(free),
        in_range=sum(f.in_range for f in free),
        spilled=sum(f.spilled for f in answered),
        recalled=sum(f.spilled and f.called for f in answered),
        false_alarms=sum(f.called and not f.spilled for f in answered),
        refused=len(refused),
        refusals_predicted=sum(f.predicted_refusal for f in refused),
        wrong_refusals=sum(f.predicted_refusal for f in answered),
    )


def by_target(findings: Sequence[RegisterFinding]) -> dict[str, RegisterScore]:
    """The counts for each compute capability."""
    ccs = dict.fromkeys(f.case.gpu.cc for f in findings)
    return {cc: score([f for f in findings if f.case.gpu.cc == cc]) for cc in ccs}
