"""From the rows of sweeps to a short list of configs that serves every problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from flashtune.cover import (
    Candidates,
    Fits,
    Pair,
    Rank,
    cover,
    dependents,
    fitting,
    make_room,
    reached_by,
)
from flashtune.errors import FlashtuneError
from flashtune.records import Config, Problem, Status
from flashtune.results import RaceVerdict, Recommendation, Recommended, Row, SweepFile
from flashtune.stats import median


def recommend(
    files: Sequence[SweepFile],
    *,
    max_configs: int = 5,
    regret: float = 0.01,
    serve: Sequence[Pair] = (),
    fits: Fits | None = None,
) -> Recommendation:
    """A list of at most ``max_configs`` configs, within ``regret`` of the best where it can be.

    ``files`` are of one GPU and one kernel. When any of them was measured, the others are left
    out. Each step takes the config that raises the worst problem's share of the best the most
    (then the second worst, and so on). Every (dtype, D) of ``serve`` gets a config that fits,
    if there is one and room for it; without ``fits``, a config fits where it was timed.

    A config that was wrong, crashed, hung or broke the compiler on one problem is never listed,
    however fast it is elsewhere: ``triton.autotune`` runs every config of the list on every
    problem and looks at nothing but the time. It can still be the winner of another problem.

    Raises FlashtuneError for no files, several GPUs or kernels, no usable row, or a
    ``max_configs`` or ``regret`` out of range.
    """
    _check_arguments(max_configs, regret)
    gpu, kernel = _only_subject(files)
    measured = any(file.provenance.measured for file in files)
    used = [file for file in files if file.provenance.measured is measured]
    rows = [row for file in used for row in _carried(file.rows)]
    barred = _barred(rows)
    verdicts = {verdict.problem: verdict for file in used for verdict in file.verdicts}
    winners = _winners(rows, verdicts) if measured else ()
    pool = _measured(rows, barred) if measured else _predicted(rows, barred)
    if not pool.shares.keys() - pool.reserve:
        raise _nothing_usable(gpu, kernel, measured, bool(barred))
    chosen = cover(pool, max_configs, regret) if measured else _first(pool, rows, max_configs)

    pairs = tuple(dict.fromkeys(serve))
    able = fitting(pool, pairs, fits, _ran(rows))
    configs, reserved = make_room(pool, chosen, able, max_configs)
    served = tuple(pair for pair in pairs if any(c in able[pair] for c in configs))
    return Recommendation(
        gpu=gpu,
        cc=used[0].provenance.cc,
        kernel=kernel,
        measured=measured,
        configs=tuple(_recommended(pool, c, configs, able, c in reserved) for c in configs),
        winners=winners,
        worst_loss=1 - min(reached_by(pool, configs)) if measured else None,
        serves=served,
        unserved=tuple(pair for pair in pairs if pair not in served),
        barred=tuple(sorted(barred.items())),
        undecided=_undecided(winners, verdicts),
    )


def _check_arguments(max_configs: int, regret: float) -> None:
    if max_configs < 1:
        raise FlashtuneError(
            f"A list of {max_configs} configs recommends nothing.",
            "Give --max-configs 1 or more.",
        )
    if not 0 <= regret < 1:
        raise FlashtuneError(
            f"A regret of {regret} is no share of the best time.",
            "Give --regret as a fraction from 0 up to but not including 1, such as 0.01.",
        )


def _only_subject(files: Sequence[SweepFile]) -> tuple[str, str]:
    """The GPU and the kernel that all files share."""
    if not files:
        raise FlashtuneError(
            "There are no results to recommend from.",
            "Run flashtune sweep first, or name results files with --from PATH.",
        )
    gpus = sorted({file.provenance.gpu for file in files})
    if len(gpus) > 1:
        raise FlashtuneError(
            f"The results are of {len(gpus)} GPUs: {', '.join(gpus)}.",
            "Choose one with --gpu NAME.",
        )
    kernels = sorted({file.provenance.kernel for file in files})
    if len(kernels) > 1:
        raise FlashtuneError(
            f"The results are of {len(kernels)} kernels: {', '.join(kernels)}.",
            "Choose one with --kernel NAME.",
        )
    return gpus[0], kernels[0]


def _nothing_usable(gpu: str, kernel: str, measured: bool, barred: bool) -> FlashtuneError:
    did = "was timed" if measured else "compiled"
    rest = " and gave right answers everywhere" if barred else ""
    return FlashtuneError(
        f"No config of {kernel} on {gpu} {did}{rest}: there is nothing to recommend.",
        "Look at the status and reason columns of the results, or sweep a wider --space.",
    )


# Rows: whose result counts, who is out, who won.


@dataclass(frozen=True)
class _Result:
    """A row with its effective status and ms: those of the config whose code it shares."""

    row: Row
    status: Status
    ms: float | None

    @property
    def problem(self) -> Problem:
        return self.row.problem

    @property
    def config(self) -> Config:
        return self.row.config


_OWN = frozenset({Status.TIMED, Status.SCREENED, Status.COMPILED})
"""Statuses in which a config has machine code that another's result can speak for."""


