"""A sweep that races, in real processes and with the real compiler, on a device that is faked."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fake_device
import pytest
from conftest import eventually, stop_compile_pool, subprocess_env

from flashtune import gpu_process, hope
from flashtune import sweep as sweep_module
from flashtune.compiler import CompileJob
from flashtune.doubts import doubts, quiet_card
from flashtune.errors import FlashtuneError
from flashtune.gpu import find_gpu
from flashtune.gpu_process import GpuProcess
from flashtune.kernels import KERNELS, Kernel
from flashtune.plan import plan_problem
from flashtune.records import Config, Problem, Status
from flashtune.results import Conditions, RaceVerdict, Row, Tie
from flashtune.shortlist import write_list
from flashtune.space import parse_config
from flashtune.store import read
from flashtune.sweep import Event, SweepRequest, SweepResult, run

H200 = dataclasses.replace(find_gpu("h200"), present=True, driver="580.1", cuda="13.0")
V6 = KERNELS["v6_heads_first"]
FULL = Problem(4, 8, 8, 1024, 1024, 64, False, "bf16")
# On this shape: 28.64, 28.67, 28.70 us; then 28.86, 30.x; and far behind.
SPACE = ("128x64x8x4", "64x64x4x3", "128x64x8x3", "128x64x4x3", "64x32x4x3", "64x64x4x1")

pytestmark = pytest.mark.usefixtures("fake")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    """A fresh device in ``tmp_path``, and a Triton cache that the tests of this file share."""
    monkeypatch.setenv("FLASHTUNE_FAKE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    stop_compile_pool()
    return tmp_path_factory.mktemp("triton-cache")


def start(kernel: Kernel) -> GpuProcess:
    return GpuProcess(kernel, fake_device.serve, launch_s=3)


def sweep(
    folder: Path,
    *problems: Problem,
    space: tuple[str, ...] = SPACE,
    emit: Callable[[Event], None] = lambda event: None,
    exhaustive: bool = False,
) -> SweepResult:
    configs = [parse_config(text) for text in space]
    plans = [
        plan_problem(p, configs, H200, V6, (3, 9), exhaustive=exhaustive, top=None)
        for p in problems or (FULL,)
    ]
    request = SweepRequest(
        plans=tuple(plans), kernel=V6, gpu=H200, out=folder / "sweeps", n_jobs=2, fresh=False,
        retry_failed=False, command="flashtune sweep", exhaustive=exhaustive,
        gpu_process=start(V6), others=(),
    )  # fmt: skip
    return run(request, emit)


def faults(folder: Path, **planted: str) -> None:
    (folder / "faults.json").write_text(json.dumps(planted))


def by_config(result: SweepResult) -> dict[str, Row]:
    return {str(row.config): row for row in result.file.rows}


def calls(folder: Path) -> Counter[str]:
    log = folder / "calls.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    return Counter(" ".join(line.split()[:-1]) for line in lines)


def processes(folder: Path) -> int:
    return len({line.split()[-1] for line in (folder / "calls.txt").read_text().splitlines()})


def test_every_config_has_its_row_and_the_shape_its_verdict(tmp_path: Path) -> None:
    result = sweep(tmp_path)
    rows = by_config(result)
    assert set(rows) == set(SPACE)
    assert rows["64x64x4x1"].status is Status.SCREENED and rows["64x64x4x1"].samples_ms
    timed = {name for name, row in rows.items() if row.status is Status.TIMED}
    assert {"128x64x8x4", "64x64x4x3", "128x64x8x3", "128x64x4x3"} <= timed
    best = rows["128x64x8x4"]
    assert best.samples_round and len(set(best.samples_round)) > 1
    assert best.sm_clock_mhz == 1980 and best.max_abs_err == 0.01
    (verdict,) = result.file.verdicts
    assert verdict.problem == FULL and verdict.rounds >= 4
    assert len(verdict.conditions) == verdict.rounds
    ties = {str(tie.config) for tie in verdict.ties} | {str(verdict.leader)}
    assert str(verdict.chosen) in ties <= {"128x64x8x4", "64x64x4x3", "128x64x8x3"}
    assert verdict.ms_lo is not None and verdict.ms_lo <= verdict.ms <= (verdict.ms_hi or 0)
    assert read(result.path).verdicts == result.file.verdicts
    assert processes(tmp_path) == 1


def test_the_list_says_that_there_is_no_single_winner(tmp_path: Path) -> None:
    faults(tmp_path, **{"64x64x4x3 factor": "0.99889"})  # as fast as 128x64x8x4, to 1 in 10,000
    result = sweep(tmp_path, space=tuple(c for c in SPACE if c != "128x64x8x3"))
    (verdict,) = result.file.verdicts
    names = {str(verdict.chosen), str(verdict.leader), *(str(t.config) for t in verdict.ties)}
    assert names == {"64x64x4x3", "128x64x8x4"}
    assert str(verdict.chosen) == "64x64x4x3"  # neither spills; it takes less shared memory
    written = write_list(result.path, result.file)
    assert written is not None
    recommendation, path = written
    assert recommendation.winners[0][1] == verdict.chosen
    ((problem, configs, within),) = recommendation.undecided
    assert problem == FULL and {str(c) for c in configs} == names and within <= 0.005
    assert "No single winner on [1]: 64x64x4x3" in path.read_text()


@pytest.mark.parametrize("fault", ["", "slow", "wrong", "abort@look", "abort@round"])
def test_the_same_machine_code_runs_once(tmp_path: Path, fault: str) -> None:
    """16 keys of 16 numbers are too few for 16 warps to copy ahead: stages change nothing."""
    problem = dataclasses.replace(FULL, D=16)
    twins = ("256x16x16x2", "256x16x16x3")
    slow = {f"{config} factor": "3" for config in twins}
    faults(tmp_path, **(slow if fault == "slow" else dict.fromkeys(twins, fault)))
    result = sweep(tmp_path, problem, space=("128x64x4x2", *twins))
    rows = by_config(result)
    assert set(rows) == {"128x64x4x2", *twins}
    (carried,) = (row for row in rows.values() if row.same_as is not None)
    own = rows[str(carried.same_as)]
    assert {str(own.config), str(carried.config)} == set(twins)
    assert (carried.status, carried.reason) == (own.status, own.reason)
    assert carried.samples_ms == own.samples_ms
    ended = {"": {Status.TIMED}, "slow": {Status.SCREENED}, "wrong": {Status.WRONG}}
    assert own.status in ended.get(fault, {Status.CRASHED})
    asked = [call for call in calls(tmp_path) if call.startswith("check 256")]
    assert len(asked) == 1


def compiled_in_this_order(configs: Sequence[Config], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As it may go: all compile at the same time, and end like this. How many did, each time."""
    real, passes = sweep_module.compile_all, []

    def compile_all(jobs: Sequence[CompileJob], *args: Any, **named: Any) -> Iterator[Any]:
        done = sorted(real(jobs, *args, **named), key=lambda d: configs.index(d[0].config))
        passes.append(len(done))
        yield from done

    monkeypatch.setattr(sweep_module, "compile_all", compile_all)
    return passes


