"""The race on simulated tracks and on recorded sweeps: who wins, who leaves, what it costs."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, subprocess_env
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.hope import FEWEST, Hope
from flashtune.race import (
    BLOCK_MS,
    EQUAL,
    LOOK_LAUNCHES,
    MOST_LAUNCHES,
    MOST_ROUNDS,
    Final,
    Looks,
    Samples,
    Standing,
    choose,
    final,
    judge,
)
from flashtune.recorded import COLUMNS
from flashtune.records import Compiled, Config


def config(n: int) -> Config:
    return Config(16, 16, 1, n + 1)


class NoisyTrack:
    """Configs of known times; noise of each launch, and a drift that all launches share."""

    def __init__(
        self, ms: dict[Config, float], noise: float, seed: int, drift: float = 0.0
    ) -> None:
        self.ms, self.noise, self.drift = ms, noise, drift
        self.rng = random.Random(seed)
        self.launched = 0

    def one(self, config: Config) -> float:
        self.launched += 1
        slow = 1 + self.drift * math.sin(self.launched / 700)
        return self.ms[config] * slow * math.exp(self.rng.gauss(0, self.noise))

    def look(self, config: Config, beside: Config | None) -> tuple[Samples, Samples]:
        ours, theirs = [], []
        for _ in range(LOOK_LAUNCHES):
            ours.append(self.one(config))
            if beside is not None:
                theirs.append(self.one(beside))
        return tuple(ours), tuple(theirs)

    def round(self, configs: Sequence[Config], launches: int) -> dict[Config, Samples]:
        return {c: tuple(self.one(c) for _ in range(launches)) for c in configs}

    def steady(self) -> bool | None:
        return True


def raced(ms: Sequence[float], noise: float, seed: int, drift: float = 0.0) -> Final:
    times = {config(n): value for n, value in enumerate(ms)}
    return final(NoisyTrack(times, noise, seed, drift), list(times), random.Random(seed))


def test_lucky_looks_do_not_add_up_against_the_best() -> None:
    """Each new best is the luckier one of two. Were the product of their ratios believed, the best,
    which is looked at first, would be out long before a hundred that are 1.5% slower."""
    times = {config(0): 0.985} | {config(n): 1.0 for n in range(1, 100)}
    for noise in (0.04, 0.01):
        for seed in range(20):
            looks = Looks(NoisyTrack(times, noise, seed))
            for one in times:
                looks.take(one)
            assert looks.finalists().count(config(0)) == 1 and not looks.late


def test_who_was_kept_beside_a_slower_one_is_looked_at_again() -> None:
    times = {config(0): 1.25, config(1): 1.2, config(2): 1.05, config(3): 1.0}
    looks = Looks(NoisyTrack(times, 0.01, 3))
    assert not any(looks.take(one).screened for one in list(times)[:2])
    assert not any(looks.take(one).screened for one in list(times)[2:])
    assert looks.finalists() == [config(3), config(2)]
    assert sorted(look.config for look in looks.late) == [config(0), config(1)]


@pytest.mark.parametrize("noise", [0.04, 0.003])
def test_two_copies_are_equal_and_two_percent_is_slower(noise: float) -> None:
    """In at least 95 of 100 trials each, with the noise of a 13 us and of a 0.3 ms kernel."""
    equal = sum(len(raced([1.0, 1.0], noise, seed).ties) == 1 for seed in range(100))
    slower = 0
    for seed in range(100):
        result = raced([1.0, 1.02], noise, seed)
        slower += result.leader == config(0) and not result.ties
    assert equal >= 95
    assert slower >= 95


def test_drifting_clocks_are_in_no_difference() -> None:
    """All launches of a while are 10% slower: the differences within a round do not see it."""
    for seed in range(20):
        result = raced([1.0, 1.01, 1.03], 0.003, seed, drift=0.1)
        assert result.leader == config(0) and not result.ties


def test_what_is_shown_equal_is_close_and_the_race_ends() -> None:
    result = raced([1.0, 1.0005, 1.1, 1.2], 0.003, 1)
    assert len(result.rounds) < MOST_ROUNDS
    (tie,) = result.ties
    assert tie.equal and tie.at_most <= EQUAL
    assert {s.config for s in result.standings if s.out_after} == {config(2), config(3)}
    for round_ in result.rounds:  # who has left is not launched any more
        assert set(round_) >= {config(0), config(1)}
    assert set(result.rounds[-1]) == {config(0), config(1)}


@pytest.mark.parametrize(("behind", "equal"), [(0.001, True), (0.004, False)])
def test_near_equals_end_the_same_way_every_time(behind: float, equal: bool) -> None:
    """It must not be out today and equal tomorrow, but for who is about ``SLOWER`` behind."""
    ends = [raced([1.0, 1.0 + behind], 0.003, seed) for seed in range(100)]
    assert sum([tie.equal for tie in end.ties] == [True] * equal for end in ends) >= 95


def test_long_kernels_take_short_blocks() -> None:
    """So that the card's clock has no time to change between two configs of a round."""
    rounds = raced([1.5, 1.503], 0.01, 1).rounds
    assert len(rounds) > 4
    assert {len(samples) for r in rounds for samples in r.values()} <= {8, int(BLOCK_MS / 1.5)}
    short = raced([0.1, 0.1001], 0.02, 1).rounds
    assert max(len(samples) for r in short for samples in r.values()) == MOST_LAUNCHES