def _carried(rows: Sequence[Row]) -> list[_Result]:
    """The rows of one file, where ``same_as`` rows carry the result of the one that was run."""
    by_name = {(row.run_id, row.problem, str(row.config)): row for row in rows}
    results = []
    for row in rows:
        source = row
        if row.same_as is not None and row.status in _OWN:
            source = by_name.get((row.run_id, row.problem, row.same_as), row)
        ms = row.ms if source is row or source.ms is None else source.ms
        results.append(_Result(row, source.status, ms))
    return results


def _timed(results: Sequence[_Result]) -> list[tuple[_Result, float]]:
    """What can win: timed with a usable ms, and not found wrong in another run."""
    wrong = {(r.problem, r.config) for r in results if r.status is Status.WRONG}
    return [
        (r, r.ms)
        for r in results
        if r.status is Status.TIMED
        and r.ms is not None
        and 0 < r.ms < inf
        and (r.problem, r.config) not in wrong
    ]


def _barred(results: Sequence[_Result]) -> dict[Config, str]:
    """Configs that must not be listed, each with the problem and the status that forbid it."""
    timed = {(r.problem, r.config) for r, _ in _timed(results)}
    barred: dict[Config, str] = {}
    for r in sorted(results, key=lambda r: (r.problem, r.status)):
        ends_the_tuning = r.status in (Status.CRASHED, Status.TIMEOUT) or (
            # Triton's autotuner skips what ptxas or the launch limits refuse. Any other
            # compiler error ends the user's program.
            r.status is Status.COMPILE_FAILED and "ptxas" not in (r.row.reason or "").lower()
        )
        # A later run can show that a crash was not the config's fault. It cannot show that a
        # wrong answer was never given.
        if r.status is Status.WRONG or (ends_the_tuning and (r.problem, r.config) not in timed):
            barred.setdefault(r.config, f"{r.status.value} on {r.problem}")
    return barred


def _times(results: Sequence[_Result]) -> dict[Problem, dict[Config, float]]:
    """ms of every problem and config that was timed: the median over runs that repeat one."""
    repeats: dict[Problem, dict[Config, list[float]]] = {}
    for r, ms in _timed(results):
        repeats.setdefault(r.problem, {}).setdefault(r.config, []).append(ms)
    return {
        problem: {config: median(repeats[problem][config]) for config in repeats[problem]}
        for problem in sorted(repeats)
    }


def _winners(
    results: Sequence[_Result], verdicts: Mapping[Problem, RaceVerdict]
) -> tuple[tuple[Problem, Config, float], ...]:
    """Per problem what its race chose, or else the fastest config, in the problems' order."""
    winners = []
    for problem, times in _times(results).items():
        if problem in verdicts and verdicts[problem].chosen in times:
            chosen = verdicts[problem].chosen
            winners.append((problem, chosen, times[chosen]))
            continue
        tie = _tie_break([r for r in results if r.problem == problem])
        winner = min(times, key=lambda config: (times[config], tie[config], config))
        winners.append((problem, winner, times[winner]))
    return tuple(winners)


def _undecided(
    winners: Sequence[tuple[Problem, Config, float]], verdicts: Mapping[Problem, RaceVerdict]
) -> tuple[tuple[Problem, tuple[Config, ...], float], ...]:
    """The problems without a single winner: who could not be told apart, and within how much."""
    found = []
    for problem, chosen, _ in winners:
        verdict = verdicts.get(problem)
        if verdict is not None and verdict.chosen == chosen and verdict.ties:
            equals = dict.fromkeys([chosen, verdict.leader, *(t.config for t in verdict.ties)])
            found.append((problem, tuple(equals), max(t.at_most for t in verdict.ties)))
    return tuple(found)


