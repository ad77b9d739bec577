"""The race: which config is fastest, found without timing every config for long.

It knows nothing of GPUs. Whoever runs it brings a :class:`Track`, which launches configs or replays
recorded samples. Two stages:

    look    each config once, a few launches, with the best so far launched beside it. Out
            (``screened``) when its fastest launch is still ``LOOK_FACTOR`` times the best's median.
            Who was kept beside a slower one gets a second look, beside the best of all.
    final   the rest in interleaved rounds of growing length. Differences are taken within a round,
            so that what changes between rounds (clocks, temperature) is in none of them. Equal
            when behind the leader by no more than ``EQUAL`` with ``CONFIDENCE``; out when slower
            with that confidence, and by more than ``SLOWER`` as far as one can tell. The race ends
            when every config left is equal, or after ``MOST_ROUNDS`` that count. Until the track
            runs at a speed that lasts, only who is ``FAR`` behind leaves, and for those who stay
            what ran at another speed does not count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flashtune.records import Compiled, Config
from flashtune.stats import median, paired_interval

LOOK_LAUNCHES = 5
LOOK_FACTOR = 1.1
"""A launch is off by 4% at 13 us and by 0.3% at 0.3 ms (standard deviations on an H200): the
fastest of five is 10% over the median of something faster about never."""
CONFIDENCE = 0.9995
"""Of one comparison. A race compares some ten configs some twenty times."""
EQUAL = 0.005
NEAR, SLOWER = 0.002, 0.0025
"""Another process finds another difference of the same two configs, by up to 0.2%. Who is no more
than that behind may be chosen in the leader's place, and who is no more than a little over it is
not taken for slower, however sure a race is of it."""
FAR = 0.05
"""Three times what the clock was seen to move a difference by, on an H200 at D=64: 1.6%."""
FIRST_LAUNCHES = 8
DOUBLE_EVERY = 4  # rounds
MOST_LAUNCHES = 128
BLOCK_MS = 20.0
"""A config's launches in one round take about this at most: another round, on another copy of the
tensors, says more than a longer one."""
MOST_ROUNDS = 40
_FEWEST_ROUNDS = 4  # before anything is decided

Samples = tuple[float, ...]


class Track(Protocol):
    """Launches configs, each with a cold L2, and returns milliseconds."""

    def look(self, config: Config, beside: Config | None) -> tuple[Samples, Samples]:
        """``LOOK_LAUNCHES`` samples of ``config``, and of ``beside`` taken in turns with them."""

    def round(self, configs: Sequence[Config], launches: int) -> Mapping[Config, Samples]:
        """``launches`` samples of each of ``configs``, some of each in turn, in the order given: a
        long block of one config would run at another clock than the next one's."""

    def steady(self) -> bool | None:
        """Whether the last round ran at a speed that lasts; None while that is not known. After
        False only later rounds count."""


@dataclass(frozen=True)
class Look:
    """What a short look said."""

    config: Config
    samples_ms: Samples
    screened: bool
    ratio: float  # its median over the best's, launched beside it; 1 for the first


@dataclass(frozen=True)
class Standing:
    """One finalist against the leader: how far behind it is, as a fraction of the leader's time."""

    config: Config
    behind: float
    at_least: float  # with CONFIDENCE
    at_most: float
    out_after: int | None  # rounds; None: it stayed to the end

    @property
    def equal(self) -> bool:
        """Shown to be no more than ``EQUAL`` behind."""
        return self.at_most <= EQUAL

    def slower(self, by: float = SLOWER) -> bool:
        """Shown to be behind, and probably by more than ``by``."""
        return self.at_least > 0 and self.behind > by


@dataclass(frozen=True)
class Final:
    """The finalists' rounds, and what they say."""

    rounds: tuple[Mapping[Config, Samples], ...]
    steady_from: int  # the first round that counts for those who ran then
    leader: Config
    standings: tuple[Standing, ...]  # of the others, the closest first

    @property
    def ties(self) -> tuple[Standing, ...]:
        """Those that could not be told from the leader."""
        return tuple(s for s in self.standings if s.out_after is None)

    def counted(self, config: Config) -> dict[int, Samples]:
        """By the round's number, the samples of ``config`` that count: since the track was steady,
        or all of them where it had left before."""
        ran = {n: r[config] for n, r in enumerate(self.rounds) if config in r}
        return {n: own for n, own in ran.items() if n >= self.steady_from} or ran