@pytest.mark.parametrize("fault", ["", "later@look"])
def test_who_was_kept_beside_a_slower_one_gets_a_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The first is 15% slower than it was, and leads until the second comes."""
    slow, *others = SPACE[:4]
    compiled_in_this_order([parse_config(text) for text in (slow, *others)], monkeypatch)
    faults(tmp_path, **{f"{slow} factor": "1.15", slow: fault})
    rows = by_config(sweep(tmp_path, space=(slow, *others)))
    assert rows[slow].status is (Status.CRASHED if fault else Status.SCREENED)
    assert {rows[name].status for name in others} == {Status.TIMED}
    assert calls(tmp_path)[f"look {slow}"] == 2


def test_compiling_does_not_wait_for_the_gpu_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    stop_compile_pool()  # its workers have the other cache
    space = (*SPACE, "64x128x4x3", "128x128x8x3", "128x32x4x3")
    faults(tmp_path, **{"open after binaries": str(len(space))})
    rows = by_config(sweep(tmp_path, space=space))
    stop_compile_pool()
    assert {name for name, row in rows.items() if row.status is Status.TIMED} >= set(SPACE[:4])
    assert calls(tmp_path)["open"] == 1


def test_a_call_waits_for_all_that_is_being_opened(tmp_path: Path) -> None:
    """Answers come in order: a check's would be taken for that of an opening."""
    faults(tmp_path, **{"open takes": "1"})
    config = parse_config(SPACE[0])
    with start(V6) as gpu:
        gpu.prepare([FULL, dataclasses.replace(FULL, causal=True)])
        assert eventually(lambda: calls(tmp_path)["open"] == 2, 60)
        assert not gpu.ready()
        checked = gpu.check(FULL, config)
        assert checked.check is not None and checked.failure is None
        assert gpu.ready()


