"""From candidates to a short list: the greedy cover of the problems, and the room it must keep.

The list claims to serve (dtype, D) pairs beyond the problems that were timed. Each pair that any
candidate fits gets one, at the cost of the config that the list can best do without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from flashtune.records import Config, Problem

Pair = tuple[str, int]
"""A dtype and a head dimension D that the exported list claims to serve."""

Fits = Callable[[Config, str, int], bool]
"""Whether a config can launch for a dtype and a head dimension D."""

Rank = tuple[float, ...]
"""What decides between configs that are equally good; the smaller one wins."""


@dataclass(frozen=True)
class Candidates:
    """The configs to choose from. Shares are aligned with ``problems``; 0 is 'not timed there'."""

    problems: tuple[Problem, ...]
    shares: Mapping[Config, tuple[float, ...]]  # best ms / this ms
    rank: Mapping[Config, Rank]
    reserve: frozenset[Config]  # ran, but was too slow to be timed: only to serve a pair


def reached_by(pool: Candidates, configs: Sequence[Config]) -> tuple[float, ...]:
    """The share of the best that a list reaches on each problem."""
    if not configs:
        return (0.0,) * len(pool.problems)
    return tuple(map(max, zip(*(pool.shares[config] for config in configs), strict=True)))


def _worst_first(shares: Sequence[float]) -> tuple[float, ...]:
    """Compares lists of shares by their worst, then their second worst, and so on.

    Comparing the worst alone would be blind where no single config was timed on every problem:
    every first choice would score 0.
    """
    return tuple(sorted(shares))


def cover(pool: Candidates, max_configs: int, regret: float) -> list[Config]:
    """Greedy: at each step the config that raises the worst problem the most."""
    candidates = [config for config in pool.shares if config not in pool.reserve]
    # A barred config may hold a problem's best time. What no listed config can reach must not
    # keep the others from being good enough.
    targets = [(1 - regret) * share for share in reached_by(pool, candidates)]
    chosen: list[Config] = []
    reached = reached_by(pool, chosen)
    while len(chosen) < max_configs and any(
        share < target for share, target in zip(reached, targets, strict=True)
    ):
        config = _preferred(
            pool, candidates, {c: tuple(map(max, reached, pool.shares[c])) for c in candidates}
        )
        raised = reached_by(pool, [*chosen, config])
        if raised == reached:
            break
        chosen.append(config)
        reached = raised
    return chosen


def _preferred(
    pool: Candidates,
    candidates: Sequence[Config],
    shares: Mapping[Config, tuple[float, ...]],
) -> Config:
    """The candidate with the best shares, worst first; the rank and its own order break ties."""
    return min(
        candidates,
        key=lambda c: (tuple(-s for s in _worst_first(shares[c])), pool.rank[c], c),
    )


# The reservation for dtypes and head dimensions that the list claims to serve.


def fitting(
    pool: Candidates, pairs: Sequence[Pair], fits: Fits | None, ran: Collection[tuple[Config, Pair]]
) -> dict[Pair, frozenset[Config]]:
    """For each pair, the candidates that fit it: as ``fits`` says, or because they ``ran``."""
    return {
        pair: frozenset(
            config
            for config in pool.shares
            if (fits(config, *pair) if fits is not None else (config, pair) in ran)
        )
        for pair in pairs
    }


def make_room(
    pool: Candidates,
    chosen: Sequence[Config],
    able: Mapping[Pair, frozenset[Config]],
    max_configs: int,
) -> tuple[list[Config], list[Config]]:
    """The list with room made for every pair that can be served, and the configs added for one."""
    configs = list(chosen)
    reserved: list[Config] = []
    # The pair with the fewest candidates goes first: its config may well serve the next pair.
    for pair in sorted(able, key=lambda pair: (len(able[pair]), pair)):
        if not able[pair] or any(config in able[pair] for config in configs):
            continue
        if len(configs) >= max_configs:
            spare = _cheapest_to_remove(pool, configs, able)
            if spare is None:
                continue
            configs.remove(spare)
        own = [i for i, p in enumerate(pool.problems) if (p.dtype, p.D) == pair]
        shares = {c: pool.shares[c] for c in able[pair]}
        on_own = {c: tuple(shares[c][i] for i in own) for c in shares}
        # Times on the pair's own problems say more than times on others.
        timed_there = any(any(on_own[c]) for c in on_own)
        added = _preferred(pool, sorted(able[pair]), on_own if timed_there else shares)
        configs.append(added)
        reserved.append(added)
    return configs, [config for config in reserved if config in configs]


def _cheapest_to_remove(
    pool: Candidates, configs: Sequence[Config], able: Mapping[Pair, frozenset[Config]]
) -> Config | None:
    """The config whose removal leaves the best list, among those that no pair depends on."""
    removable = [c for c in configs if not dependents(c, configs, able)]
    if not removable:
        return None
    # Of equal ones the last: the list has the most useful first.
    return max(
        reversed(removable),
        key=lambda c: _worst_first(reached_by(pool, [other for other in configs if other != c])),
    )


def dependents(
    config: Config, configs: Sequence[Config], able: Mapping[Pair, frozenset[Config]]
) -> list[Pair]:
    """The pairs that only this config of the list serves."""
    others = [other for other in configs if other != config]
    return [
        pair
        for pair, configs_that_fit in able.items()
        if config in configs_that_fit and not any(o in configs_that_fit for o in others)
    ]