def test_one_finalist_is_measured_all_the_same() -> None:
    result = raced([1.0], 0.01, 1)
    assert result.leader == config(0) and result.standings == ()
    assert sum(len(r[config(0)]) for r in result.rounds) >= 32


class SettlingTrack(NoisyTrack):
    """The card takes some rounds to say that it is too fast, and some to come down. While it comes
    down the second config is the faster one; the last is far behind all the time."""

    def __init__(self, *says: tuple[int, bool | None]) -> None:
        """What ``steady`` says, for how many rounds each; True after that."""
        super().__init__({config(0): 1.0, config(1): 1.02, config(2): 1.1}, 0.002, 1)
        self.says = [word for count, word in says for _ in range(count)]
        self.rounds = 0

    def round(self, configs: Sequence[Config], launches: int) -> dict[Config, Samples]:
        self.rounds += 1
        self.ms[config(1)] = 0.98 if self.steady() is False else 1.02
        return super().round(configs, launches)

    def steady(self) -> bool | None:
        return True if self.rounds > len(self.says) else self.says[self.rounds - 1]


@pytest.mark.parametrize(("unknown", "settling"), [(0, 9), (6, 9), (6, 100)])
def test_what_ran_before_the_card_was_steady_does_not_count(unknown: int, settling: int) -> None:
    track = SettlingTrack((unknown, None), (settling, False))
    result = final(track, list(track.ms), random.Random(1))
    assert result.leader == config(0) and not result.ties
    assert result.steady_from == unknown + settling and len(result.rounds) == track.rounds
    near, far = standing_of(result, config(1)), standing_of(result, config(2))
    assert near.behind == pytest.approx(0.02, abs=0.005)
    assert (near.out_after or 0) > result.steady_from
    assert min(result.counted(config(0))) == min(result.counted(config(1))) == result.steady_from
    # Who is far behind need not wait, and keeps its samples.
    assert far.out_after is not None and far.out_after < result.steady_from
    assert list(result.counted(config(2))) == list(range(far.out_after))
    assert far.behind == pytest.approx(0.1, abs=0.01)


def test_only_who_is_far_behind_leaves_while_it_is_not_known_whether_the_card_is_steady() -> None:
    track = SettlingTrack((12, None))
    result = final(track, list(track.ms), random.Random(1))
    near, far = standing_of(result, config(1)), standing_of(result, config(2))
    assert near.out_after == 13 and (far.out_after or 13) < 12 and result.steady_from == 0