def test_what_dies_or_hangs_while_it_starts_is_the_next_call_s_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(tmp_path, **{"open takes": "600"})
    config = parse_config(SPACE[0])
    with start(V6) as gpu:
        gpu.prepare([FULL])
        assert eventually(lambda: calls(tmp_path)["open"] == 1, 60)
        assert not gpu.ready()
        faults(tmp_path)
        os.kill(int((tmp_path / "calls.txt").read_text().split()[-1]), signal.SIGKILL)
        assert eventually(gpu.ready)
        assert gpu.check(FULL, config).failure is None
        assert gpu.started == 2
    faults(tmp_path, **{"open takes": "600"})
    monkeypatch.setattr(gpu_process, "START_S", 0.0)
    monkeypatch.setattr(gpu_process, "OPEN_S", 1.0)
    with start(V6) as gpu:
        gpu.prepare([FULL])
        assert not gpu.ready()
        assert eventually(gpu.ready)
        with pytest.raises(FlashtuneError, match="cannot prepare it: no answer"):
            gpu.check(FULL, config)


def test_hope_that_comes_back_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After two looks that are 3% apart from the model the slowest two are given up, although they
    are compiled; then one takes a fifth of what was predicted, so that the model says little."""
    monkeypatch.setattr(hope, "FEWEST", 2)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    stop_compile_pool()  # its workers have the other cache
    configs = [parse_config(text) for text in SPACE]
    plan = plan_problem(FULL, configs, H200, V6, (3, 9), exhaustive=False, top=None)
    in_this_order = [plan.tried[place] for place in (0, 2, 4, 5, 1, 3)]
    recorded = {(r.problem, r.config): r.ms for r in read(fake_device.RECORDED).rows}
    factors = {c: plan.predicted_ms[c] / (recorded[FULL, c] or 0) for c in plan.tried}
    factors[plan.tried[2]] *= 1.03
    factors[plan.tried[1]] *= 0.2
    faults(tmp_path, **{f"{config} factor": str(value) for config, value in factors.items()})
    passes = compiled_in_this_order(in_this_order, monkeypatch)
    rows = by_config(sweep(tmp_path))
    assert passes == [6, 2]
    assert rows[str(plan.tried[1])].status is Status.TIMED
    for config in plan.tried[4:]:
        row = rows[str(config)]
        assert row.status is Status.SCREENED and row.samples_ms
    # What compiled for nothing once is in the cache the second time; its seconds are not lost.
    assert all(row.compile_s for row in rows.values())
    stop_compile_pool()


def test_the_same_command_again_launches_nothing(tmp_path: Path) -> None:
    first = sweep(tmp_path)
    before = (tmp_path / "calls.txt").read_text()
    again = sweep(tmp_path)
    assert (tmp_path / "calls.txt").read_text() == before
    assert again.file.rows == first.file.rows and again.file.verdicts == first.file.verdicts


def test_new_configs_are_timed_and_old_ones_are_not(tmp_path: Path) -> None:
    old = by_config(sweep(tmp_path, space=SPACE[1:]))
    (tmp_path / "calls.txt").unlink()
    result = sweep(tmp_path)
    assert {call for call in calls(tmp_path) if call.startswith("check")} == {"check 128x64x8x4"}
    rows = by_config(result)
    assert {name: rows[name] for name in old} == old
    assert rows["128x64x8x4"].status is Status.TIMED
    (verdict,) = result.file.verdicts
    assert "128x64x8x4" in {str(verdict.leader), *(str(t.config) for t in verdict.ties)}


@pytest.mark.parametrize("fault", ["flaky", "abort@round"])
def test_an_earlier_winner_that_fails_now_wins_no_more(tmp_path: Path, fault: str) -> None:
    (before,) = sweep(tmp_path, space=SPACE[1:3]).file.verdicts
    winner = str(before.chosen)
    faults(tmp_path, **{winner: fault})
    result = sweep(tmp_path, space=SPACE)
    row = by_config(result)[winner]
    assert row.status is (Status.WRONG if fault == "flaky" else Status.CRASHED)
    assert row.reason and row.ms is None and row.samples_ms is None
    (verdict,) = result.file.verdicts
    named = {str(verdict.chosen), str(verdict.leader), *(str(t.config) for t in verdict.ties)}
    assert winner not in named
    assert read(result.path).rows == result.file.rows


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("abort", Status.CRASHED, "SIGABRT"),
        ("abort@look", Status.CRASHED, "SIGABRT"),
        ("abort@round", Status.CRASHED, "SIGABRT"),
        ("killed@look", Status.CRASHED, "SIGKILL"),
        ("illegal", Status.CRASHED, "illegal memory access"),
        ("illegal@round", Status.CRASHED, "illegal memory access"),
        ("hang", Status.TIMEOUT, "no answer in 3 s"),
        ("hang@round", Status.TIMEOUT, "no answer in 3 s"),
        ("wrong", Status.WRONG, "O is off"),
        ("flaky", Status.WRONG, "differ from launch to launch"),
    ],
)
def test_a_fault_is_one_row_and_the_others_go_on(
    tmp_path: Path, fault: str, status: Status, reason: str
) -> None:
    """Planted in the config that would win: it never does, and the rest is as without it."""
    faults(tmp_path, **{"128x64x8x4": fault})
    result = sweep(tmp_path)
    rows = by_config(result)
    assert rows["128x64x8x4"].status is status and reason in str(rows["128x64x8x4"].reason)
    assert rows["128x64x8x4"].ms is None
    others = [row for name, row in rows.items() if name != "128x64x8x4"]
    assert len(others) == 5
    assert {row.status for row in others} == {Status.TIMED, Status.SCREENED}
    (verdict,) = result.file.verdicts
    named = {str(verdict.chosen), str(verdict.leader), *(str(t.config) for t in verdict.ties)}
    assert "128x64x8x4" not in named
    dies = fault.split("@")[0] in ("abort", "killed", "illegal", "hang")
    # A round is one call for all: it dies in that, and once more in the call that says who it was.
    assert processes(tmp_path) == (1 if not dies else 3 if fault.endswith("@round") else 2)


def rounds(folder: Path) -> list[int]:
    """How many configs each call of a round had, in order."""
    lines = (folder / "calls.txt").read_text().splitlines()
    return [int(line.split()[2]) for line in lines if line.startswith("round of ")]


def test_a_round_is_one_call_in_which_its_configs_take_turns(tmp_path: Path) -> None:
    (verdict,) = sweep(tmp_path).file.verdicts
    assert len(verdict.ties) >= 1
    assert len(rounds(tmp_path)) == verdict.rounds
    assert rounds(tmp_path)[0] >= 4 and rounds(tmp_path)[-1] >= 2
    assert rounds(tmp_path) == sorted(rounds(tmp_path), reverse=True)


def test_a_race_holds_without_sdpa(tmp_path: Path) -> None:
    faults(tmp_path, sdpa="abort")
    result = sweep(tmp_path)
    (verdict,) = result.file.verdicts
    assert by_config(result)[str(verdict.chosen)].status is Status.TIMED
    assert result.file.sdpa == ()
    (said,) = [note for note in result.file.notes if "SDPA was not timed" in note]
    assert "SIGABRT" in said


def test_rounds_before_a_capped_card_is_steady_do_not_count(tmp_path: Path) -> None:
    """128x64x4x3 is 0.8% behind, and leads by 1.2% until the card is at the clock it can keep. Who
    is far behind leaves before that: it has no time to hold against the others'."""
    faults(tmp_path, **{"power cap": "128x64x4x3", "64x32x4x3 factor": "0.93"})
    result = sweep(tmp_path)
    (verdict,) = result.file.verdicts
    assert str(verdict.leader) in ("128x64x8x4", "64x64x4x3", "128x64x8x3")
    assert verdict.rounds < len(rounds(tmp_path))
    assert [state.sm_clock_mhz for state in verdict.conditions] == [1700] * verdict.rounds
    behind = by_config(result)["128x64x4x3"]
    assert behind.status is Status.TIMED and behind.sm_clock_mhz == 1700
    assert behind.ms is not None and behind.ms > verdict.ms
    assert behind.samples_round is not None
    assert min(behind.samples_round) == len(rounds(tmp_path)) - verdict.rounds
    far = by_config(result)["64x32x4x3"]
    assert far.status is Status.SCREENED and len(far.samples_ms or ()) > 20
    assert len([note for note in result.file.notes if "power cap" in note]) == 1