class Looks:
    """The first stage, one config at a time, in whatever order they come."""

    def __init__(self, track: Track) -> None:
        self._track = track
        self._kept: dict[Config, float] = {}  # median ms over the first best's
        self.best: Config | None = None
        self.late: list[Look] = []  # second looks that put somebody out
        self._twice: set[Config] = set()

    def take(self, config: Config) -> Look:
        """Look at ``config``; it may become the new best."""
        samples, beside = self._track.look(config, self.best)
        if self.best is None:
            self._kept[config], self.best = 1.0, config
            return Look(config, samples, False, 1.0)
        ratio = median(samples) / median(beside)
        screened = min(samples) > LOOK_FACTOR * median(beside)
        if not screened:
            self._kept[config] = ratio * self._kept[self.best]
            if ratio < 1:
                self.best = config
        return Look(config, samples, screened, ratio)

    def stand(self, config: Config) -> None:
        """``config`` won an earlier race: the others have to beat it."""
        self._kept[config], self.best = 1.0, config

    def drop(self, config: Config) -> None:
        """``config`` is out."""
        self._kept.pop(config, None)

    def finalists(self) -> list[Config]:
        """Who goes on. Where who was kept seems to be over ``LOOK_FACTOR`` behind the best now,
        another look decides: what is known of it is a product of ratios, each of which made the
        luckier one the best, and so too large."""
        for config in sorted(self._kept, key=lambda c: -self._kept[c]):
            best = self.best
            if best is None or self._kept[config] <= LOOK_FACTOR * self._kept[best]:
                break
            if config in self._twice:
                continue
            self._twice.add(config)
            look = self.take(config)
            if look.screened:
                self.drop(config)
                self.late.append(look)
        return sorted(self._kept, key=lambda config: self._kept[config])


def final(track: Track, configs: Sequence[Config], rng: random.Random) -> Final:
    """Race ``configs`` until they are told apart or shown equal. ``rng`` mixes each round's order,
    so that no config always runs after the same other one."""
    rounds: list[Mapping[Config, Samples]] = []
    left, out_after = list(configs), dict[Config, int]()
    steady: bool | None = None
    steady_from = raced_from = 0
    while not steady or len(rounds) - steady_from < MOST_ROUNDS:
        launches = min(FIRST_LAUNCHES * 2 ** (len(rounds) // DOUBLE_EVERY), MOST_LAUNCHES)
        if rounds:
            fastest = min(median(samples) for samples in rounds[-1].values())
            launches = min(launches, max(FIRST_LAUNCHES, int(BLOCK_MS / fastest)))
        mixed = list(left)
        rng.shuffle(mixed)
        rounds.append(track.round(mixed, launches))
        was_steady, steady = steady, track.steady()
        if steady is False:
            steady_from = len(rounds)
            if was_steady:  # so it seemed: whoever left is raced again
                left, out_after, raced_from = list(configs), {}, len(rounds)
        counted = rounds[steady_from if steady else raced_from :]
        if len(counted) < _FEWEST_ROUNDS:
            continue
        _, standings = judge(counted, left)
        out = [s.config for s in standings if s.slower(SLOWER if steady else FAR)]
        left = [config for config in left if config not in out]
        out_after |= dict.fromkeys(out, len(rounds))
        if steady and all(s.equal or s.config in out for s in standings):
            break
    leader, standings = judge(rounds[steady_from:], left)
    # Who left is judged by the rounds that it ran, against the config that leads now.
    gone = [
        judge_pair(
            rounds[steady_from if after > steady_from else raced_from :], leader, config, after
        )
        for config, after in out_after.items()
    ]
    closest = sorted(gone, key=lambda s: s.behind)
    return Final(tuple(rounds), steady_from, leader, (*standings, *closest))


def choose(final: Final, compiled: Mapping[Config, Compiled]) -> Config:
    """The config to use: of the leader and those shown equal to it and at most ``NEAR`` behind, the
    one with the fewest spills, then the least shared memory, then the smallest tile. So that
    near-equals do not take turns."""

    def preference(config: Config) -> tuple[int, int, int, Config]:
        facts = compiled[config]
        return (facts.spills or 0, facts.shared or 0, config.q_tile * config.k_tile, config)

    equals = [tie.config for tie in final.ties if tie.equal and tie.behind <= NEAR]
    return min([final.leader, *equals], key=preference)


def judge(
    rounds: Sequence[Mapping[Config, Samples]], configs: Sequence[Config]
) -> tuple[Config, tuple[Standing, ...]]:
    """The fastest of ``configs``, which ran in every round, and how far the others are behind."""
    weights = [len(r[configs[0]]) for r in rounds]
    means = {
        c: sum(w * math.log(median(r[c])) for w, r in zip(weights, rounds, strict=True))
        for c in configs
    }
    leader = min(configs, key=lambda c: (means[c], c))
    standings = [judge_pair(rounds, leader, c, None) for c in configs if c != leader]
    return leader, tuple(sorted(standings, key=lambda s: (s.behind, s.config)))


def judge_pair(
    rounds: Sequence[Mapping[Config, Samples]],
    leader: Config,
    config: Config,
    out_after: int | None,
) -> Standing:
    """How far ``config`` is behind ``leader`` in the rounds that both ran: the mean of the rounds'
    differences of log medians, a round counting by its launches."""
    both = [r for r in rounds if leader in r and config in r]
    differences = [math.log(median(r[config]) / median(r[leader])) for r in both]
    behind, low, high = paired_interval(differences, [len(r[config]) for r in both], CONFIDENCE)
    at_least, at_most = (math.expm1(min(x, 50.0)) for x in (low, high))
    return Standing(config, math.expm1(behind), at_least, at_most, out_after)
