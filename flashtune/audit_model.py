"""Scoring the cost model on recorded exhaustive sweeps, and on shapes its constants never saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashtune.budget import assess, verdict
from flashtune.calibrate import Timed, calibrate
from flashtune.cost import Model, place
from flashtune.errors import FlashtuneError
from flashtune.kernels import DEFAULT_KERNEL
from flashtune.machine import CALIBRATED, Machine
from flashtune.recorded import subject
from flashtune.records import Config, OutClass, Problem, Status
from flashtune.results import SweepFile

FIRST = 8
"""How many of the model's first choices are looked at."""
_EXHAUSTIVE = 0.5  # of the configs that can launch, at least this share has to be timed


class ShapeName(NamedTuple):
    """What a shape is held out by."""

    kernel: str
    dtype: str
    D: int
    N: int
    causal: bool


@dataclass(frozen=True)
class ShapeScore:
    """One shape of one recorded sweep. Shares are best time / chosen time: 1 is perfect."""

    kernel: str
    gpu: str
    problem: Problem
    timed: int
    best: Config
    best_ms: float
    best_place: int  # of the best, in the model's order, from 1
    first: Config
    first_ms: float
    first_predicted_ms: float
    first_share: float
    first8_share: float
    rank_correlation: float  # Spearman's, over all configs that were timed
    kept_correlation: float  # over those that the budget's rules keep


@dataclass(frozen=True)
class HeldOut:
    """Constants fitted to some recorded shapes, scored on others."""

    calibrated_on: tuple[ShapeName, ...]
    constants: Machine
    shapes: tuple[ShapeScore, ...]

    @property
    def calibrated(self) -> dict[str, float]:
        """The constants that were fitted, by name."""
        return {name: getattr(self.constants, name) for name in CALIBRATED}


@dataclass(frozen=True)
class RuleScore:
    """What one rule of the budget leaves out of one shape's space."""

    rule: str  # "all" for all of them together
    kernel: str
    problem: Problem
    configs: int  # of the space
    left_out: int
    best: Config | None  # the fastest that it left out; None where none was timed
    best_share: float | None  # of the shape's best speed


@dataclass(frozen=True)
class ModelAudit:
    """The shipped constants' scores, what constants that saw only some shapes would have got, and
    what the budget's rules leave out."""

    shapes: tuple[ShapeScore, ...]
    held_out: tuple[HeldOut, ...]
    rules: tuple[RuleScore, ...]
    skipped: tuple[str, ...]  # what was not scored, and why


def audit(files: Sequence[SweepFile], *, held_out: bool = True) -> ModelAudit:
    """Score the model on ``files``. Raises FlashtuneError when none holds an exhaustive sweep."""
    shapes: list[Timed] = []
    rules: list[RuleScore] = []
    skipped: list[str] = []
    for file in files:
        timed, reasons = _timed(file)
        shapes += timed
        skipped += reasons
        rules += [score for shape in timed for score in _rules(file, shape)]
    if not shapes:
        raise FlashtuneError(
            "No exhaustive sweep to score the model on" + "".join(f"; {why}" for why in skipped),
            "Record one on a GPU with: flashtune sweep --exhaustive.",
        )
    scores = tuple(_score(shape, None) for shape in shapes)
    splits = _splits(shapes) if held_out else []
    return ModelAudit(
        scores, tuple(_held_out(*split) for split in splits), tuple(rules), tuple(skipped)
    )


def summary(shapes: Sequence[ShapeScore]) -> dict[str, float]:
    """The worst and the mean of the shapes' shares."""
    first8, first = [s.first8_share for s in shapes], [s.first_share for s in shapes]
    return {
        "first8_worst": min(first8),
        "first8_mean": sum(first8) / len(first8),
        "first_worst": min(first),
        "first_mean": sum(first) / len(first),
    }


def _timed(file: SweepFile) -> tuple[list[Timed], list[str]]:
    """The shapes of a file that can be scored, and why the others cannot."""
    provenance = file.provenance
    found = subject(file)
    if isinstance(found, str):
        return [], [found]
    gpu, kernel = found
    name = f"{kernel.name} on {gpu.name}"
    shapes, skipped = [], []
    for problem in sorted({row.problem for row in file.rows}):
        budgets, kept, times, launchable = [], [], [], 0
        for row in sorted((r for r in file.rows if r.problem == problem), key=lambda r: r.config):
            budget = assess(problem, row.config, gpu, kernel, provenance.triton_release)
            judged = verdict(budget, gpu)
            launchable += judged.out is not OutClass.CANNOT
            if row.status is Status.TIMED and row.ms is not None:
                budgets.append(budget)
                kept.append(judged.kept)
                times.append(row.ms)
        if not times or len(times) < _EXHAUSTIVE * launchable or not any(kept):
            skipped.append(f"{name}, {problem}: {len(times)} of {launchable} configs timed")
            continue
        shapes.append(Timed(problem, gpu, kernel, tuple(budgets), tuple(kept), tuple(times)))
    return shapes, skipped