def test_after_a_death_that_nobody_repeats_each_has_calls_of_its_own(tmp_path: Path) -> None:
    """So that another one has somebody to blame. All are raced to the end meanwhile."""
    faults(tmp_path, **{"64x64x4x3": "once@round"})
    result = sweep(tmp_path)
    together, *alone = rounds(tmp_path)
    assert together >= 4 and set(alone) == {1}
    (verdict,) = result.file.verdicts
    assert len(verdict.conditions) == verdict.rounds
    assert {row.status for row in result.file.rows} == {Status.TIMED, Status.SCREENED}
    assert processes(tmp_path) == 2
    (said,) = [note for note in result.file.notes if "none of them did so again" in note]
    assert "SIGABRT" in said


def test_whose_answers_differed_once_in_a_round_is_out_at_once(tmp_path: Path) -> None:
    faults(tmp_path, **{"64x64x4x3": "flaky@round"})
    result = sweep(tmp_path)
    row = by_config(result)["64x64x4x3"]
    assert row.status is Status.WRONG and "differ" in str(row.reason)
    together, *since = rounds(tmp_path)
    assert set(since) >= {together - 1} and 1 not in since  # the others, together still
    assert processes(tmp_path) == 1


@pytest.mark.parametrize("fault", ["", "abort@time", "hang@time", "illegal@time", "wrong"])
def test_an_exhaustive_sweep_times_each_by_itself(tmp_path: Path, fault: str) -> None:
    faults(tmp_path, **{"64x32x4x3": fault})
    result = sweep(tmp_path, exhaustive=True)
    rows = by_config(result)
    bad = rows.pop("64x32x4x3")
    assert {row.status for row in rows.values()} == {Status.TIMED}
    assert all(row.ms and row.samples_ms and len(row.samples_ms) == 10 for row in rows.values())
    assert (bad.status is Status.TIMED) == (not fault) and (bad.ms is None) == bool(fault)
    assert result.file.verdicts == ()
    assert {result.file.sdpa[0].timing.backend, result.file.sdpa[1].timing.backend} == {
        "flash", "cudnn",
    }  # fmt: skip