def test_who_left_a_card_that_was_not_steady_after_all_comes_back() -> None:
    """At the speed it had the second config was 2% behind, and out after four rounds; the third
    was so near that the race went on."""
    track = SettlingTrack((5, True), (6, False))
    track.ms[config(2)] = 1.001
    result = final(track, list(track.ms), random.Random(1))
    assert [len(r) for r in result.rounds[:6]] == [3, 3, 3, 3, 2, 2]
    assert all(len(r) == 3 for r in result.rounds[6:15])
    assert result.steady_from == 11 and result.leader == config(0)
    assert (standing_of(result, config(1)).out_after or 0) > 11


def standing_of(result: Final, config: Config) -> Standing:
    (found,) = (standing for standing in result.standings if standing.config == config)
    return found


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8),
    st.sampled_from([0.0005, 0.01]),
    st.integers(0, 1000),
)
def test_nobody_who_is_really_fastest_is_lost(ms: list[float], noise: float, seed: int) -> None:
    """The leader and those it cannot be told from include the fastest, or one within EQUAL."""
    result = raced(ms, noise, seed)
    stayed = [result.leader, *(s.config for s in result.ties)]
    times = {config(n): value for n, value in enumerate(ms)}
    assert min(times[c] for c in stayed) <= min(ms) * (1 + EQUAL)
    behind = [s.behind for s in result.ties]
    assert behind == sorted(behind)
    for standing in result.standings:
        assert standing.at_least <= standing.behind <= standing.at_most


def test_a_look_lets_go_what_is_clearly_slower_only() -> None:
    times = {config(0): 1.0, config(1): 1.05, config(2): 1.5, config(3): 0.7, config(4): 0.74}
    looks = Looks(NoisyTrack(times, 0.01, 3))
    out = {c: looks.take(c).screened for c in times}
    assert out == {config(0): False, config(1): False, config(2): True, config(3): False,
                   config(4): False}  # fmt: skip
    assert looks.best == config(3)
    assert looks.finalists() == [config(3), config(4)]
    late = {look.config for look in looks.late}
    assert late == {config(0), config(1)}  # they led only while nothing better ran


def test_a_near_equal_that_spills_less_is_chosen() -> None:
    result = raced([1.0, 1.0, 1.1], 0.002, 5)
    assert len(result.ties) == 1
    facts = {
        config(0): Compiled(config(0), shared=100, spills=2),
        config(1): Compiled(config(1), shared=900, spills=0),
        config(2): Compiled(config(2), shared=0, spills=0),
    }
    assert choose(result, facts) == config(1)
    facts[config(0)] = Compiled(config(0), shared=100, spills=0)
    assert choose(result, facts) == config(0)


@pytest.mark.parametrize(
    ("behind", "at_most", "chosen"), [(0.0019, 0.0049, 1), (0.0021, 0.0049, 0), (0.001, 0.0051, 0)]
)
def test_only_who_is_equal_and_near_is_chosen_in_the_leader_s_place(
    behind: float, at_most: float, chosen: int
) -> None:
    tie = Standing(config(1), behind, -0.001, at_most, out_after=None)
    result = Final(rounds=(), steady_from=0, leader=config(0), standings=(tie,))
    facts = {c: Compiled(c, shared=100 * n, spills=0) for n, c in ((2, config(0)), (1, config(1)))}
    assert choose(result, facts) == config(chosen)


def test_a_further_axis_makes_a_config_of_its_own() -> None:
    """It races against its plain twin, and of equals the plain one is chosen."""
    plain = Config(64, 64, 4, 3)
    configs = [replace(plain, maxnreg=168), plain, replace(plain, warp_specialize=False)]
    track = NoisyTrack(dict(zip(configs, (1.0, 1.0, 1.2), strict=True)), 0.002, 5)
    result = final(track, configs, random.Random(3))
    assert {result.leader, *(s.config for s in result.standings)} == set(configs)
    assert [s.config for s in result.standings if s.slower()] == [configs[2]]
    facts = {c: Compiled(c, shared=100, spills=0) for c in configs}
    assert choose(result, facts) == plain


