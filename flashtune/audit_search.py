"""The race replayed on recorded exhaustive sweeps: what it would have chosen, and how fast.

The race's own code runs here, on a track that draws each config's samples from those that were
recorded. Compiling is simulated from the recorded seconds of each compile and a number of
processes; nothing is launched. What the replay cannot show: clocks that drift between samples.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median as middle

from flashtune import race
from flashtune.errors import FlashtuneError
from flashtune.hope import Hope
from flashtune.plan import ProblemPlan, plan_problem
from flashtune.recorded import subject
from flashtune.records import Compiled, Config, Problem, Status
from flashtune.results import Row, SweepFile

FLUSH_MS = 0.08  # to zero 256 MB before a launch, at an H200's bandwidth
COMPILE_S = 1.5  # a compile whose seconds were not recorded: typical of sm_90 on a busy core
CHECK_MS = 5.0  # one checked launch and its comparison with the references
OPEN_S = 0.6  # a problem's inputs, references and warm clocks
START_S = 6.0  # importing torch and making a CUDA context, once
_WARM_MS, _REP_MS, _ESTIMATE = 25.0, 100.0, 5  # do_bench's defaults, and its launches to estimate
_HOST_BOUND = 1.15  # a sample this far from the median says something about the host
_TIMED_SHARE = 0.5  # of what can launch, at least this share has to be timed: an exhaustive sweep


@dataclass(frozen=True)
class SearchScore:
    """One shape: what the race chose, what it cost, and what timing everything costs."""

    kernel: str
    gpu: str
    problem: Problem
    best: Config
    best_ms: float
    chosen: Config
    regret: float  # chosen ms / best ms - 1, both recorded
    ties: int  # that could not be told from the leader
    compiled: int
    looked_at: int
    finalists: int
    launches: int
    race_s: float  # on the GPU: checks, looks and rounds
    exhaustive_s: float  # on the GPU: do_bench of everything that can launch


@dataclass(frozen=True)
class SearchAudit:
    """All shapes, and the whole sweeps' simulated seconds, compiling included."""

    shapes: tuple[SearchScore, ...]
    jobs: int
    race_s: float
    exhaustive_s: float
    skipped: tuple[str, ...]

    @property
    def speedup(self) -> float:
        return self.exhaustive_s / self.race_s

    @property
    def worst_regret(self) -> float:
        return max(shape.regret for shape in self.shapes)

    @property
    def mean_regret(self) -> float:
        return sum(shape.regret for shape in self.shapes) / len(self.shapes)


def audit(files: Sequence[SweepFile], jobs: int, seed: int) -> SearchAudit:
    """Replay the race on every shape of ``files``; ``seed`` draws the samples.

    Raises FlashtuneError when none holds an exhaustive sweep.
    """
    rng = random.Random(seed)
    shapes: list[SearchScore] = []
    skipped: list[str] = []
    race_s = exhaustive_s = 0.0
    for file in files:
        replays, reasons = _replays(file)
        skipped += reasons
        if not replays:
            continue
        scores, seconds, everything = _sweep(replays, jobs, rng)
        shapes += scores
        race_s += seconds
        exhaustive_s += everything
    if not shapes:
        raise FlashtuneError(
            "No exhaustive sweep to replay" + "".join(f"; {why}" for why in skipped),
            "Record one on a GPU with: flashtune sweep --exhaustive.",
        )
    return SearchAudit(tuple(shapes), jobs, race_s, exhaustive_s, tuple(skipped))


@dataclass(frozen=True)
class _Replay:
    """One recorded shape."""

    plan: ProblemPlan
    rows: Mapping[Config, Row]  # that were timed, or failed to compile
    kernel: str
    gpu: str

    @property
    def timed(self) -> dict[Config, Row]:
        return {c: row for c, row in self.rows.items() if row.status is Status.TIMED}