def test_an_exhaustive_sweep_goes_on_without_sdpa(tmp_path: Path) -> None:
    faults(tmp_path, sdpa="abort")
    result = sweep(tmp_path, exhaustive=True)
    assert {row.status for row in result.file.rows} == {Status.TIMED}
    assert result.file.sdpa == ()
    assert any("SDPA was not timed" in note for note in result.file.notes)


def test_an_error_of_the_gpu_process_keeps_its_hint(tmp_path: Path) -> None:
    faults(tmp_path, **{"64x32x4x3": "memory@time"})
    with pytest.raises(FlashtuneError, match="memory is too small") as raised:
        sweep(tmp_path, exhaustive=True)
    assert raised.value.hint == "Choose a smaller --B."
    faults(tmp_path)
    result = sweep(tmp_path, exhaustive=True)
    assert {row.status for row in result.file.rows} == {Status.TIMED}


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("too_large", [64, 128])
def test_a_problem_too_large_for_the_card_is_an_error(
    too_large: int, exhaustive: bool, tmp_path: Path
) -> None:
    faults(tmp_path, open=f"memory for N={too_large}")
    problems = [dataclasses.replace(FULL, N=n, N_k=n) for n in (64, 128)]
    with pytest.raises(FlashtuneError, match=f"N={too_large} .*memory is too small") as raised:
        sweep(tmp_path, *problems, exhaustive=exhaustive)
    assert raised.value.hint == "A smaller --N."