def _rules(file: SweepFile, shape: Timed) -> list[RuleScore]:
    """Each rule on its own and all together, on every config of the file's space."""
    ms = dict(zip((budget.config for budget in shape.budgets), shape.ms, strict=True))
    configs = sorted({row.config for row in file.rows if row.problem == shape.problem})
    by_rule: dict[str, list[Config]] = {}
    for config in configs:
        release = file.provenance.triton_release
        judged = verdict(assess(shape.problem, config, shape.gpu, shape.kernel, release), shape.gpu)
        if judged.rule is not None:
            by_rule.setdefault(judged.rule, []).append(config)
    by_rule["all"] = [config for out in by_rule.values() for config in out]
    found = []
    for rule, out in by_rule.items():
        best = min((c for c in out if c in ms), key=lambda c: ms[c], default=None)
        share = None if best is None else min(shape.ms) / ms[best]
        problem = shape.problem
        found.append(
            RuleScore(rule, shape.kernel.name, problem, len(configs), len(out), best, share)
        )
    return found


Split = tuple[list[Timed], list[Timed]]


def _splits(shapes: Sequence[Timed]) -> list[Split]:
    """What to fit to and what to score on, for each card and dtype: half of the lengths of a sweep
    and its other half, the default kernel's smallest D and its others, and the default kernel and
    the others at the same D."""
    splits: list[Split] = []
    for of_card in _grouped(shapes, lambda s: (s.gpu.name, s.problem.dtype)):
        sweeps = _grouped(of_card, lambda s: (s.kernel.name, s.problem.D))
        for sweep in sweeps:
            splits += _by_length(sweep)
        mine = [sweep for sweep in sweeps if sweep[0].kernel.name == DEFAULT_KERNEL]
        if mine:
            base = min(mine, key=lambda sweep: sweep[0].problem.D)
            splits += [(base, other) for other in mine if other is not base]
            splits += [
                (base, other)
                for other in sweeps
                if other not in mine and other[0].problem.D == base[0].problem.D
            ]
    return splits


def _grouped(shapes: Sequence[Timed], by: Callable[[Timed], object]) -> list[list[Timed]]:
    groups: dict[object, list[Timed]] = {}
    for shape in shapes:
        groups.setdefault(by(shape), []).append(shape)
    return list(groups.values())


def _by_length(sweep: list[Timed]) -> list[Split]:
    """The shortest and the longest lengths against the middle ones, both ways; of four or more,
    since a single length says little about how time grows."""
    lengths = sorted({shape.problem.N for shape in sweep})
    if len(lengths) < 4:
        return []
    ends = {N for i, N in enumerate(lengths) if i % 4 in (0, 3)}
    outer = [shape for shape in sweep if shape.problem.N in ends]
    inner = [shape for shape in sweep if shape.problem.N not in ends]
    return [(outer, inner), (inner, outer)]


def _held_out(seen: list[Timed], unseen: list[Timed]) -> HeldOut:
    constants = calibrate(seen)
    scores = tuple(_score(shape, constants) for shape in unseen)
    return HeldOut(tuple(_name(shape) for shape in seen), constants, scores)


def _name(shape: Timed) -> ShapeName:
    p = shape.problem
    return ShapeName(shape.kernel.name, p.dtype, p.D, p.N, p.causal)


def _score(shape: Timed, constants: Machine | None) -> ShapeScore:
    model = Model(shape.problem, shape.gpu, shape.kernel, constants)
    costs = [model.predict(budget) for budget in shape.budgets]
    # The order of ``cost.order``.
    ordered = sorted(
        range(len(costs)), key=lambda i: place(shape.budgets[i], shape.kept[i], costs[i])
    )
    fastest = min(range(len(costs)), key=lambda i: shape.ms[i])
    best, first = shape.ms[fastest], ordered[0]
    predicted = [cost.predicted_ms for cost in costs]
    kept = [i for i in range(len(costs)) if shape.kept[i]]
    return ShapeScore(
        kernel=shape.kernel.name,
        gpu=shape.gpu.name,
        problem=shape.problem,
        timed=len(costs),
        best=costs[fastest].config,
        best_ms=best,
        best_place=ordered.index(fastest) + 1,
        first=costs[first].config,
        first_ms=shape.ms[first],
        first_predicted_ms=predicted[first],
        first_share=best / shape.ms[first],
        first8_share=best / min(shape.ms[i] for i in ordered[:FIRST]),
        rank_correlation=rank_correlation(predicted, shape.ms),
        kept_correlation=rank_correlation(
            [predicted[i] for i in kept], [shape.ms[i] for i in kept]
        ),
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, ties sharing theirs. 0 where one never varies."""
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    middle = (len(a) - 1) / 2
    both = sum((x - middle) * (y - middle) for x, y in zip(ranks_a, ranks_b, strict=True))
    squares_a = sum((x - middle) ** 2 for x in ranks_a)
    squares_b = sum((y - middle) ** 2 for y in ranks_b)
    product: float = (squares_a * squares_b) ** 0.5
    return both / product if product else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = {}
    for at, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(at)
    return [sum(places[value]) / len(places[value]) for value in values]
