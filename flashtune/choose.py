"""The configs that a step of the ladder runs with on a card, for one problem.

A tuned step takes those of a tuned list. Where nobody has swept that list's kernel on the card, the
list of the nearest kernel serves, and where there is none at all the cost model's first choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

from flashtune.budget import assess, verdict
from flashtune.errors import FlashtuneError
from flashtune.gpu import GpuSpec
from flashtune.kernels import KERNELS, Kernel
from flashtune.ladder import Fixed, Step
from flashtune.plan import plan_problem
from flashtune.records import ELEMENT_BYTES, Config, OutClass, Problem, Verdict
from flashtune.space import load_space
from flashtune.tuned import TunedList, tuned_list

MODEL_CONFIGS = 5
"""How many of the model's first choices a step may tune over: as many as an exported list has."""


@dataclass(frozen=True)
class Choice:
    """Configs that can launch, the most promising first, and where they are from."""

    configs: tuple[Config, ...]
    origin: str
    predicted: bool = False  # the cost model's word: nothing was measured on such a card


def choose(step: Step, problem: Problem, gpu: GpuSpec, triton: tuple[int, int]) -> Choice:
    """What ``step`` runs with. ``triton`` is the version that will compile it, as (3, 6).

    Raises FlashtuneError where no config of the step can launch, with the reason.
    """
    kernel = KERNELS[step.body]
    if isinstance(step.choice, Fixed):
        both = (step.choice.config, step.choice.fallback)
        fixed = _launchable([c for c in both if c is not None], problem, gpu, kernel, triton)
        return Choice(fixed[:1], "fixed")
    tuned = nearest_list(KERNELS[step.choice.swept], gpu.name, problem.dtype, problem.D)
    if tuned is not None:
        configs = _by_promise(tuned, problem)
        if tuned.kernel != kernel.name:  # its further axes are about its own code
            configs = list(dict.fromkeys(config.plain for config in configs))
        launchable = _launchable(configs, problem, gpu, kernel, triton)
        whose = f"{tuned.kernel} at {tuned.dtype} and D={tuned.D} on {tuned.gpu}"
        return Choice(launchable, f"the best of {whose}, measured {tuned.measured}")
    return Choice(predicted(problem, gpu, kernel, triton), "the cost model", predicted=True)


def nearest_list(kernel: Kernel, gpu: str, dtype: str, D: int) -> TunedList | None:
    """The tuned list of ``kernel`` on the card, or else of the kernel nearest to it.

    The same key loops count first, then the fewest steps of the ladder. Kernels of other warps, as
    those written for one card, neither lend nor borrow. The two 16-bit dtypes have the same tiles
    and tensor rate: the list of one stands in for the other's.
    """
    ladder = list(KERNELS.values())
    place = ladder.index(kernel)
    for near in sorted(
        (k for k in ladder if k.takes == kernel.takes),
        key=lambda k: (k.key_loops != kernel.key_loops, abs(ladder.index(k) - place)),
    ):
        found = _own_list(near, gpu, dtype, D)
        if found is not None:
            return found
    return None


def _own_list(kernel: Kernel, gpu: str, dtype: str, D: int) -> TunedList | None:
    for alike in sorted(ELEMENT_BYTES, key=lambda name: name != dtype):
        if ELEMENT_BYTES[alike] == ELEMENT_BYTES[dtype]:
            found = tuned_list(gpu, kernel.name, alike, D)
            if found is not None:
                return found
    return None


def fastest_step(problem: Problem, gpu: GpuSpec, steps: Iterable[Step]) -> Step | None:
    """The step of the ladder that was fastest on the shape most like ``problem``, of those whose
    own kernel was timed on that very shape; None where nobody has timed any of ``steps`` on the
    card for the dtype and D. Of equals the later step."""
    times: dict[Problem, list[tuple[float, int, Step]]] = {}
    for place, step in enumerate(steps):
        tuned = _own_list(KERNELS[step.body], gpu.name, problem.dtype, problem.D)
        for winner in tuned.winners if tuned is not None else ():
            if winner.ms is not None:
                times.setdefault(winner.problem, []).append((winner.ms, -place, step))
    if not times:
        return None
    return min(times[min(times, key=lambda shape: unlike(shape, problem))])[2]


def unlike(shape: Problem, problem: Problem) -> tuple[bool, float]:
    """How far a measured shape is from the problem: another mask first, then the lengths."""
    lengths = abs(log2(shape.N / problem.N)) + abs(log2(shape.N_k / problem.N_k))
    return shape.causal != problem.causal, lengths


def _by_promise(tuned: TunedList, problem: Problem) -> list[Config]:
    """The winner of the shape most like ``problem``, then the rest of the list."""
    nearest = min(tuned.winners, key=lambda w: unlike(w.problem, problem), default=None)
    first = [] if nearest is None else [nearest.config]
    return list(dict.fromkeys([*first, *tuned.configs]))


def _launchable(
    configs: Sequence[Config],
    problem: Problem,
    gpu: GpuSpec,
    kernel: Kernel,
    triton: tuple[int, int],
) -> tuple[Config, ...]:
    verdicts = {c: verdict(assess(problem, c, gpu, kernel, triton), gpu) for c in configs}
    kept = tuple(c for c, answer in verdicts.items() if answer.out is not OutClass.CANNOT)
    if not kept:
        raise _none_can_launch(problem, kernel, verdicts.items())
    return kept


def predicted(
    problem: Problem, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int]
) -> tuple[Config, ...]:
    """The cost model's first choices, the most promising first.

    Raises FlashtuneError where the budget keeps no config of the space.
    """
    plan = plan_problem(
        problem, load_space("article"), gpu, kernel, triton, exhaustive=False, top=MODEL_CONFIGS
    )
    if not plan.tried:
        raise _none_can_launch(problem, kernel, plan.pruned.items())
    return plan.tried


def _none_can_launch(
    problem: Problem, kernel: Kernel, verdicts: Iterable[tuple[Config, Verdict]]
) -> FlashtuneError:
    *_, (config, answer) = verdicts
    return FlashtuneError(
        f"{kernel.name} has no config that can launch on {problem}: {config} {answer.reason}.",
        "Split the problem, or see 'flashtune budget' for what would fit.",
    )
