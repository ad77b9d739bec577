"""Check and time on the card: one problem's race, or its exhaustive timing, and the rows of both.

A :class:`ProblemRun` is one problem of a sweep. It gets configs as they are compiled, and hands out
rows as they are decided.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from flashtune import race
from flashtune.errors import FlashtuneError
from flashtune.gpu_process import GpuProcess, Lost
from flashtune.hope import Hope
from flashtune.plan import ProblemPlan
from flashtune.records import Compiled, Config, Problem, Status
from flashtune.results import Checked, Conditions, RaceVerdict, Row, SdpaTiming, Tie, Timing
from flashtune.stats import median, median_interval

NOTICE_S, SETTLE_S = 0.4, 0.8
"""An H200 whose work needs more power than its cap says after 0.1 to 0.3 s that its clock is held
down, and is 0.8 s later at the clock that it can keep: the cap is one of the last second's power.
At the clock before, another config may be the fastest, by 1%."""

MakeRow = Callable[[Compiled, Status, str | None], Row]
"""A row with everything but what the card says."""

_CARRIED = (
    "ms", "ms_lo", "ms_hi", "tflops", "samples_ms", "samples_round", "max_abs_err", "sdpa_abs_err",
    "lse_abs_err", "sm_clock_mhz", "measured_at",
)  # fmt: skip


@dataclass(frozen=True)
class Decided:
    """What a finished race leaves behind."""

    rows: tuple[Row, ...]
    verdict: RaceVerdict | None  # None: nothing valid ran
    sdpa: tuple[SdpaTiming, ...]
    notes: tuple[str, ...]  # what failed and no config could be blamed for


class GpuTrack:
    """The race's track on the card, for one problem. A launch that fails raises :class:`Lost`."""

    def __init__(self, gpu: GpuProcess, problem: Problem) -> None:
        self._gpu, self._problem = gpu, problem
        self.conditions: list[Conditions] = []
        self.running: Config | None = None  # who is to blame when something is Lost
        self.unexplained: list[Checked] = []  # failures of a round that nobody repeated
        self._one_by_one = False
        self._first_done: float | None = None  # when the final's first round was done
        self._noticed: float | None = None  # when the card first said that its clock is held down
        self._last_began = 0.0  # the last round

    def restart(self) -> None:
        """Before a final."""
        self.conditions.clear()
        self._one_by_one = False
        self._first_done = self._noticed = None

    def look(self, config: Config, beside: Config | None) -> tuple[race.Samples, race.Samples]:
        self.running = config
        return self._gpu.look(self._problem, config, beside, race.LOOK_LAUNCHES)

    def round(self, configs: Sequence[Config], launches: int) -> Mapping[Config, race.Samples]:
        turn, unexplained = len(self.conditions), None
        self._last_began = time.monotonic()
        if not self._one_by_one:
            try:
                samples, conditions = self._gpu.round(self._problem, configs, launches, turn)
            except Lost as lost:
                self.running = configs[0] if len(configs) == 1 else lost.failure.config
                if self.running is not None:
                    raise
                # Somebody failed: a call for each says who. Where nobody does now, it stays so, and
                # the next failure has one to blame.
                self._one_by_one = True
                self._first_done = None  # another process, perhaps
                unexplained = lost.failure
            else:
                self._done(conditions)
                return samples
        alone = {}
        for config in configs:
            self.running = config
            samples, conditions = self._gpu.round(self._problem, [config], launches, turn)
            alone[config] = samples[config]
        if unexplained is not None:
            self.unexplained.append(unexplained)
        self._done(conditions)
        return alone

    def _done(self, conditions: Conditions) -> None:
        """A round is done, and this is the card's state after it."""
        now = time.monotonic()
        self.conditions.append(conditions)
        self._first_done = self._first_done or now
        if conditions.held:
            self._noticed = self._noticed or now

    def steady(self) -> bool | None:
        assert self._first_done is not None, "asked after a round"
        if self._noticed is not None:
            return self._last_began >= self._noticed + SETTLE_S
        return True if self._last_began >= self._first_done + NOTICE_S else None


