"""The order of the stages: prune, compile, check, time, store. Emits events, prints nothing."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from flashtune.compiler import CompileJob, specialisation
from flashtune.doubts import doubts, quiet_card
from flashtune.fan_out import compile_all, cpus_beside_launches
from flashtune.gpu import GpuSpec
from flashtune.gpu_process import GpuProcess
from flashtune.hope import GIVEN_UP
from flashtune.interpreter import check_arithmetic
from flashtune.kernels import Kernel, kernel_hash
from flashtune.plan import ProblemPlan
from flashtune.provenance import provenance
from flashtune.records import Compiled, Config, Problem, Status
from flashtune.results import RaceVerdict, Row, RunInfo, SdpaResult, SdpaTiming, SweepFile
from flashtune.rows import RowMaker
from flashtune.store import SweepStore, results_path

if TYPE_CHECKING:
    from flashtune.measure import ProblemRun

NOT_MEASURED = "Nothing was measured: no GPU was present. Rows are compiled or ranked, not timed."
FAILED = frozenset(
    {
        Status.COMPILE_FAILED,
        Status.OUT_OF_RESOURCES,
        Status.CRASHED,
        Status.TIMEOUT,
        Status.WRONG,
    }
)
_PREDICTED = frozenset({Status.PRUNED, Status.RANKED})
"""Statuses that cost nothing to find out again."""


@dataclass(frozen=True)
class SweepRequest:
    """One sweep: problems that share dtype and D, and so one results file."""

    plans: tuple[ProblemPlan, ...]
    kernel: Kernel
    gpu: GpuSpec
    out: Path
    n_jobs: int
    fresh: bool
    retry_failed: bool
    command: str
    exhaustive: bool = False  # time every config by itself, as the articles do, and race none
    gpu_process: GpuProcess | None = None  # None: nothing is timed
    others: tuple[int, ...] | None = None  # processes that were on the card before ours


@dataclass(frozen=True)
class Started:
    """A stage begins, with this many steps to do."""

    stage: str
    total: int


@dataclass(frozen=True)
class Advanced:
    """One step of the current stage is done; ``best`` is the fastest of the problem so far."""

    best: tuple[Problem, Config, float] | None = None


@dataclass(frozen=True)
class Said:
    """Something the user should read."""

    text: str


Event = Started | Advanced | Said
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class SweepResult:
    """Where the results are, and how this run's configs ended."""

    path: Path
    file: SweepFile
    plans: tuple[ProblemPlan, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(plan.problem for plan in self.plans)

    def rows(self) -> tuple[Row, ...]:
        """The rows of the problems that this sweep asked for."""
        asked = set(self.problems)
        return tuple(row for row in self.file.rows if row.problem in asked)

    def verdict(self, problem: Problem) -> RaceVerdict | None:
        """What the race on ``problem`` decided; None where everything was timed by itself."""
        return next((v for v in self.file.verdicts if v.problem == problem), None)

    def tried(self, plan: ProblemPlan) -> list[Row]:
        """The rows of what ``plan`` tried, the most promising first."""
        rows = {row.config: row for row in self.rows() if row.problem == plan.problem}
        return [rows[config] for config in plan.tried if config in rows]

    def counts(self) -> Counter[Status]:
        return Counter(row.status for row in self.rows())


def run(request: SweepRequest, emit: Emit) -> SweepResult:
    """Run the sweep, or go on with one that was stopped. Results that exist are not redone.

    Raises FlashtuneError as the store, the compiler and the GPU worker do; what is done is kept.
    """
    here = provenance(request.gpu, request.kernel.name, kernel_hash(request.kernel))
    first = request.plans[0].problem
    path = results_path(request.out, here.gpu, here.kernel, first.dtype, first.D, here.measured)
    started = datetime.now(UTC)
    run_id = f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    info = RunInfo(run_id, request.command, started, here.git_commit)
    with SweepStore.open(path, here, info, fresh=request.fresh) as store:
        sweep = _Sweep(request, store, run_id, emit)
        sweep.write_predicted()
        if request.gpu_process is not None:
            with request.gpu_process as gpu:
                sweep.measure(gpu)
        else:
            sweep.compile_only()
        file = store.finish()
    return SweepResult(path, file, request.plans)


class _Sweep:
    """One run's state: the request, its open store and what has been compiled."""

    def __init__(self, request: SweepRequest, store: SweepStore, run_id: str, emit: Emit) -> None:
        self.request = request
        self.store = store
        self.emit = emit
        self.make = RowMaker(run_id, request.kernel.name, request.gpu)

    @cached_property
    def compile_s(self) -> dict[tuple[tuple[object, ...], Config], float]:
        """What each binary took to compile: in earlier runs, and in this one, where what was given
        up while it compiled has no row to keep that."""
        return {
            (specialisation(row.problem), row.config): row.compile_s
            for row in self.store.rows()
            if row.compile_s is not None
        }

    def write_predicted(self) -> None:
        """Rows for what is not tried. They never replace a row that cost something to get."""
        for plan in self.request.plans:
            for config, verdict in plan.pruned.items():
                reason = f"{verdict.out}: {verdict.reason}"
                self._add_predicted(self.make.row(plan, config, Status.PRUNED, reason))
            place = len(plan.tried)
            for i, config in enumerate(plan.ranked, start=1):
                reason = f"place {place + i} in the order of promise; the first {place} were tried"
                self._add_predicted(self.make.row(plan, config, Status.RANKED, reason))

    def compile_only(self) -> None:
        """No GPU: compile for the target, check the arithmetic in the interpreter, time nothing."""
        self.store.note(NOT_MEASURED)
        todo = self._todo()
        wrong = self._interpret() if todo else {}
        for plan, _, compiled in self._compile(todo):
            if not self._refused(plan, compiled):
                reason = wrong.get(plan.problem)
                status = Status.COMPILED if reason is None else Status.WRONG
                self.store.add(self.make.of_compiled(plan, compiled, status, reason))

    def measure(self, gpu: GpuProcess) -> None:
        """Compile, check and time on the card: race the configs, or time all of them."""
        todo = self._todo()
        if not todo:
            return
        self._say(*quiet_card(self.request.others))
        plans = {plan.problem: plan for plan, _ in todo}
        gpu.prepare(plans)
        runs = {problem: self._problem_run(gpu, plan) for problem, plan in plans.items()}
        if self.request.exhaustive:
            self._time_all(runs, todo)
        else:
            self._race(gpu, runs, todo)

    def _problem_run(self, gpu: GpuProcess, plan: ProblemPlan) -> ProblemRun:
        from flashtune.measure import ProblemRun  # what it needs is slow to load

        standing = self.store.verdict_for(plan.problem)
        row = None if standing is None else self.store.get(plan.problem, standing.chosen)
        return ProblemRun(gpu, plan, partial(self.make.of_compiled, plan), standing, row)

    def _time_all(
        self,
        runs: Mapping[Problem, ProblemRun],
        todo: Sequence[tuple[ProblemPlan, Config]],
    ) -> None:
        """Compile everything, then check and time problem by problem, as the articles do."""
        ready: dict[Problem, list[Compiled]] = {problem: [] for problem in runs}
        for plan, _, compiled in self._compile(todo):
            if not self._refused(plan, compiled):
                ready[plan.problem].append(compiled)
        self.store.flush()
        place = _places(todo)
        for problem, list_ in ready.items():
            if not list_:
                continue
            self.emit(Started(f"timing {problem}", len(list_)))
            sdpa, failures = runs[problem].sdpa()
            self._add_sdpa(problem, sdpa)
            self._say(*failures)
            same_code = {
                row.code_hash: row
                for row in self.store.rows()
                if row.problem == problem and row.same_as is None and row.status is Status.TIMED
                and row.code_hash is not None
            }  # fmt: skip
            for compiled in sorted(list_, key=lambda c: place[problem, c.config]):
                row = runs[problem].time(compiled, same_code)
                if row.status is Status.TIMED and row.code_hash and row.same_as is None:
                    same_code[row.code_hash] = row
                self.store.add(row)
                self.emit(Advanced(_best(same_code.values())))

    def _race(
        self,
        gpu: GpuProcess,
        runs: Mapping[Problem, ProblemRun],
        todo: Sequence[tuple[ProblemPlan, Config]],
    ) -> None:
        """Look at each config as soon as it is compiled and the GPU process has started; the finals
        run when nothing compiles."""
        place = _places(todo)
        in_order = sorted(todo, key=lambda item: place[item[0].problem, item[1]])
        left = {(plan.problem, config): plan for plan, config in in_order}

        def hopeful(plan: ProblemPlan, config: Config) -> bool:
            return runs[plan.problem].hope.left(config)

        # Again, because hope may come back: what was given up may win after all once later looks
        # have said how far off the model is. Each pass looks at its first config at least.
        while worth_it := [(p, config) for (_, config), p in left.items() if hopeful(p, config)]:
            for plan, config, compiled in self._compile(worth_it, hopeful, gpu.ready):
                if self._refused(plan, compiled):
                    del left[plan.problem, config]
                elif hopeful(plan, config):  # else it was while it compiled, or to another problem
                    del left[plan.problem, config]
                    row = runs[plan.problem].look(compiled)
                    if row is not None:
                        self.store.add(row)
        for (problem, config), plan in left.items():
            reason = runs[problem].hope.shortfall(config)
            self.store.add(self.make.row(plan, config, Status.RANKED, reason))
        raced = [run for run in runs.values() if run.waiting]
        self.emit(Started("racing", len(raced)))
        for run in raced:
            # Seeded by the problem: the order within rounds is the same in every run.
            decided = run.decide(self.make.run_id, random.Random(str(run.problem)))
            self._add_sdpa(run.problem, decided.sdpa)
            self.store.decide(decided.rows, decided.verdict)
            verdict = decided.verdict
            self._say(*decided.notes, *(() if verdict is None else doubts(verdict)))
            best = None if verdict is None else (run.problem, verdict.chosen, verdict.ms)
            self.emit(Advanced(best))

    def _add_sdpa(self, problem: Problem, timings: Iterable[SdpaTiming]) -> None:
        for timing in timings:
            self.store.add_sdpa(SdpaResult(self.make.run_id, problem, timing))

    def _say(self, *texts: str) -> None:
        """To whoever watches, and to the file's readers."""
        for text in texts:
            self.emit(Said(text))
            self.store.note(text)

    def _refused(self, plan: ProblemPlan, compiled: Compiled) -> bool:
        """Whether ``compiled`` cannot be launched; then its row is added."""
        row = self.make.refused(plan, compiled)
        if row is not None:
            self.store.add(row)
        return row is not None

    def _todo(self) -> list[tuple[ProblemPlan, Config]]:
        return [
            (plan, config)
            for plan in self.request.plans
            for config in plan.tried
            if not self._done(self.store.get(plan.problem, config))
        ]

    def _done(self, row: Row | None) -> bool:
        if row is None or row.status is Status.PRUNED:
            return False
        if row.status is Status.RANKED:  # beyond an earlier --top; or given up in a race
            return (row.reason or "").startswith(GIVEN_UP) and not self.request.exhaustive
        if row.status is Status.SCREENED and self.request.exhaustive:
            return False
        return not (self.request.retry_failed and row.status in FAILED)

    def _compile(
        self,
        todo: Sequence[tuple[ProblemPlan, Config]],
        wanted: Callable[[ProblemPlan, Config], bool] = lambda plan, config: True,
        ready: Callable[[], bool] = lambda: True,
    ) -> Iterable[tuple[ProblemPlan, Config, Compiled]]:
        """Compile each distinct binary once; yields it for every problem that shares it. What no
        problem has ``wanted`` is left out; results wait until their taker is ``ready``."""
        sharing: dict[tuple[tuple[object, ...], Config], list[ProblemPlan]] = {}
        for plan, config in todo:
            sharing.setdefault((specialisation(plan.problem), config), []).append(plan)
        cc = self.request.gpu.cc_number
        jobs = {
            CompileJob(self.request.kernel, plans[0].problem, config, cc): (key, plans)
            for key, plans in sharing.items()
            for config in [key[1]]
        }
        self.emit(Started("compiling", len(jobs)))

        def anybody_wants(job: CompileJob) -> bool:
            return any(wanted(plan, job.config) for plan in jobs[job][1])

        n_jobs = self.request.n_jobs
        cpus = cpus_beside_launches() if self.request.gpu_process is not None else None
        for job, compiled in compile_all(
            list(jobs), n_jobs, wanted=anybody_wants, ready=ready, cpus=cpus
        ):
            key, plans = jobs.pop(job)
            if compiled.seconds is not None:
                self.compile_s[key] = compiled.seconds
            elif compiled.failure is None:
                # The binary was in the cache; an earlier part of this sweep may know its time.
                compiled = replace(compiled, seconds=self.compile_s.get(key))
            self.emit(Advanced())
            for plan in plans:
                yield plan, job.config, compiled
        for _ in jobs:  # nobody wanted these, and only now will nobody
            self.emit(Advanced())

    def _interpret(self) -> dict[Problem, str]:
        """Problems for which the interpreter proves the kernel wrong, and how."""
        # The arithmetic does not depend on the length: one problem for each mask will do.
        by_mask = {plan.problem.causal: plan.problem for plan in self.request.plans}
        self.emit(Started("interpreting", 1))
        results_by_key = check_arithmetic(self.request.kernel, list(by_mask.values()))
        self.emit(Advanced())
        wrong: dict[bool, str] = {}
        for (problem, dtype), result in results_by_key.items():
            mask = "causal" if problem.causal else "full"
            if isinstance(result, str):
                text = f"arithmetic not checked in {dtype}, {mask}: {result}"
                self.emit(Said(text))
            elif result.ok:
                text = f"arithmetic right in Triton's interpreter, {dtype}, {mask}"
            else:
                text = f"arithmetic wrong in Triton's interpreter, {dtype}, {mask}: {result.reason}"
                wrong[problem.causal] = text
                self.emit(Said(text))
            self.store.note(text)
        return {
            plan.problem: wrong[plan.problem.causal]
            for plan in self.request.plans
            if plan.problem.causal in wrong
        }

    def _add_predicted(self, row: Row) -> None:
        old = self.store.get(row.problem, row.config)
        if old is None or (old.status in _PREDICTED and old.reason != row.reason):
            self.store.add(row)


def _places(todo: Sequence[tuple[ProblemPlan, Config]]) -> dict[tuple[Problem, Config], int]:
    """Each config's place in the model's order of its problem."""
    plans = {plan.problem: plan for plan, _ in todo}
    return {
        (problem, config): at
        for problem, plan in plans.items()
        for at, config in enumerate(plan.tried)
    }


def _best(rows: Iterable[Row]) -> tuple[Problem, Config, float] | None:
    timed = [(row.ms, row) for row in rows if row.ms is not None]
    if not timed:
        return None
    ms, row = min(timed, key=lambda item: item[0])
    return row.problem, row.config, ms
