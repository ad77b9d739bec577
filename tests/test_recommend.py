"""The recommended list: what wins, what is listed, and what it is said to be worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.errors import FlashtuneError
from flashtune.recommend import recommend
from flashtune.records import Config, Problem, Status
from flashtune.results import Provenance, Recommendation, Row, SweepFile

LANDSCAPE = (
    Path(__file__).resolve().parents[2] / "shared" / "data" / "h200_landscape_v4_bf16_D64.parquet"
)


def problem(N: int = 512, D: int = 64, dtype: str = "bf16", causal: bool = False) -> Problem:
    return Problem(B=4, H=8, H_kv=8, N=N, N_k=N, D=D, causal=causal, dtype=dtype)


def config(text: str) -> Config:
    return Config(*(int(part) for part in text.split("x")))


def row(p: Problem, c: Config, ms: float | None, status: Status = Status.TIMED, **more: Any) -> Row:
    return Row(
        run_id=more.pop("run_id", "run"),
        status=status,
        reason=more.pop("reason", None),
        kernel="v4",
        gpu="NVIDIA H200",
        cc="9.0",
        dtype=p.dtype,
        B=p.B,
        H=p.H,
        H_kv=p.H_kv,
        N=p.N,
        N_k=p.N_k,
        D=p.D,
        causal=p.causal,
        q_tile=c.q_tile,
        k_tile=c.k_tile,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        ms=ms,
        **more,
    )


def sweep(*rows: Row, measured: bool = True, **provenance: str) -> SweepFile:
    about = Provenance(
        gpu="NVIDIA H200",
        cc="9.0",
        sms=132,
        measured=measured,
        driver="580.1",
        torch="2.11",
        triton="3.6.0",
        cuda="13.0",
        python="3.12",
        kernel="v4",
        kernel_hash="abc",
        sm_clock_mhz=None,
        mem_clock_mhz=None,
        power_limit_w=None,
        git_commit=None,
    )
    return SweepFile(replace(about, **provenance), (), (), (), rows)


def listed(rec: Recommendation) -> list[str]:
    return [str(item.config) for item in rec.configs]


A, B, C, D = map(config, ("16x16x1x1", "32x32x2x2", "64x32x4x3", "64x64x4x2"))
SHORT, LONG = problem(512), problem(4096)

CONFIGS = [Config(q, k, 4, s) for q in (16, 64) for k in (16, 64) for s in (1, 2)]
PROBLEMS = [problem(N, D, dtype) for N in (512, 4096) for D, dtype in ((64, "bf16"), (128, "fp32"))]

# Few distinct times, so that ties happen; any status, so that most rows cannot win.
outcomes = st.tuples(
    st.sampled_from([Status.TIMED] * 8 + [Status.WRONG, Status.SCREENED, Status.OUT_OF_RESOURCES]),
    st.sampled_from([1.0, 1.004, 1.1, 1.5, 2.0, 7.0]),
)
landscapes = st.dictionaries(
    st.tuples(st.sampled_from(PROBLEMS), st.sampled_from(CONFIGS)), outcomes, max_size=32
)
Landscape = Mapping[tuple[Problem, Config], tuple[Status, float]]


def file_of(landscape: Landscape) -> SweepFile:
    return sweep(*(row(p, c, ms, status) for (p, c), (status, ms) in landscape.items()))


def timed(landscape: Landscape) -> dict[Problem, dict[Config, float]]:
    times: dict[Problem, dict[Config, float]] = {}
    for (p, c), (status, ms) in landscape.items():
        if status is Status.TIMED:
            times.setdefault(p, {})[c] = ms
    return times


def attempt(landscape: Landscape, **options: Any) -> Recommendation | None:
    """None where there is nothing to list; that this is the reason is checked."""
    try:
        return recommend([file_of(landscape)], **options)
    except FlashtuneError:
        wrong = {c for (_, c), (status, _) in landscape.items() if status is Status.WRONG}
        assert not {c for times in timed(landscape).values() for c in times} - wrong
        return None


@given(landscapes, st.integers(1, 6), st.sampled_from([0.0, 0.01, 0.3]))
def test_the_list_and_its_numbers(landscape: Landscape, most: int, regret: float) -> None:
    rec = attempt(landscape, max_configs=most, regret=regret)
    if rec is None:
        return
    times = timed(landscape)
    assert 1 <= len(rec.configs) <= most
    assert len(set(listed(rec))) == len(rec.configs)
    # Winners: the fastest timed row of each problem that has one, and no other problem.
    assert {p: ms for p, _, ms in rec.winners} == {p: min(t.values()) for p, t in times.items()}
    assert all(times[p][c] == ms for p, c, ms in rec.winners)
    # Shares: the true ones, for exactly the problems that the config was timed on.
    for item in rec.configs:
        expected = {
            p: min(t.values()) / t[item.config] for p, t in times.items() if item.config in t
        }
        assert dict(item.share_of_best) == pytest.approx(expected)
    # The worst loss, from the times themselves.
    list_best = {
        p: min((t[i.config] for i in rec.configs if i.config in t), default=float("inf"))
        for p, t in times.items()
    }
    worst = min(min(times[p].values()) / ms for p, ms in list_best.items())
    assert rec.worst_loss == pytest.approx(1 - worst)


@given(landscapes)
def test_with_room_for_all_the_regret_is_kept(landscape: Landscape) -> None:
    landscape = {key: value for key, value in landscape.items() if value[0] is not Status.WRONG}
    rec = attempt(landscape, max_configs=len(CONFIGS), regret=0.01)
    if rec is not None:
        assert rec.worst_loss is not None
        assert rec.worst_loss <= 0.01 + 1e-12


@given(landscapes)
def test_a_wrong_config_is_never_listed(landscape: Landscape) -> None:
    rec = attempt(landscape, serve=[("bf16", 64), ("fp16", 32)], fits=lambda c, dtype, D: True)
    if rec is None:
        return
    wrong = {c for (_, c), (status, _) in landscape.items() if status is Status.WRONG}
    assert {c for c, _ in rec.barred} == wrong
    assert not wrong & {item.config for item in rec.configs}


@given(landscapes, st.randoms())
def test_the_order_of_the_rows_does_not_matter(landscape: Landscape, random: Any) -> None:
    shuffled = list(landscape.items())
    random.shuffle(shuffled)
    assert attempt(landscape) == attempt(dict(shuffled))


@given(
    landscapes,
    st.integers(1, 4),
    st.frozensets(st.sampled_from(CONFIGS)),
    st.frozensets(st.sampled_from(CONFIGS)),
)
def test_the_reservation(
    landscape: Landscape, most: int, first: frozenset[Config], second: frozenset[Config]
) -> None:
    able = {("fp32", 128): first, ("fp16", 256): second}
    rec = attempt(
        landscape,
        max_configs=most,
        serve=list(able),
        fits=lambda c, dtype, D: c in able[dtype, D],
    )
    if rec is None:
        return
    configs = {item.config for item in rec.configs}
    assert len(configs) <= most
    assert set(rec.serves) == {pair for pair, fitting in able.items() if fitting & configs}
    assert set(rec.serves) | set(rec.unserved) == set(able)
    barred = {c for c, _ in rec.barred}
    usable = {
        c
        for (_, c), (status, _) in landscape.items()
        if status in (Status.TIMED, Status.SCREENED) and c not in barred
    }
    for pair in rec.unserved:
        # Either nothing fits, or the only room is needed by the other pair.
        assert not able[pair] & usable or most == 1
    for item in rec.configs:
        if item.kept_for and "the only one" in item.kept_for:
            assert any(fitting & configs == {item.config} for fitting in able.values())


def test_a_wrong_row_never_wins_even_when_fastest() -> None:
    rows = [row(SHORT, A, 0.1, Status.WRONG), row(SHORT, B, 1.0), row(LONG, B, 1.0)]
    rec = recommend([sweep(*rows, row(LONG, A, 0.5))])
    assert listed(rec) == [str(B)]
    assert rec.winners == ((SHORT, B, 1.0), (LONG, A, 0.5))
    assert rec.worst_loss == 0.5  # A is truly twice as fast there, and cannot be listed
    assert rec.barred == ((A, f"wrong on {SHORT}"),)


def test_configs_that_differ_in_a_further_axis_are_two_configs() -> None:
    capped, off = replace(C, maxnreg=168), replace(C, warp_specialize=False)
    rows = [
        row(SHORT, C, 2.0), row(SHORT, capped, 1.0, maxnreg=168),
        row(SHORT, off, 1.5, warp_specialize=False),
        row(LONG, C, 1.0), row(LONG, capped, 1.0, Status.WRONG, maxnreg=168),
        row(LONG, off, 2.0, warp_specialize=False),
    ]  # fmt: skip
    rec = recommend([sweep(*rows)], regret=0.0)
    assert rec.winners == ((SHORT, capped, 1.0), (LONG, C, 1.0))
    assert listed(rec) == [str(C), str(off)]  # the fastest there is was wrong elsewhere
    assert rec.barred == ((capped, f"wrong on {LONG}"),)


def test_of_equals_the_one_that_leaves_more_open_wins() -> None:
    capped = replace(C, maxnreg=168)
    rec = recommend([sweep(row(SHORT, capped, 1.0, maxnreg=168), row(SHORT, C, 1.0))])
    assert rec.winners == ((SHORT, C, 1.0),) and listed(rec) == [str(C)]


def test_a_config_that_was_wrong_in_one_of_two_runs_does_not_win() -> None:
    right, wrong = row(SHORT, A, 0.5), row(SHORT, A, 0.5, Status.WRONG, run_id="second")
    rec = recommend([sweep(right, row(SHORT, B, 1.0)), sweep(wrong)])
    assert rec.winners == ((SHORT, B, 1.0),)
    assert listed(rec) == [str(B)]


@pytest.mark.parametrize(
    ("status", "reason", "is_listed"),
    [
        (Status.CRASHED, "illegal memory access", False),
        (Status.TIMEOUT, "60 s", False),
        (Status.COMPILE_FAILED, "PassManager::run failed", False),
        (Status.COMPILE_FAILED, "ptxas C7602: insufficient registers", True),
        (Status.OUT_OF_RESOURCES, "shared memory", True),
        (Status.PRUNED, "shared memory", True),
        (Status.SCREENED, None, True),
    ],
)
def test_what_would_end_a_users_tuning_is_not_listed(
    status: Status, reason: str | None, is_listed: bool
) -> None:
    rows = [row(SHORT, A, 0.5), row(SHORT, B, 1.0), row(LONG, B, 1.0)]
    rec = recommend([sweep(*rows, row(LONG, A, None, status, reason=reason))])
    assert (str(A) in listed(rec)) is is_listed


def test_a_crash_that_a_later_run_clears() -> None:
    crashed = row(SHORT, A, None, Status.CRASHED)
    rec = recommend([sweep(crashed, row(SHORT, B, 1.0)), sweep(row(SHORT, A, 0.5))])
    assert listed(rec) == [str(A)]


def test_same_machine_code_carries_the_result() -> None:
    twin = row(SHORT, B, None, same_as=str(A))
    rec = recommend([sweep(row(SHORT, A, 1.0, spills=4), twin, row(SHORT, C, 2.0))])
    assert rec.winners[0][2] == 1.0
    assert len(rec.configs) == 1
    wrong = row(SHORT, A, None, Status.WRONG)
    rec = recommend([sweep(wrong, row(SHORT, B, 0.5, same_as=str(A)), row(SHORT, C, 2.0))])
    assert listed(rec) == [str(C)]
    assert {c for c, _ in rec.barred} == {A, B}


def test_equal_times() -> None:
    def best(*rows: Row) -> Config:
        rec = recommend([sweep(*rows)])
        assert listed(rec) == [str(rec.winners[0][1])]
        return rec.winners[0][1]

    def at(c: Config, **facts: int) -> Row:
        return row(SHORT, c, 1.0, **facts)

    assert best(at(A, spills=2, shared=1), at(D, spills=0, shared=9)) == D
    assert best(at(A, spills=0, shared=9), at(D, spills=0, shared=1)) == D
    assert best(at(D, spills=0, shared=9), at(A, spills=0, shared=9)) == A
    assert best(at(D), at(A)) == A
    assert best(at(config("64x16x4x1")), at(config("16x64x4x1"))) == config("16x64x4x1")
    assert best(at(A), at(D, spills=0, shared=1)) == D  # a known fact beats an unknown one


def on_both(times: Mapping[Config, tuple[float, float]]) -> list[Row]:
    return [row(p, c, ms[i]) for c, ms in times.items() for i, p in enumerate((SHORT, LONG))]


def test_the_greedy_order_and_when_it_stops() -> None:
    times = {A: (1.0, 2.0), B: (2.0, 1.0), C: (1.05, 1.05), D: (1.004, 2.0)}
    rows = [
        row(p, c, ms)
        for c, both in times.items()
        for p, ms in zip((SHORT, LONG), both, strict=True)
    ]
    file = sweep(*rows)
    assert listed(recommend([file], regret=0.05)) == [str(C)]
    assert listed(recommend([file], regret=0.01))[0] == str(C)
    assert len(recommend([file], regret=0.01).configs) == 3
    assert len(recommend([file], regret=0.01, max_configs=2).configs) == 2


def test_repeated_measurements_count_by_their_median() -> None:
    files = [sweep(row(SHORT, A, ms), row(SHORT, B, 1.05)) for ms in (1.0, 1.1, 9.0)]
    rec = recommend(files)
    assert rec.winners == ((SHORT, B, 1.05),)


def only(*fitting: Config) -> Any:
    return lambda c, dtype, D: c in fitting or dtype == "bf16"


def test_the_article_s_reservation() -> None:
    rows = [row(SHORT, A, 3.0), row(SHORT, B, 2.0), row(SHORT, C, 1.0)]
    pairs = [("bf16", 64), ("fp32", 128)]
    rec = recommend([sweep(*rows)], serve=pairs, fits=only(A, B))
    assert listed(rec) == [str(C), str(B)]  # the better of the two that fit
    assert [item.kept_for for item in rec.configs] == [
        None,
        "the only one that fits fp32 at D=128",
    ]
    assert rec.serves == tuple(pairs)
    assert recommend([sweep(*rows)], serve=pairs, fits=only(C)).configs[0].kept_for is None
    rec = recommend([sweep(*rows)], serve=pairs, fits=only())
    assert (rec.serves, rec.unserved) == ((("bf16", 64),), (("fp32", 128),))


def test_a_full_list_gives_up_what_costs_least() -> None:
    times = {A: (1.0, 9.0), B: (9.0, 1.0), C: (1.2, 1.3), D: (8.0, 8.0)}
    rows = [
        row(p, c, ms)
        for c, both in times.items()
        for p, ms in zip((SHORT, LONG), both, strict=True)
    ]
    rec = recommend([sweep(*rows)], max_configs=3, serve=[("fp32", 128)], fits=only(D))
    assert set(listed(rec)) == {str(A), str(B), str(D)}
    assert listed(rec)[-1] == str(D)
    assert rec.worst_loss == 0


def test_without_a_rule_a_config_fits_where_it_was_timed() -> None:
    other = problem(512, 128, "fp32")
    rows = [row(SHORT, C, 1.0), row(SHORT, A, 2.0), row(other, A, 2.0)]
    rec = recommend([sweep(*rows)], serve=[("fp32", 128), ("fp16", 32)])
    assert set(listed(rec)) == {str(A), str(C)}
    assert (rec.serves, rec.unserved) == ((("fp32", 128),), (("fp16", 32),))


def test_a_screened_config_may_serve_but_a_timed_one_is_preferred() -> None:
    rows = [row(SHORT, C, 1.0), row(SHORT, A, 9.0, Status.SCREENED)]
    rows.append(row(SHORT, D, 7.0, Status.SCREENED))
    serve = [("fp32", 128)]
    assert listed(recommend([sweep(*rows)], serve=serve, fits=only(A, D))) == [str(C), str(D)]
    rows.append(row(SHORT, B, 6.0))
    assert listed(recommend([sweep(*rows)], serve=serve, fits=only(A, B, D)))[1] == str(B)


def compiled(c: Config, predicted_ms: float | None = None, p: Problem = SHORT, **more: Any) -> Row:
    return row(p, c, None, Status.COMPILED, predicted_ms=predicted_ms, **more)


def test_nothing_measured() -> None:
    rows = [compiled(A, 3.0), compiled(B, 1.0), row(SHORT, D, None, Status.RANKED)]
    rec = recommend([sweep(*rows, compiled(C, 2.0), measured=False)], max_configs=2)
    assert listed(rec) == [str(B), str(C)]
    assert not rec.measured
    assert rec.worst_loss is None
    assert rec.winners == ()
    assert all(item.share_of_best == () for item in rec.configs)


def test_nothing_measured_nor_predicted_keeps_the_rows_order() -> None:
    rows = [compiled(D), compiled(A, same_as=str(D)), compiled(C, 1.0), compiled(B)]
    rec = recommend([sweep(*rows, measured=False)], serve=[("fp32", 128)], fits=only(B))
    assert listed(rec) == [str(D), str(C), str(B)]  # A would be D's machine code again
    rec = recommend(
        [sweep(*rows, measured=False)], max_configs=2, serve=[("fp32", 128)], fits=only(B)
    )
    assert listed(rec) == [str(D), str(B)]


def test_predictions_for_several_problems() -> None:
    rows = [compiled(A, 1.0), compiled(B, 1.5), compiled(C, 1.0)]
    rows += [compiled(A, 30.0, LONG), compiled(B, 10.0, LONG)]
    assert listed(recommend([sweep(*rows, measured=False)])) == [str(B), str(A), str(C)]


def test_measured_files_win_over_predictions() -> None:
    files = [sweep(compiled(A, 0.1), measured=False), sweep(row(SHORT, B, 1.0))]
    rec = recommend(files)
    assert rec.measured
    assert listed(rec) == [str(B)]


def test_more_than_one_subject() -> None:
    here, there = sweep(row(SHORT, A, 1.0)), sweep(row(SHORT, A, 1.0), gpu="RTX")
    with pytest.raises(FlashtuneError) as error:
        recommend([here, there])
    assert "NVIDIA H200, RTX" in error.value.message
    assert "--gpu" in error.value.hint
    with pytest.raises(FlashtuneError) as error:
        recommend([here, sweep(row(SHORT, A, 1.0), kernel="v0")])
    assert "v0, v4" in error.value.message
    assert "--kernel" in error.value.hint


@pytest.mark.parametrize(
    "files",
    [
        [],
        [sweep()],
        [sweep(row(SHORT, A, 1.0, Status.WRONG))],
        [sweep(row(SHORT, A, 1.0, Status.SCREENED))],
        [sweep(row(SHORT, A, 1.0), row(LONG, A, 1.0, Status.WRONG))],
        [sweep(row(SHORT, A, None, Status.RANKED), measured=False)],
    ],
)
def test_nothing_to_recommend(files: list[SweepFile]) -> None:
    with pytest.raises(FlashtuneError) as error:
        recommend(files)
    assert error.value.hint


@pytest.mark.parametrize(
    "options", [{"max_configs": 0}, {"regret": -0.1}, {"regret": 1.0}, {"regret": float("nan")}]
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(FlashtuneError):
        recommend([sweep(row(SHORT, A, 1.0))], **options)


@pytest.mark.skipif(not LANDSCAPE.exists(), reason="the recorded landscape is not here")
def test_a_real_landscape() -> None:
    import pandas as pd

    table = pd.read_parquet(LANDSCAPE)
    landscape: dict[tuple[Problem, Config], tuple[Status, float]] = {}
    for cells in table.itertuples():
        p = problem(int(cells.N), int(cells.D), str(cells.dtype), bool(cells.causal))
        c = Config(
            *(int(v) for v in (cells.q_tile, cells.k_tile, cells.num_warps)), int(cells.num_stages)
        )
        landscape[p, c] = (Status(cells.status), float(cells.ms))
    rows = [row(p, c, ms, s, reason="ptxas") for (p, c), (s, ms) in landscape.items()]
    rec = recommend([sweep(*rows)])
    assert len(rec.winners) == 4
    assert len(rec.configs) <= 5
    assert rec.worst_loss is not None
    assert rec.worst_loss <= 0.01
    # One config cannot do it: the greedy list is worth having.
    alone = recommend([sweep(*rows)], max_configs=1)
    assert alone.worst_loss is not None
    assert alone.worst_loss > 0.01
    first = alone.configs[0].config
    times = timed(landscape)
    losses = {
        c: 1 - min(min(t.values()) / t[c] for t in times.values())
        for c in set.intersection(*(set(t) for t in times.values()))
    }
    assert losses[first] == pytest.approx(min(losses.values())) == pytest.approx(alone.worst_loss)