def _replays(file: SweepFile) -> tuple[list[_Replay], list[str]]:
    provenance = file.provenance
    found_subject = subject(file)
    if isinstance(found_subject, str):
        return [], [found_subject]
    gpu, kernel = found_subject
    name = f"{kernel.name} on {gpu.name}"
    found, skipped = [], []
    for problem in sorted({row.problem for row in file.rows}):
        rows = {row.config: row for row in file.rows if row.problem == problem}
        plan = plan_problem(
            problem, sorted(rows), gpu, kernel, provenance.triton_release,
            exhaustive=False, top=None,
        )  # fmt: skip
        refused = (Status.COMPILE_FAILED, Status.OUT_OF_RESOURCES)
        ran = {c: r for c, r in rows.items() if r.status in (Status.TIMED, *refused)}
        if len(ran) < _TIMED_SHARE * len(rows) or not set(plan.tried) <= set(ran):
            skipped.append(f"{name}, {problem}: {len(ran)} of {len(rows)} configs timed")
            continue
        found.append(_Replay(plan, ran, provenance.kernel, provenance.gpu))
    return found, skipped


class ReplayTrack:
    """A track of recorded samples; keeps the time that launching them would have taken."""

    def __init__(self, rows: Mapping[Config, Row], rng: random.Random) -> None:
        self._samples = {c: _clean(row) for c, row in rows.items()}
        self._rng = rng
        self.launches = 0
        self.seconds = 0.0

    def look(self, config: Config, beside: Config | None) -> tuple[race.Samples, race.Samples]:
        """Checks are paid for here: every config has one before its look."""
        self.seconds += CHECK_MS / 1e3
        samples = self._draw(config, race.LOOK_LAUNCHES)
        return samples, (() if beside is None else self._draw(beside, race.LOOK_LAUNCHES))

    def round(self, configs: Sequence[Config], launches: int) -> dict[Config, race.Samples]:
        return {config: self._draw(config, launches) for config in configs}

    def steady(self) -> bool:
        return True

    def _draw(self, config: Config, count: int) -> race.Samples:
        drawn = tuple(self._rng.choices(self._samples[config], k=count))
        self.launches += count
        self.seconds += sum(ms + FLUSH_MS for ms in drawn) / 1e3
        return drawn


def _compile_s(row: Row) -> float:
    return COMPILE_S if row.compile_s is None else row.compile_s


def _clean(row: Row) -> race.Samples:
    """The recorded samples as this timer would have kept them: without those that hold the host's
    time, which are far from the middle, and around the recorded median, of which some recordings
    keep only the first samples."""
    assert row.ms is not None, "only of rows that were timed"
    samples = row.samples_ms or (row.ms,)
    centre = middle(samples)
    near = (ms for ms in samples if 1 / _HOST_BOUND <= ms / centre <= _HOST_BOUND)
    return tuple(ms * row.ms / centre for ms in near)