def _tie_break(results: Sequence[_Result]) -> dict[Config, Rank]:
    """Fewest spills, least shared memory, smallest tile: the worst of a config's rows counts.

    Unknown facts sort last. Callers append the config itself, whose own order comes last.
    """
    seen: dict[Config, list[Row]] = {}
    for r in results:
        seen.setdefault(r.config, []).append(r.row)
    return {
        config: (
            max((row.spills for row in rows if row.spills is not None), default=inf),
            max((row.shared for row in rows if row.shared is not None), default=inf),
            config.q_tile * config.k_tile,
        )
        for config, rows in seen.items()
    }


# Candidates: what may be listed, from measurements or from predictions.


def _measured(results: Sequence[_Result], barred: Mapping[Config, str]) -> Candidates:
    times = _times(results)
    best = {problem: min(row.values()) for problem, row in times.items()}
    listable = {config for row in times.values() for config in row} - barred.keys()
    shares = {
        config: tuple(
            best[problem] / times[problem][config] if config in times[problem] else 0.0
            for problem in best
        )
        for config in listable
    }
    slow = {
        r.config: r.ms or inf
        for r in sorted(results, key=lambda r: -(r.ms or inf))  # the fastest, last, is kept
        if r.status is Status.SCREENED and r.config not in listable and r.config not in barred
    }
    shares |= dict.fromkeys(slow, (0.0,) * len(best))
    tie = _tie_break(results)
    # Screened configs have no share to be judged by, so their brief times order them.
    rank = {config: (slow.get(config, 0.0), *tie[config]) for config in shares}
    return Candidates(tuple(best), shares, rank, frozenset(slow))


def _predicted(results: Sequence[_Result], barred: Mapping[Config, str]) -> Candidates:
    """Configs that compiled, in predicted order; in the rows' own where a prediction is missing.

    Over several problems: first those that compiled for the most of them, then by their mean
    predicted time relative to each problem's best.
    """
    compiled = [r for r in results if r.status is Status.COMPILED and r.config not in barred]
    position: dict[Config, int] = {}
    predicted: dict[Config, dict[Problem, float | None]] = {}
    for r in compiled:
        position.setdefault(r.config, len(position))
        predicted.setdefault(r.config, {})[r.problem] = r.row.predicted_ms
    best: dict[Problem, float] = {}
    for r in compiled:
        if r.row.predicted_ms is not None:
            best[r.problem] = min(r.row.predicted_ms, best.get(r.problem, inf))
    complete = all(r.row.predicted_ms is not None for r in compiled)
    tie = _tie_break(compiled)
    rank: dict[Config, Rank] = {}
    for config, by_problem in predicted.items():
        order: Rank = (float(position[config]),)
        if complete:
            slowdowns = [ms / best[p] for p, ms in by_problem.items() if ms is not None]
            order = (sum(slowdowns) / len(slowdowns), *tie[config])
        rank[config] = (float(-len(by_problem)), *order)
    shares: dict[Config, tuple[float, ...]] = dict.fromkeys(rank, ())
    return Candidates((), shares, rank, frozenset())


def _first(pool: Candidates, results: Sequence[_Result], max_configs: int) -> list[Config]:
    """The first configs in predicted order, without repeats of the same machine code."""
    twins: dict[Config, set[str | None]] = {}
    for r in results:
        if r.status is Status.COMPILED:
            twins.setdefault(r.config, set()).add(r.row.same_as)
    chosen: list[Config] = []
    for config in sorted(pool.rank, key=lambda config: (pool.rank[config], config)):
        names = {str(listed) for listed in chosen}
        if len(chosen) < max_configs and not twins[config] <= names:
            chosen.append(config)
    return chosen


# The answer.


def _ran(results: Sequence[_Result]) -> set[tuple[Config, Pair]]:
    """What is known to launch, because it did or at least compiled."""
    return {(r.config, (r.problem.dtype, r.problem.D)) for r in results if r.status in _OWN}


def _recommended(
    pool: Candidates,
    config: Config,
    configs: Sequence[Config],
    able: Mapping[Pair, frozenset[Config]],
    reserved: bool,
) -> Recommended:
    shares = zip(pool.problems, pool.shares[config], strict=True)
    kept_for = None
    if reserved:
        only = dependents(config, configs, able)
        pairs = only or [pair for pair in able if config in able[pair]]
        names = " and ".join(f"{dtype} at D={D}" for dtype, D in pairs)
        kept_for = f"the only one that fits {names}" if only else f"fits {names}"
    return Recommended(
        config=config,
        share_of_best=tuple((problem, share) for problem, share in shares if share > 0),
        kept_for=kept_for,
    )
