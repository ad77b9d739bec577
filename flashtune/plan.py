"""What a sweep will do with each config of its space, before anything compiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flashtune.budget import Budget, assess, verdict
from flashtune.cost import order
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.records import Config, Problem, Verdict

TOP_WITHOUT_GPU = 40
"""Configs that are compiled when no GPU is present and --top says nothing."""


@dataclass(frozen=True)
class ProblemPlan:
    """Every config of the space falls into exactly one of ``pruned``, ``tried`` and ``ranked``."""

    problem: Problem
    budgets: dict[Config, Budget]
    pruned: dict[Config, Verdict]
    tried: tuple[Config, ...]  # compiled (and timed), the most promising first
    ranked: tuple[Config, ...]  # would be next, but --top stops before them
    predicted_ms: dict[Config, float]  # the cost model's, for every config that can launch

    def reasons(self) -> Counter[tuple[str, str]]:
        """How many configs each (class, rule) leaves out."""
        return Counter((str(v.out), str(v.rule)) for v in self.pruned.values())


def plan_problem(
    problem: Problem,
    configs: Sequence[Config],
    gpu: GpuSpec,
    kernel: Kernel,
    triton: tuple[int, int],
    *,
    exhaustive: bool,
    top: int | None,
) -> ProblemPlan:
    """Sort the space's configs for one problem; ``top`` None tries all that the budget keeps."""
    budgets = {config: assess(problem, config, gpu, kernel, triton) for config in configs}
    verdicts = {c: verdict(b, gpu, exhaustive=exhaustive) for c, b in budgets.items()}
    # Judged without the mercy of an exhaustive sweep, what is hopeless is tried last.
    strict = [verdict(b, gpu) for b in budgets.values()] if exhaustive else list(verdicts.values())
    costs = order(problem, list(budgets.values()), strict, gpu, kernel)
    ordered = [cost.config for cost in costs if verdicts[cost.config].kept]
    return ProblemPlan(
        problem,
        budgets,
        {c: v for c, v in verdicts.items() if not v.kept},
        tuple(ordered[:top]),
        tuple(ordered[top:] if top is not None else ()),
        {cost.config: cost.predicted_ms for cost in costs},
    )