def test_an_exhaustive_sweep_times_what_a_race_only_looked_at(tmp_path: Path) -> None:
    raced = by_config(sweep(tmp_path))
    result = by_config(sweep(tmp_path, exhaustive=True))
    assert {row.status for row in result.values()} == {Status.TIMED}
    for name, row in raced.items():
        assert (result[name] == row) == (row.status is Status.TIMED)


def test_a_card_that_cannot_be_used_is_an_error_and_no_config_s_fault(tmp_path: Path) -> None:
    faults(tmp_path, open="abort")
    with pytest.raises(FlashtuneError, match="cannot prepare it: .*SIGABRT"):
        sweep(tmp_path)
    assert not results(tmp_path).exists()
    faults(tmp_path)
    assert len(sweep(tmp_path).file.verdicts) == 1


def test_a_process_that_died_between_calls_is_replaced_in_silence(tmp_path: Path) -> None:
    with start(V6) as gpu:
        config = parse_config("64x64x4x3")
        assert gpu.check(FULL, config).failure is None
        os.kill(max(_pids(tmp_path)), signal.SIGKILL)
        time.sleep(0.5)
        assert gpu.check(FULL, config).failure is None
        assert gpu.started == 2


def test_ctrl_c_does_not_reach_the_gpu_process(tmp_path: Path) -> None:
    with start(V6) as gpu:
        assert gpu.check(FULL, parse_config("64x64x4x3")).failure is None
        os.kill(max(_pids(tmp_path)), signal.SIGINT)
        time.sleep(0.5)
        assert gpu.check(FULL, parse_config("64x64x4x3")).failure is None
        assert gpu.started == 1


def test_all_of_them_fail_and_nothing_wins(tmp_path: Path) -> None:
    faults(tmp_path, **dict.fromkeys(SPACE, "wrong"))
    result = sweep(tmp_path)
    assert {row.status for row in result.file.rows} == {Status.WRONG}
    assert result.file.verdicts == ()