class ProblemRun:
    """One problem's configs on the card."""

    def __init__(
        self,
        gpu: GpuProcess,
        plan: ProblemPlan,
        make_row: MakeRow,
        standing: RaceVerdict | None,
        standing_row: Row | None,
    ) -> None:
        """``standing`` is the verdict of an earlier race, which new configs have to beat, and
        ``standing_row`` the row of what it chose."""
        self.problem = plan.problem
        self.hope = Hope(plan.predicted_ms)
        self._gpu, self._make_row = gpu, make_row
        self._standing, self._standing_row = standing, standing_row
        self._track = GpuTrack(gpu, plan.problem)
        self._looks = race.Looks(self._track)
        if standing is not None:
            self._looks.stand(standing.chosen)
        self._compiled: dict[Config, Compiled] = {}
        self._checked: dict[Config, Checked] = {}
        self._looked: dict[Config, race.Samples] = {}
        self._twins: dict[Config, Config] = {}  # same machine code: runs once
        self._by_code: dict[str, Config] = {}
        self._decided: dict[Config, Row] = {}

    @property
    def best(self) -> Config | None:
        """The fastest so far."""
        return self._looks.best

    @property
    def waiting(self) -> bool:
        """Whether there are configs whose race is not over."""
        return bool(self._looked)

    def look(self, compiled: Compiled) -> Row | None:
        """Check ``compiled`` and look at it; its row, unless it goes on to the final."""
        config = compiled.config
        self._compiled[config] = compiled
        twin = self._by_code.get(compiled.code_hash or "")
        if twin in self._decided:
            return self._like(config, self._decided[twin])
        if twin is not None:
            self._twins[config] = twin
            return None
        if compiled.code_hash is not None:
            self._by_code[compiled.code_hash] = config
        checked = self._gpu.check(self.problem, config)
        if checked.failure is not None:
            return self._failed(config, checked)
        self._checked[config] = checked
        try:
            look = self._looks.take(config)
        except Lost as lost:
            return self._failed(config, lost.failure)
        self.hope.saw(config, median(look.samples_ms))
        if look.screened:
            return self._screened(config, look.samples_ms)
        self._looked[config] = look.samples_ms
        return None

    def decide(self, run_id: str, rng: random.Random) -> Decided:
        """Run the final among those that are left, and give every config that has none its row."""
        rows: list[Row] = []
        finalists = self._finalists(rows)
        for config in list(finalists):
            checked = self._gpu.repeat(self.problem, config)
            if checked.failure is not None:
                finalists.remove(config)
                rows.append(self._failed(config, checked))
        result = None
        while finalists and result is None:
            try:
                self._track.restart()
                result = race.final(self._track, finalists, rng)
            except Lost as lost:
                culprit = self._track.running
                assert culprit is not None
                finalists.remove(culprit)
                rows.append(self._failed(culprit, lost.failure))
        verdict, sdpa, notes = None, tuple[SdpaTiming, ...](), list[str]()
        if result is not None:
            verdict = self._verdict(result, run_id)
            raced = [result.leader, *(s.config for s in result.standings)]
            rows += [self._raced(c, result) for c in raced if c in self._looked]
            sdpa, failures = self.sdpa()  # at the clock that the race came to
            notes += failures
        rows += [self._like(c, self._decided[twin]) for c, twin in self._twins.items()]
        self._looked.clear()
        notes += [
            f"{self.problem}: a round of several configs failed, and none of them did so again by"
            f" itself: {failure.reason}"
            for failure in self._track.unexplained
        ]
        return Decided(tuple(rows), verdict, sdpa, tuple(notes))

    def _finalists(self, rows: list[Row]) -> list[Config]:
        """Who goes on after a second look where it needs one; rows of the others are added."""
        finalists: list[Config] | None = None
        while finalists is None:
            try:
                finalists = self._looks.finalists()
            except Lost as lost:
                culprit = self._track.running
                assert culprit is not None
                self._looks.drop(culprit)
                rows.append(self._failed(culprit, lost.failure))
        late = [look for look in self._looks.late if look.config in self._looked]
        rows += [self._screened(look.config, look.samples_ms) for look in late]
        return finalists

    def sdpa(self) -> tuple[tuple[SdpaTiming, ...], tuple[str, ...]]:
        """SDPA's backends timed; or nothing, and a note of what failed: no config's result needs
        them."""
        try:
            return tuple(self._gpu.sdpa(self.problem)), ()
        except (Lost, FlashtuneError) as error:
            return (), (f"{self.problem}: SDPA was not timed: {error}",)

    def time(self, compiled: Compiled, earlier: Mapping[str, Row]) -> Row:
        """Check ``compiled`` and time it by itself, as an exhaustive sweep does. ``earlier`` rows
        by code: the same machine code is not timed again."""
        config = compiled.config
        self._compiled[config] = compiled
        twin = earlier.get(compiled.code_hash or "")
        if twin is not None:
            return carried(twin, self._make_row(compiled, twin.status, None))
        checked = self._gpu.check(self.problem, config)
        if checked.failure is not None:
            return self._failed(config, checked)
        try:
            timing = self._gpu.time(self.problem, config)
        except Lost as lost:
            return self._failed(config, lost.failure)
        self._checked[config] = checked
        return self._with_timing(config, Status.TIMED, timing)

    def _failed(self, config: Config, checked: Checked) -> Row:
        assert checked.failure is not None
        if config in self._compiled:
            row = self._make_row(self._compiled[config], checked.failure, checked.reason)
        else:  # the winner of an earlier race, which is none any more
            assert self._standing_row is not None
            untimed: dict[str, Any] = dict.fromkeys(_CARRIED)
            row = replace(
                self._standing_row, status=checked.failure, reason=checked.reason, **untimed
            )
        self._decided[config] = _with_check(row, checked)
        return self._decided[config]

    def _raced(self, config: Config, result: race.Final) -> Row:
        """The row of a finalist. Who left before the card was steady was screened: its samples
        were taken at another clock than those of the others."""
        rounds = result.counted(config)
        if max(rounds) < result.steady_from:
            return self._screened(config, _together(rounds))
        return self._timed(config, rounds)

    def _screened(self, config: Config, samples: race.Samples) -> Row:
        at = datetime.now(UTC)
        timing = Timing(median(samples), None, None, samples, (0,) * len(samples), None, at)
        return self._with_timing(config, Status.SCREENED, timing)

    def _timed(self, config: Config, rounds: Mapping[int, race.Samples]) -> Row:
        samples = _together(rounds)
        numbers = tuple(n for n, own in rounds.items() for _ in own)
        low, high = median_interval(samples) or (None, None)
        readings = [self._track.conditions[n].sm_clock_mhz for n in rounds]
        clocks = [mhz for mhz in readings if mhz is not None]
        clock = sorted(clocks)[len(clocks) // 2] if clocks else None
        at = datetime.now(UTC)
        timing = Timing(median(samples), low, high, samples, numbers, clock, at)
        return self._with_timing(config, Status.TIMED, timing)

    def _with_timing(self, config: Config, status: Status, timing: Timing) -> Row:
        row = _with_check(self._make_row(self._compiled[config], status, None),
                          self._checked[config])  # fmt: skip
        self._decided[config] = replace(
            row,
            ms=timing.ms,
            ms_lo=timing.ms_lo,
            ms_hi=timing.ms_hi,
            tflops=self.problem.tflops(timing.ms),
            samples_ms=timing.samples_ms,
            samples_round=timing.samples_round,
            sm_clock_mhz=timing.sm_clock_mhz,
            measured_at=timing.measured_at,
        )
        return self._decided[config]

    def _verdict(self, result: race.Final, run_id: str) -> RaceVerdict:
        known = {**self._compiled}
        if self._standing is not None and self._standing.chosen not in known:
            known[self._standing.chosen] = Compiled(self._standing.chosen)
        chosen = race.choose(result, known)
        samples = _together(result.counted(chosen))
        low, high = median_interval(samples) or (None, None)
        ties = tuple(Tie(s.config, s.behind, s.at_most, s.equal) for s in result.ties)
        return RaceVerdict(
            run_id=run_id,
            problem=self.problem,
            chosen=chosen,
            leader=result.leader,
            ms=median(samples),
            ms_lo=low,
            ms_hi=high,
            rounds=len(result.rounds) - result.steady_from,
            ties=ties,
            conditions=tuple(self._track.conditions[result.steady_from :]),
        )

    def _like(self, config: Config, source: Row) -> Row:
        """The row of a config whose machine code ran under another name."""
        row = self._make_row(self._compiled[config], source.status, source.reason)
        return carried(source, row)


def _together(rounds: Mapping[int, race.Samples]) -> race.Samples:
    return tuple(ms for own in rounds.values() for ms in own)


def _with_check(row: Row, checked: Checked) -> Row:
    if checked.check is None:
        return row
    return replace(
        row,
        max_abs_err=checked.check.max_abs_err,
        sdpa_abs_err=checked.check.sdpa_abs_err,
        lse_abs_err=checked.check.lse_abs_err,
    )


def carried(twin: Row, row: Row) -> Row:
    """``row`` with the result of ``twin``, whose machine code is the same."""
    return replace(
        row, same_as=str(twin.config), **{name: getattr(twin, name) for name in _CARRIED}
    )