def test_the_verdict_can_be_replayed_from_the_rounds() -> None:
    result = raced([1.0, 1.002, 1.3], 0.003, 9)
    stayed = [result.leader, *(s.config for s in result.ties)]
    leader, standings = judge(result.rounds, stayed)
    assert leader == result.leader and standings == result.ties


# -- hope


def test_hope_is_lost_only_when_the_model_cannot_be_so_wrong() -> None:
    predicted = {config(n): 1.0 + n / 100 for n in range(80)}
    hope = Hope(predicted)
    rng = random.Random(0)
    for n in range(FEWEST):
        assert hope.left(config(79))
        hope.saw(config(n), predicted[config(n)] * math.exp(rng.gauss(0.05, 0.05)))
    assert hope.left(config(5))
    assert not hope.left(config(79))
    reason = str(hope.shortfall(config(79)))
    assert "1.79 ms" in reason and "24 configs" in reason


def test_what_is_slower_than_predicted_revives_nobody() -> None:
    """Whatever the slow ones took: only what is faster than predicted says that others may be."""
    predicted = {config(n): 1.0 + n / 100 for n in range(80)}
    given_up = []
    for slow in (1.2, 4.0):
        hope = Hope(predicted)
        for n in range(FEWEST):
            hope.saw(config(n), predicted[config(n)] * (0.97, 1.0, 1.0, slow)[n % 4])
        given_up.append({c for c in predicted if not hope.left(c)})
    assert config(79) in given_up[0] and given_up[1] >= given_up[0]


def test_a_model_that_is_wrong_gives_nothing_up() -> None:
    predicted = {config(n): 1.0 + n / 100 for n in range(60)}
    hope = Hope(predicted)
    for n in range(FEWEST):
        hope.saw(config(n), 3.0 if n % 2 else 1.0)
    assert all(hope.left(c) for c in predicted)


# -- audit search


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashtune", "audit", "search", *arguments],
        cwd=cwd, env=subprocess_env(), text=True, capture_output=True,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_replayed_race_loses_little_and_saves_much(seed: int) -> None:
    done = run("--json", "--seed", str(seed))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and len(document["shapes"]) == 16
    regrets = [shape["regret"] for shape in document["shapes"]]
    assert document["worst_regret"] == max(regrets) <= 0.01
    assert (
        document["mean_regret"] == pytest.approx(sum(regrets) / 16) and sum(regrets) / 16 <= 0.003
    )
    assert document["speedup"] == document["exhaustive_s"] / document["race_s"] >= 20
    for shape in document["shapes"]:
        assert shape["finalists"] <= shape["looked_at"] <= shape["compiled"]
    assert run("--json", "--seed", str(seed)).stdout == done.stdout


def test_search_for_a_person_and_with_nothing_there(tmp_path: Path) -> None:
    done = run()
    assert done.returncode == 0 and "regret: worst" in done.stdout and "Simulated" in done.stdout
    nothing = run("--from", str(tmp_path))
    assert nothing.returncode == 2 and "no sweep is there" in nothing.stderr


def test_a_table_of_another_kernel_is_searched_as_well(h200_landscape: Path) -> None:
    """v4 with query tiles on grid axis 0, timed by do_bench with the host in many samples."""
    for seed in "1", "2", "3":
        done = run("--json", "--from", str(h200_landscape), "--seed", seed)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert len(document["shapes"]) == 4 and document["skipped"] == []
        assert document["worst_regret"] <= 0.01 and document["mean_regret"] <= 0.003
        assert document["speedup"] >= 20


def test_a_table_that_is_no_sweep_says_what_it_lacks(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "table.parquet"
    pd.DataFrame({"N": [512], "causal": [True]}).to_parquet(path)
    done = run("--from", str(path))
    assert done.returncode == 2 and "it has no D, B, H" in done.stderr
    full = {name: [1] for name in COLUMNS}
    pd.DataFrame(full).to_parquet(path)
    done = run("--from", str(path))
    assert done.returncode == 2 and "names no GPU" in done.stderr