def test_an_interrupted_race_is_run_again_and_ends_the_same(tmp_path: Path) -> None:
    """Stopped when the finals begin: what was screened stays, the finalists are raced again."""
    causal = dataclasses.replace(FULL, causal=True)

    class Stop(Exception):
        pass

    def stop(event: Event) -> None:
        if getattr(event, "stage", "") == "racing":
            raise Stop

    with pytest.raises(Stop):
        sweep(tmp_path, FULL, causal, emit=stop)
    kept = {(row.problem, row.config): row for row in read(results(tmp_path)).rows}
    assert kept and {row.status for row in kept.values()} <= {Status.SCREENED, Status.PRUNED}
    result = sweep(tmp_path, FULL, causal)
    rows = {(row.problem, row.config): row for row in result.file.rows}
    assert len(rows) == 12 and len(result.file.verdicts) == 2
    assert all(rows[key] == row for key, row in kept.items())
    undisturbed = sweep(tmp_path / "other", FULL, causal)
    statuses = {(row.problem, row.config): row.status for row in undisturbed.file.rows}
    assert {key: row.status for key, row in rows.items()} == statuses


def test_a_busy_card_and_an_undecided_race_are_said() -> None:
    assert list(quiet_card(None)) == list(quiet_card(())) == []
    assert "another process uses this GPU (7)" in next(iter(quiet_card((7,))))
    state = Conditions(1200, 700.0, 80, "power cap")
    tie = Tie(parse_config("64x64x4x3"), 0.002, 0.009, equal=False)
    verdict = RaceVerdict(
        "run",
        FULL,
        tie.config,
        parse_config("128x64x8x3"),
        0.03,
        0.029,
        0.031,
        40,
        (tie,),
        (state,),
    )
    noisy, held = doubts(verdict)
    assert "within 0.9%" in noisy and "40 rounds" in noisy and "--fresh" in noisy
    assert "power cap" in held
    equal = dataclasses.replace(tie, equal=True, at_most=0.004)
    calm = dataclasses.replace(state, throttle="none")
    assert not list(doubts(dataclasses.replace(verdict, ties=(equal,), conditions=(calm,))))


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_race_sweep import FULL, sweep
import dataclasses
sweep(Path({folder!r}), FULL, dataclasses.replace(FULL, causal=True))
print("finished")
"""


def test_killed_at_any_moment_it_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    """kill -9 of the whole run, again and again: nothing that was decided is done twice."""
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    killed, seen = 0, dict[tuple[Problem, str], Row]()
    for delay in (1.5, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 60.0):
        running = subprocess.Popen(
            [sys.executable, "-c", script], env=subprocess_env(), stdout=subprocess.PIPE, text=True
        )
        try:
            out, _ = running.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            killed += 1
        else:
            assert running.returncode == 0 and "finished" in out
        if results(tmp_path).exists() or list((tmp_path / "sweeps").glob(".*.parts/part*")):
            rows = {(r.problem, str(r.config)): r for r in read(results(tmp_path)).rows}
            assert all(rows[key] == row for key, row in seen.items())
            seen = rows
    assert killed >= 2
    undisturbed = sweep(tmp_path / "other", FULL, dataclasses.replace(FULL, causal=True))
    statuses = {(r.problem, str(r.config)): r.status for r in undisturbed.file.rows}
    assert {key: row.status for key, row in seen.items()} == statuses
    file = read(results(tmp_path))
    assert [v.problem for v in file.verdicts] == [v.problem for v in undisturbed.file.verdicts]


def results(folder: Path) -> Path:
    return folder / "sweeps" / "h200_v6_heads_first_bf16_D64.parquet"


def test_a_process_can_be_replaced_again_and_again(tmp_path: Path) -> None:
    faults(tmp_path, **{"128x64x8x4": "abort", "64x64x4x3": "hang", "64x32x4x3": "illegal"})
    rows = by_config(sweep(tmp_path))
    assert Counter(row.status for row in rows.values())[Status.CRASHED] == 2
    assert rows["64x64x4x3"].status is Status.TIMEOUT
    assert rows["128x64x8x3"].status is Status.TIMED
    assert processes(tmp_path) == 4
    assert not [pid for pid in _pids(tmp_path) if _alive(pid)]


def _pids(folder: Path) -> set[int]:
    return {int(line.split()[-1]) for line in (folder / "calls.txt").read_text().splitlines()}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