def _sweep(
    replays: Sequence[_Replay], jobs: int, rng: random.Random
) -> tuple[list[SearchScore], float, float]:
    """Race all shapes of one file as ``sweep`` does: compiles come in the model's order, looks as
    soon as their binary is there, finals when nothing compiles any more. Nothing compiles for
    nothing: here each look is known before the next compile starts, where a sweep goes on compiling
    while its GPU process starts and while others compile."""
    tracks = [ReplayTrack(r.timed, rng) for r in replays]
    looks = [race.Looks(track) for track in tracks]
    hopes = [Hope(r.plan.predicted_ms) for r in replays]
    compiled_counts = [0] * len(replays)
    looked = [0] * len(replays)
    pool = _Pool(jobs)
    gpu_free = START_S + OPEN_S * len(replays)  # the GPU process starts beside the compile workers
    order = _compile_order(replays)
    left = {(i, config) for config, of_mask in order for i in of_mask}
    ready: dict[tuple[bool, Config], float] = {}  # when each binary is there

    def first_wanted() -> tuple[Config, list[int]] | None:
        """From the start each time: hope may have come back."""
        for config, of_mask in order:
            wanted = [i for i in of_mask if (i, config) in left and hopes[i].left(config)]
            if wanted:
                return config, wanted
        return None

    while (found := first_wanted()) is not None:
        config, wanted = found
        left -= {(i, config) for i in wanted}
        binary = replays[wanted[0]].plan.problem.causal, config
        if binary not in ready:
            ready[binary] = pool.run(_compile_s(replays[wanted[0]].rows[config]))
        for i in wanted:
            compiled_counts[i] += 1
            if replays[i].rows[config].status is not Status.TIMED:
                continue
            before = tracks[i].seconds
            look = looks[i].take(config)
            looked[i] += 1
            hopes[i].saw(config, middle(look.samples_ms))
            gpu_free = max(gpu_free, ready[binary]) + tracks[i].seconds - before
    seconds = max(gpu_free, pool.end)
    scores = []
    for i, replay in enumerate(replays):
        before = tracks[i].seconds
        finalists = looks[i].finalists()
        result = race.final(tracks[i], finalists, rng)
        seconds += tracks[i].seconds - before
        scores.append(_score(replay, result, tracks[i], compiled_counts[i], looked[i]))
    everything = _Pool(jobs)
    for config, of_mask in _compile_order(replays, everything=True):
        everything.run(_compile_s(replays[of_mask[0]].rows[config]))
    total = START_S + everything.end + sum(s.exhaustive_s + OPEN_S for s in scores)
    return scores, seconds, total


def _compile_order(
    replays: Sequence[_Replay], everything: bool = False
) -> list[tuple[Config, list[int]]]:
    """Each binary once, with the shapes that share it (those of one mask), in the order of its best
    place in any of their orders."""
    places: dict[tuple[bool, Config], tuple[int, list[int]]] = {}
    for i, replay in enumerate(replays):
        configs = sorted(replay.rows) if everything else replay.plan.tried
        for place, config in enumerate(configs):
            key = (replay.plan.problem.causal, config)
            before, shapes = places.get(key, (place, []))
            places[key] = (min(before, place), [*shapes, i])
    ordered = sorted(places.items(), key=lambda item: (item[1][0], item[0]))
    return [(config, shapes) for (_, config), (_, shapes) in ordered]


class _Pool:
    """Compile processes: each job goes to the one that is free first."""

    def __init__(self, jobs: int) -> None:
        self._free = [0.0] * jobs

    def run(self, seconds: float) -> float:
        """When the job is done."""
        done = heapq.heappop(self._free) + seconds
        heapq.heappush(self._free, done)
        return done

    @property
    def end(self) -> float:
        return max(self._free)


def _score(
    replay: _Replay, result: race.Final, track: ReplayTrack, compiled: int, looked_at: int
) -> SearchScore:
    timed = replay.timed
    facts = {c: Compiled(c, shared=row.shared, spills=row.spills) for c, row in timed.items()}
    chosen = race.choose(result, facts)
    ms = {c: row.ms for c, row in timed.items() if row.ms is not None}
    best = min(ms, key=lambda config: ms[config])
    return SearchScore(
        kernel=replay.kernel,
        gpu=replay.gpu,
        problem=replay.plan.problem,
        best=best,
        best_ms=ms[best],
        chosen=chosen,
        regret=ms[chosen] / ms[best] - 1,
        ties=len(result.ties),
        compiled=compiled,
        looked_at=looked_at,
        finalists=len(result.standings) + 1,
        launches=track.launches,
        race_s=track.seconds,
        exhaustive_s=sum(map(_do_bench_s, ms.values())),
    )


def _do_bench_s(ms: float) -> float:
    """Seconds of triton.testing.do_bench with its defaults on a kernel of ``ms``."""
    one = ms + FLUSH_MS
    launches = 1 + _ESTIMATE + max(1, int(_WARM_MS / one)) + max(1, int(_REP_MS / one))
    return launches * one / 1e3
