"""One config in full: its budget, its predicted time, and what the configs next to it cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashtune.budget import (
    Budget,
    BudgetLine,
    assess,
    compiled_verdict,
    other_tritons,
    verdict,
)
from flashtune.cost import Cost, Model
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.records import Compiled, Config, OutClass, Problem, Verdict
from flashtune.shared import terms

_MOST_WARPS = 32  # 1,024 threads, the most a block may have
_SMALLEST_TILE = 16


@dataclass(frozen=True)
class Neighbour:
    """A config near another, judged like it. ``cost`` is None for one that cannot run."""

    change: str  # from the one that was asked about: "one more stage"
    budget: Budget
    verdict: Verdict
    cost: Cost | None


@dataclass(frozen=True)
class Explanation:
    """A budget and its verdict, the predicted time, and the neighbours that explain them."""

    line: BudgetLine
    cost: Cost | None  # None: it cannot run
    beside: tuple[Neighbour, ...]
    nearest: Neighbour | None  # that runs, of one that cannot


class Explainer:
    """Explains configs for one problem, card, kernel and Triton; the last as (3, 6)."""

    def __init__(
        self, problem: Problem, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int]
    ) -> None:
        self._asked = (problem, gpu, kernel, triton)
        self._model = Model(problem, gpu, kernel)

    def explain(self, config: Config, compiled: Compiled | None = None) -> Explanation:
        """Everything about one config; ``compiled`` adds the compiler's own figures."""
        problem, gpu, kernel, triton = self._asked
        own = self._judge("", config)
        line = BudgetLine(
            own.budget,
            compiled_verdict(own.verdict, compiled, gpu),
            compiled,
            other_tritons(problem, config, gpu, kernel, triton),
            terms(problem, config, gpu, kernel, triton) or (),
        )
        nearest = self.nearest_that_runs(config) if own.cost is None else None
        return Explanation(line, own.cost, self.beside(config), nearest)

    def beside(self, config: Config) -> tuple[Neighbour, ...]:
        """One stage more; twice the warps where a block may have them; maxnreg left open where it
        is set."""
        found = [
            self._judge("one more stage", replace(config, num_stages=config.num_stages + 1)),
        ]
        if 2 * config.num_warps <= _MOST_WARPS:
            doubled = replace(config, num_warps=2 * config.num_warps)
            found.append(self._judge("twice the warps", doubled))
        if config.maxnreg is not None:
            found.append(self._judge("no maxnreg", replace(config, maxnreg=None)))
        return tuple(found)

    def nearest_that_runs(self, config: Config) -> Neighbour | None:
        """The fewest steps down that make a config worth trying, or at least able to run.

        A step takes a stage away, halves a tile or the warps, or leaves maxnreg open. Of equally
        near ones, the fastest predicted. None where nothing smaller runs either.
        """
        able: list[Neighbour] = []
        by_steps = sorted(_smaller(config), key=lambda item: item[0])
        for _, near in itertools.groupby(by_steps, key=lambda item: item[0]):
            judged = [self._judge(change, smaller) for _, change, smaller in near]
            kept = [n for n in judged if n.verdict.kept]
            if kept:
                return min(kept, key=_predicted_ms)
            able = able or [n for n in judged if n.cost is not None]
        return min(able, key=_predicted_ms, default=None)

    def _judge(self, change: str, config: Config) -> Neighbour:
        problem, gpu, kernel, triton = self._asked
        budget = assess(problem, config, gpu, kernel, triton)
        judged = verdict(budget, gpu)
        runs = judged.out is not OutClass.CANNOT
        return Neighbour(change, budget, judged, self._model.predict(budget) if runs else None)


def _predicted_ms(neighbour: Neighbour) -> tuple[float, Config]:
    assert neighbour.cost is not None, "only of configs that can run"
    return neighbour.cost.predicted_ms, neighbour.budget.config


def _smaller(config: Config) -> Iterator[tuple[int, str, Config]]:
    """Every smaller config with its distance in steps and the steps in words."""
    q_tiles = _halved(config.q_tile, _SMALLEST_TILE)
    k_tiles = _halved(config.k_tile, _SMALLEST_TILE)
    warps = _halved(config.num_warps, 1)
    caps = [config.maxnreg] if config.maxnreg is None else [config.maxnreg, None]
    for q, k, w, s, m in itertools.product(
        range(len(q_tiles)), range(len(k_tiles)), range(len(warps)), range(config.num_stages),
        range(len(caps)),
    ):  # fmt: skip
        if q + k + w + s + m:
            halved = zip(("q_tile", "k_tile", "num_warps"), (q, k, w), strict=True)
            words = [f"{name} / {2**times}" for name, times in halved if times]
            if s:
                words.append(f"{s} stage{'s' if s > 1 else ''} fewer")
            if m:
                words.append("no maxnreg")
            smaller = replace(
                config, q_tile=q_tiles[q], k_tile=k_tiles[k], num_warps=warps[w],
                num_stages=config.num_stages - s, maxnreg=caps[m],
            )  # fmt: skip
            yield q + k + w + s + m, ", ".join(words), smaller


def _halved(value: int, smallest: int) -> list[int]:
    values = [value]
    while values[-1] // 2 >= smallest:
        values.append(values[-1] // 2)
    return values
