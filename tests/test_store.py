"""The results file: what goes in comes out, whenever and however the sweep is interrupted."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from unittest import mock

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune import parquet, store
from flashtune.errors import FlashtuneError
from flashtune.records import Config, Problem, Status
from flashtune.results import Provenance, Row, RunInfo, SdpaResult, SdpaTiming
from flashtune.store import SweepStore

ROOT = Path(store.__file__).parents[1]
NOON = datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=UTC)
RUN = RunInfo("run-1", "flashtune sweep --N 4096", NOON, None)
PROVENANCE = Provenance(
    gpu="NVIDIA H200", cc="9.0", sms=132, measured=True, driver="570.1", torch="2.9", triton="3.6",
    cuda="12.8", python="3.11", kernel="fa2", kernel_hash="abc", sm_clock_mhz=1980,
    mem_clock_mhz=3201, power_limit_w=700.0, git_commit=None,
)  # fmt: skip
HOUSE = re.findall(
    r"\w+",
    "run_id, status, reason, kernel, gpu, cc, dtype, B, H, H_kv, N, N_k, D, causal, q_tile, "
    "k_tile, num_warps, num_stages, shared_predicted, shared, shared_limit, regs, spills, "
    "blocks_per_sm, waves, compile_s, code_hash, same_as, predicted_ms, ms, ms_lo, ms_hi, tflops, "
    "samples_ms, samples_round, max_abs_err, sdpa_abs_err, lse_abs_err, sm_clock_mhz, measured_at, "
    "maxnreg, warp_specialize",
)


def numbered(i: int, **changes: object) -> Row:
    """The i-th row of a sweep; consecutive ones are not in the file's order."""
    row = Row(
        "run-1", Status.TIMED, None, "fa2", "NVIDIA H200", "9.0", "bf16", B=4, H=8, H_kv=8,
        N=512 << (i % 3), N_k=512 << (i % 3), D=64, causal=i % 2 == 0,
        q_tile=16 * (1000 - i), k_tile=64, num_warps=4, num_stages=2,
        shared=1000 + i, ms=1.0 / (i + 1), samples_ms=(0.1, float(i)), samples_round=(0, 1),
        measured_at=NOON + timedelta(seconds=i),
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def sdpa(row: Row, backend: str, ms: float | None, reason: str | None = None) -> SdpaResult:
    return SdpaResult(row.run_id, row.problem, SdpaTiming(backend, ms, reason))


def opened(path: Path, **changes: object) -> SweepStore:
    return SweepStore.open(path, replace(PROVENANCE, **changes), RUN)  # type: ignore[arg-type]


def parts_of(path: Path) -> Path:
    return path.with_name(f".{path.stem}.parts")


def undisturbed(path: Path, rows: list[Row]) -> bytes:
    with opened(path) as sweep:
        for row in rows:
            sweep.add(row)
        sweep.finish()
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "h200_fa2_bf16_D64.parquet"


# Rows of every kind.

integers = st.integers(-(2**31), 2**31 - 1)
reals = st.floats(allow_nan=False)
maybe_int, maybe_real, maybe_text = (st.none() | kind for kind in (integers, reals, st.text()))
rows_of_any_kind = st.builds(
    Row,
    run_id=st.text(), status=st.sampled_from(Status), reason=maybe_text, kernel=st.text(),
    gpu=st.text(), cc=st.text(), dtype=st.sampled_from(["bf16", "fp16"]),
    **dict.fromkeys(("B", "H", "H_kv", "N", "N_k", "D"), integers),
    causal=st.booleans(),
    **dict.fromkeys(("q_tile", "k_tile", "num_warps", "num_stages"), integers),
    **dict.fromkeys(("shared_predicted", "shared", "shared_limit", "regs"), maybe_int),
    **dict.fromkeys(("spills", "blocks_per_sm", "sm_clock_mhz"), maybe_int),
    **dict.fromkeys(("waves", "compile_s", "predicted_ms", "ms", "ms_lo"), maybe_real),
    **dict.fromkeys(("ms_hi", "tflops", "max_abs_err", "sdpa_abs_err"), maybe_real),
    maxnreg=st.none() | st.integers(-(2**15), 2**15 - 1), warp_specialize=st.none() | st.booleans(),
    lse_abs_err=maybe_real, code_hash=maybe_text, same_as=maybe_text,
    samples_ms=st.none() | st.lists(st.floats(allow_nan=False, width=32), max_size=5).map(tuple),
    samples_round=st.none() | st.lists(st.integers(0, 2**15 - 1), max_size=5).map(tuple),
    measured_at=st.none() | st.datetimes(timezones=st.just(UTC)),
)  # fmt: skip


def unique(rows: list[Row]) -> list[Row]:
    return list({(row.problem, row.config): row for row in rows}.values())


many_rows = st.lists(rows_of_any_kind, max_size=8).map(unique)


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder for each hypothesis example (a fixture's would be shared)."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=40, deadline=None)
@given(rows=many_rows)
def test_any_rows_round_trip(rows: list[Row]) -> None:
    with folder() as out:
        with opened(out / "a.parquet") as sweep:
            for row in rows:
                sweep.add(row)
            assert all(sweep.get(row.problem, row.config) == row for row in rows)
            returned = sweep.finish()
        found = store.read(out / "a.parquet")
        assert found == returned
        assert found.rows == tuple(sorted(rows, key=lambda row: (row.problem, row.config)))
        assert found.provenance == PROVENANCE


class Killed(BaseException):
    """What nothing in the store may survive."""


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """From the step-th change of the file system on, none succeeds: as after a kill."""
    steps = itertools.count()

    def mortal(change: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if next(steps) >= step:
                raise Killed
            return change(*args, **kwargs)

        return call

    names = ("replace", "fsync", "unlink", "rmdir", "mkdir")
    with mock.patch.multiple(os, **{name: mortal(getattr(os, name)) for name in names}):
        yield


@settings(max_examples=80, deadline=None)
@given(
    rows=many_rows,
    kills=st.lists(st.integers(0, 30), max_size=4),
    part_rows=st.integers(1, 4),
    flush_every=st.integers(1, 4),
)
def test_any_interruption_gives_the_same_file(
    rows: list[Row], kills: list[int], part_rows: int, flush_every: int
) -> None:
    with folder() as out, mock.patch.object(store, "PART_ROWS", part_rows):
        expected = undisturbed(out / "whole.parquet", rows)
        path = out / "a.parquet"
        durable: set[tuple[Problem, Config]] = set()

        def sweep_on() -> None:
            with opened(path) as sweep:
                found = {(row.problem, row.config) for row in sweep.rows()}
                assert durable <= found, "a row of a finished part was lost"
                for i, row in enumerate(rows, 1):
                    if sweep.get(row.problem, row.config) is None:
                        sweep.add(row)
                    if i % flush_every == 0:
                        sweep.flush()
                        durable.update((row.problem, row.config) for row in sweep.rows())
                sweep.finish()

        for step in kills:
            with suppress(Killed), killed_at(step):
                sweep_on()
            if durable:
                assert durable <= {(row.problem, row.config) for row in store.read(path).rows}
        sweep_on()
        assert path.read_bytes() == expected
        assert sorted(entry.name for entry in out.iterdir()) == ["a.parquet", "whole.parquet"]


@settings(max_examples=25, deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=10),
    kills=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=3),
    part_rows=st.integers(1, 3),
)
def test_the_later_row_wins_wherever_it_is(
    writes: list[tuple[int, int]], kills: list[tuple[int, int]], part_rows: int
) -> None:
    """Each write is a session of its own; a killed one shows its row or the one before."""
    with folder() as out, mock.patch.object(store, "PART_ROWS", part_rows):
        path, last = out / "a.parquet", {}
        for number, (i, shared) in enumerate(writes):
            with opened(path) as sweep:
                sweep.add(numbered(i, shared=shared))
                last[i] = shared
                sweep.flush()
                steps = [step for at, step in kills if at == number]
                if number % 2 or steps:
                    with suppress(Killed), killed_at(steps[0] if steps else 1000):
                        sweep.finish()
            assert {r.config: r.shared for r in store.read(path).rows} == {
                numbered(i).config: shared for i, shared in last.items()
            }


# A real process, really killed.

CHILD = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from flashtune import store
from test_store import numbered, opened
store.PART_ROWS = 7
path, count = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    with opened(path) as sweep:
        found = set(row.config for row in sweep.rows())
        todo = [i for i in range(count) if numbered(i).config not in found]
        for i in todo[:20]:
            sweep.add(numbered(i))
            if i % 2:
                sweep.flush()
                print(i, flush=True)  # rows up to here are promised
        sweep.finish()
    if not todo[20:]:
        break
"""


def child(code: str, *args: object) -> subprocess.Popen[str]:
    code = code.format(root=str(ROOT), tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_killed_and_continued(path: Path, tmp_path: Path) -> None:
    count, chance, kills = 160, random.Random(7), 0
    expected = undisturbed(tmp_path / "whole.parquet", [numbered(i) for i in range(count)])
    promised: set[int] = set()
    for _ in range(40):
        process = child(CHILD, path, count)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if kills < 6:
            time.sleep(chance.uniform(0, 0.12))
            process.send_signal(signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        # The last line may be cut; a number's beginning would be another number.
        promised |= {int(line) for line in output.splitlines(keepends=True) if line[-1] == "\n"}
        found = store.read(path).rows if store.find(path.parent) else ()
        missing = {numbered(i).config for i in promised} - {row.config for row in found}
        assert not missing
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    assert path.read_bytes() == expected
    assert not parts_of(path).exists()


CONTENDER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from flashtune.errors import FlashtuneError
from test_store import numbered, opened
path, first = Path(sys.argv[1]), int(sys.argv[2])
done = 0
while done < 25:
    try:
        with opened(path) as sweep:
            sweep.add(numbered(first + done))
            sweep.finish()
        done += 1
    except FlashtuneError as error:
        assert "another sweep" in error.message, error
"""


def test_processes_that_take_turns_lose_nothing(path: Path) -> None:
    """The lock is removed with its folder at each finish, and still lets only one in."""
    processes = [child(CONTENDER, path, first) for first in (0, 100, 200)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert len(store.read(path).rows) == 75


HOLDER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from test_store import numbered, opened
with opened(Path(sys.argv[1])) as sweep:
    sweep.add(numbered(1))
    sweep.flush()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_locked_by_another_process(path: Path) -> None:
    process = child(HOLDER, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with pytest.raises(FlashtuneError, match=rf"another sweep.*pid {process.pid}") as caught:
        opened(path)
    assert str(path) in caught.value.message
    assert isinstance(caught.value.__cause__, BlockingIOError)
    assert len(store.read(path).rows) == 1, "reading needs no lock"
    process.communicate(timeout=60)
    with opened(path) as sweep:
        assert len(sweep.rows()) == 1


def test_locked_by_the_same_process(path: Path) -> None:
    with opened(path), pytest.raises(FlashtuneError, match="another sweep"):
        opened(path)


# Interruptions one by one.


def test_kill_between_replace_and_removal(path: Path, tmp_path: Path) -> None:
    rows = [numbered(i) for i in range(5)]
    with opened(path) as sweep:
        for row in rows:
            sweep.add(row)
        sweep.flush()
        shutil.copytree(parts_of(path), tmp_path / "kept")
        sweep.finish()
    before = path.read_bytes()
    shutil.copytree(tmp_path / "kept", parts_of(path))
    assert len(store.read(path).rows) == 5
    with opened(path) as sweep:
        sweep.finish()
    assert path.read_bytes() == before
    assert not parts_of(path).exists()


def test_a_part_wins_over_the_file_and_a_later_over_an_earlier(path: Path) -> None:
    undisturbed(path, [numbered(1, shared=1)])
    with mock.patch.object(store, "PART_ROWS", 1), opened(path) as sweep:
        for shared in (2, 3):
            sweep.add(numbered(1, shared=shared))
            sweep.flush()
    assert len(list(parts_of(path).glob("part-*"))) == 2
    assert [row.shared for row in store.read(path).rows] == [3]


@pytest.mark.parametrize("step", range(10))
def test_a_kill_while_finishing_never_brings_an_older_row_back(path: Path, step: int) -> None:
    with mock.patch.object(store, "PART_ROWS", 1), suppress(Killed), opened(path) as sweep:
        for shared in (1, 2, 3):
            sweep.add(numbered(1, shared=shared))
            sweep.flush()
        with killed_at(step):
            sweep.finish()
    assert [row.shared for row in store.read(path).rows] == [3]


def test_leftover_temporaries_are_ignored_and_removed(path: Path) -> None:
    with opened(path) as sweep:
        sweep.add(numbered(1))
    leftover = parts_of(path) / "part-000002.parquet.tmp"
    leftover.write_bytes(b"PAR1 half a part")
    assert len(store.read(path).rows) == 1
    with opened(path):
        assert not leftover.exists()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_leaving_the_block_writes_and_never_finishes(
    path: Path, failure: type[BaseException]
) -> None:
    with pytest.raises(failure), opened(path) as sweep:
        sweep.add(numbered(1))
        raise failure
    assert not path.exists()
    assert store.find(path.parent) == [path]
    assert len(store.read(path).rows) == 1
    with opened(path) as sweep:
        assert sweep.get(numbered(1).problem, numbered(1).config) is not None


def test_add_writes_about_once_a_second(path: Path) -> None:
    clock = iter([0.0, 0.3, 0.6, 1.1, 1.1, 1.5, 2.2, 2.2])
    with mock.patch.object(store.time, "monotonic", lambda: next(clock)), opened(path) as sweep:
        seen = []
        for i in range(5):
            sweep.add(numbered(i))
            seen.append(len(store.read(path).rows) if store.find(path.parent) == [path] else 0)
    assert seen == [0, 0, 3, 3, 5]


def test_nothing_added_changes_nothing(path: Path) -> None:
    before = undisturbed(path, [numbered(1)])
    stat = path.stat()
    with SweepStore.open(path, PROVENANCE, replace(RUN, run_id="run-2")) as sweep:
        sweep.finish()
    assert (path.read_bytes(), path.stat().st_ino) == (before, stat.st_ino)
    with opened(path):
        pass
    assert not parts_of(path).exists()


def test_a_closed_store_refuses_rows(path: Path) -> None:
    with opened(path) as sweep:
        sweep.finish()
        with pytest.raises(RuntimeError, match="closed"):
            sweep.add(numbered(1))
    assert store.read(path).rows == ()


# The metadata.


def test_runs_sdpa_and_notes_add_up(path: Path) -> None:
    row = numbered(1)
    flash, refused = sdpa(row, "flash", 0.1 + 0.2), sdpa(row, "cudnn", None, "no é kernel")
    with opened(path) as sweep:
        sweep.add(row)
        sweep.add_sdpa(sdpa(row, "flash", 9.0))
        sweep.add_sdpa(flash)
        sweep.add_sdpa(refused)
        sweep.note("checked in the interpreter")
        sweep.finish()
    later = RunInfo("run-2", "flashtune sweep --N 512", NOON + timedelta(days=1), "f00")
    with SweepStore.open(path, replace(PROVENANCE, git_commit="f00"), later) as sweep:
        assert sweep.sdpa_for(row.problem) == (refused, flash)
        assert sweep.sdpa_for(numbered(2).problem) == ()
        sweep.note("checked in the interpreter")
        sweep.note("another")
        sweep.add_sdpa(replace(flash, run_id="run-2"))
    found = store.read(path)
    assert found.runs == (RUN, later)
    assert found.sdpa == (refused, flash, replace(flash, run_id="run-2"))
    assert found.notes == ("checked in the interpreter", "another")
    assert found.provenance == PROVENANCE


def test_samples_are_float32_at_once(path: Path) -> None:
    with opened(path) as sweep:
        sweep.add(numbered(1, samples_ms=(0.1,)))
        kept = sweep.rows()
        sweep.finish()
    assert kept == store.read(path).rows
    assert kept[0].samples_ms == (0.10000000149011612,)


def test_times_need_a_zone_and_are_kept_in_utc(path: Path) -> None:
    east = NOON.astimezone(timezone(timedelta(hours=5)))
    with opened(path) as sweep:
        with pytest.raises(ValueError, match="time zone"):
            sweep.add(numbered(1, measured_at=datetime(2026, 1, 1)))
        sweep.add(numbered(1, measured_at=east))
        sweep.finish()
    (row,) = store.read(path).rows
    assert row.measured_at == NOON
    assert row.measured_at is not None
    assert row.measured_at.utcoffset() == timedelta(0)


def test_bytes_that_were_no_text_do_not_cost_the_row(path: Path) -> None:
    with opened(path) as sweep:
        sweep.add(numbered(1, reason=b"ptxas \xff".decode("utf-8", "surrogateescape")))
        sweep.finish()
    assert store.read(path).rows[0].reason == "ptxas ?"


# The schema and pandas.


def test_the_schema_is_the_row_and_the_house_list() -> None:
    names = [field.name for field in fields(Row)]
    assert parquet.schema().names == names
    assert names[: len(HOUSE)] == HOUSE
    types = {field.name: field.type for field in parquet.schema()}
    assert types["samples_ms"].value_type == pa.float32()
    assert types["samples_round"].value_type == pa.int16()
    assert types["measured_at"] == pa.timestamp("us", tz="UTC")
    assert types["ms"] == pa.float64()


def test_pandas_reads_it_with_one_call_and_null_is_null(path: Path) -> None:
    bare = numbered(1, status=Status.PRUNED, **dict.fromkeys(HOUSE[18:]))
    undisturbed(path, [bare, numbered(3)])
    metadata = pq.read_metadata(path)
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    for view in (pd.read_parquet(path), store.frame(path)):
        assert list(view.columns) == HOUSE
        pruned = view[view["status"] == "pruned"].iloc[0]
        timed = view[view["status"] == "timed"].iloc[0]
        assert all(pd.isna(pruned[name]) for name in [*HOUSE[18:], "reason"])
        assert timed["ms"] == 0.25
        assert list(timed["samples_round"]) == [0, 1]
        assert timed["measured_at"] == pd.Timestamp(NOON + timedelta(seconds=3))
    assert store.frame(path)["shared"].dtype == pd.Int32Dtype()


def test_further_axes_are_null_where_they_are_open(path: Path) -> None:
    capped = numbered(2, maxnreg=168, warp_specialize=False)
    undisturbed(path, [numbered(2), capped])
    plain, other = (row.config for row in store.read(path).rows)
    assert (str(plain), str(other)) == (
        "15968x64x4x2", "15968x64x4x2:maxnreg=168,warp_specialize=off",
    )  # fmt: skip
    view = store.frame(path)
    assert (view["maxnreg"].dtype, str(view["warp_specialize"].dtype)) == ("Int16", "boolean")
    assert pd.isna(view["maxnreg"][0]) and view["maxnreg"][1] == 168
    assert pd.isna(view["warp_specialize"][0]) and view["warp_specialize"][1] is not pd.NA


def written_by_version_1(path: Path) -> None:
    table = pq.read_table(path).drop_columns(list(parquet.ADDED[2]))
    pq.write_table(table, path)
    rewritten(path, b'"schema_version": 2', b'"schema_version": 1')


def test_a_file_from_before_the_further_axes_is_read_and_continued(path: Path) -> None:
    undisturbed(path, [numbered(1), numbered(2)])
    now = store.read(path)
    written_by_version_1(path)
    assert store.read(path) == now
    assert {row.config.further == {} for row in now.rows} == {True}
    with opened(path) as sweep:
        sweep.add(numbered(1, maxnreg=64))
        sweep.finish()
    document = pq.read_schema(path).metadata[parquet.METADATA_KEY]
    assert b'"schema_version": 2' in document
    assert [row.maxnreg for row in store.read(path).rows] == [None, 64, None]


def test_columns_and_schema_version_have_to_agree(path: Path) -> None:
    undisturbed(path, [numbered(1)])
    rewritten(path, b'"schema_version": 2', b'"schema_version": 1')
    with pytest.raises(FlashtuneError, match="not those of schema_version 1"):
        store.read(path)


def test_importing_the_store_loads_neither_pandas_nor_pyarrow() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import flashtune.store;"
        "sys.exit('pyarrow' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("gpu", "measured", "name"),
    [
        ("h200", True, "h200_fa2_bf16_D64.parquet"),
        ("rtx-4070-super", False, "rtx-4070-super_fa2_bf16_D64_unmeasured.parquet"),
        ("NVIDIA A/B 80GB", True, "NVIDIA-A-B-80GB_fa2_bf16_D64.parquet"),
    ],
)
def test_results_path(gpu: str, measured: bool, name: str) -> None:
    out = Path("sweeps")
    assert store.results_path(out, gpu, "fa2", "bf16", 64, measured) == out / name


def test_find(path: Path) -> None:
    with pytest.raises(FlashtuneError, match="no results there"):
        store.find(path.parent)
    undisturbed(path, [numbered(1)])
    only_parts = path.with_name("b.parquet")
    with opened(only_parts) as sweep:
        sweep.add(numbered(1))
    path.with_name("c.parquet.old").touch()
    path.with_name("d.txt").touch()
    assert store.find(path.parent) == sorted([path, only_parts])
    assert store.find(path) == [path]
    assert store.find(only_parts) == [only_parts]


# Starting over.


def test_another_setup_is_refused_with_every_difference(path: Path) -> None:
    before = undisturbed(path, [numbered(1)])
    with pytest.raises(FlashtuneError) as caught:
        opened(path, triton="3.7", driver=None, git_commit="f00")
    message, hint = caught.value.message, caught.value.hint
    assert str(path) in message
    assert "triton: 3.6 there, 3.7 here" in message
    assert "driver: 570.1 there, None here" in message
    assert "git_commit" not in message
    assert "--fresh" in hint
    assert path.name + ".old" in hint
    assert "--out" in hint
    assert path.read_bytes() == before
    with opened(path):
        pass  # the refusal let the lock go


def test_fresh_keeps_the_old_file_with_the_rows_of_its_parts(path: Path) -> None:
    old = path.with_name(path.name + ".old")
    undisturbed(path, [numbered(1)])
    old.write_text("an older one")
    with opened(path) as sweep:
        sweep.add(numbered(2))
    newer = replace(PROVENANCE, triton="3.7")
    with SweepStore.open(path, newer, RUN, fresh=True) as sweep:
        assert sweep.rows() == ()
        sweep.add(numbered(3))
        sweep.finish()
    assert [row.shared for row in store.read(path).rows] == [1003]
    assert store.read(path).provenance == newer
    assert sorted(row.shared or 0 for row in store.read(old).rows) == [1001, 1002]


def test_fresh_sets_a_damaged_file_aside(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"garbage")
    with SweepStore.open(path, PROVENANCE, RUN, fresh=True) as sweep:
        sweep.add(numbered(1))
        sweep.finish()
    assert path.with_name(path.name + ".old").read_bytes() == b"garbage"


def test_fresh_where_there_is_nothing(path: Path) -> None:
    with SweepStore.open(path, PROVENANCE, RUN, fresh=True) as sweep:
        assert sweep.rows() == ()


# Errors.


def rewritten(path: Path, old: bytes, new: bytes) -> None:
    table = pq.read_table(path)
    document = table.schema.metadata[parquet.METADATA_KEY]
    assert old in document
    document = document.replace(old, new)
    pq.write_table(table.replace_schema_metadata({parquet.METADATA_KEY: document}), path)


def rewrite_version(path: Path) -> None:
    rewritten(path, b'"schema_version": 2', b'"schema_version": 3')


def middle_overwritten(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\xff" * (len(data) - 8) + data[-4:])


DAMAGE: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda path: path.write_bytes(b""), r"is empty \(0 bytes\)", "--fresh"),
    (lambda path: path.write_bytes(path.read_bytes()[:-20]), "is cut short", "--fresh"),
    (lambda path: path.write_bytes(b"PAR1PAR1"), "is cut short", "--fresh"),
    (lambda path: path.write_text("run_id,status\n1,timed"), "not a Parquet file", "--fresh"),
    (middle_overwritten, "is damaged", "--fresh"),
    (
        lambda path: pd.DataFrame({"a": [1]}).to_parquet(path),
        "without flashtune's metadata",
        "flashtune sweep",
    ),
    (rewrite_version, r"schema_version 3; this one reads up to 2", "upgrade flashtune"),
    (lambda path: rewritten(path, b'"notes"', b'"motes"'), "is damaged", "--fresh"),
    (lambda path: rewritten(path, b'"verdicts": []}', b'"verdicts": '), "is damaged", "--fresh"),
    (lambda path: (path.unlink(), path.mkdir()), "cannot read it: Is a directory", "results file"),
]


@pytest.mark.parametrize(("damage", "what", "hint"), DAMAGE)
def test_unreadable_files(
    path: Path, damage: Callable[[Path], object], what: str, hint: str
) -> None:
    undisturbed(path, [numbered(1)])
    damage(path)
    for action in (store.read, opened, store.frame):
        with pytest.raises(FlashtuneError, match=what) as caught:
            action(path)
        assert str(path) in caught.value.message
        assert hint in caught.value.hint
        assert "\n" not in caught.value.message + caught.value.hint


def test_a_status_of_another_version_is_damage(path: Path) -> None:
    undisturbed(path, [numbered(1)])
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "status", pa.array(["melted"])), path)
    with pytest.raises(FlashtuneError, match=r"is damaged.*melted") as caught:
        store.read(path)
    assert isinstance(caught.value.__cause__, ValueError)


def test_other_columns_are_damage(path: Path) -> None:
    undisturbed(path, [numbered(1)])
    pq.write_table(pq.read_table(path).drop_columns(["ms"]), path)
    with pytest.raises(FlashtuneError, match="its columns are not those of schema_version 2"):
        store.read(path)


def test_a_damaged_part_is_named(path: Path) -> None:
    with opened(path) as sweep:
        sweep.add(numbered(1))
    part = parts_of(path) / "part-000001.parquet"
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(FlashtuneError, match=re.escape(f"{part} is cut short")) as caught:
        store.read(path)
    assert "delete this part" in caught.value.hint


def test_parts_of_another_setup_are_not_mixed_in(path: Path, tmp_path: Path) -> None:
    with opened(path) as sweep:
        sweep.add(numbered(1))
    with opened(tmp_path / "b.parquet", kernel_hash="other") as sweep:
        sweep.add(numbered(2))
        sweep.finish()
    (tmp_path / "b.parquet").rename(path)
    with pytest.raises(FlashtuneError, match="kernel_hash"):
        store.read(path)


def test_missing(path: Path) -> None:
    for action in (store.read, store.frame, store.find):
        with pytest.raises(FlashtuneError, match="no results there") as caught:
            action(path)
        assert "flashtune sweep" in caught.value.hint


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(FlashtuneError, match="cannot write there") as caught:
        opened(tmp_path / "out" / "a.parquet")
    assert isinstance(caught.value.__cause__, OSError)
    assert "--out" in caught.value.hint


def test_the_folder_is_a_link_to_nowhere(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FlashtuneError, match="cannot write there: File exists"):
        opened(tmp_path / "out" / "a.parquet")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(path: Path) -> None:
    path.parent.mkdir(mode=0o500)
    with pytest.raises(FlashtuneError, match="cannot write there: Permission denied"):
        opened(path)


@pytest.mark.parametrize("name", ["replace", "open", "mkdir"])
def test_permission_denied(path: Path, name: str) -> None:
    denied = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(os, name, side_effect=denied),
        pytest.raises(FlashtuneError, match="cannot write there: Permission denied") as caught,
        opened(path) as sweep,
    ):
        sweep.add(numbered(1))
    assert caught.value.__cause__ is denied
    with opened(path) as sweep:  # the lock was let go
        sweep.add(numbered(1))


def test_permission_denied_to_a_reader(path: Path) -> None:
    undisturbed(path, [numbered(1)])
    denied = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(Path, "read_bytes", side_effect=denied),
        pytest.raises(FlashtuneError, match="cannot read it: Permission denied"),
    ):
        store.read(path)


def test_the_disk_is_full(path: Path) -> None:
    with (
        mock.patch.object(store, "PART_ROWS", 1),
        pytest.raises(FlashtuneError) as caught,
        opened(path) as sweep,
    ):
        sweep.add(numbered(1))
        sweep.flush()
        # Writing the next part reaches a device on which there is never space.
        (parts_of(path) / "part-000002.parquet.tmp").symlink_to("/dev/full")
        sweep.add(numbered(2))
        sweep.flush()
    assert "the disk is full" in caught.value.message
    assert "same command" in caught.value.hint
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    with opened(path) as sweep:
        assert sweep.get(numbered(1).problem, numbered(1).config) is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("no right to mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_and_is_freed(small_disk: Path, tmp_path: Path) -> None:
    rows = [numbered(i, samples_ms=tuple(random.Random(i).random() for _ in range(2000)))
            for i in range(24)]  # fmt: skip
    expected = undisturbed(tmp_path / "whole.parquet", rows)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 150_000)
    path = small_disk / "a.parquet"
    durable = 0

    def sweep_on() -> None:
        nonlocal durable
        with opened(path) as sweep:
            assert len(sweep.rows()) >= durable
            for row in rows:
                if sweep.get(row.problem, row.config) is None:
                    sweep.add(row)
                    sweep.flush()
                    durable = len(sweep.rows())
            sweep.finish()

    with mock.patch.object(store, "PART_ROWS", 2):
        for _ in range(2):
            with pytest.raises(FlashtuneError, match="the disk is full"):
                sweep_on()
        assert 0 < durable < len(rows)
        assert len(store.read(path).rows) >= durable
        assert not list(parts_of(path).glob("*.tmp"))
        ballast.unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        sweep_on()
    assert path.read_bytes() == expected


def test_a_full_disk_does_not_hide_what_ended_the_sweep(path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(os, "replace", side_effect=full),
        pytest.raises(KeyboardInterrupt),
        opened(path) as sweep,
    ):
        sweep.add(numbered(1))
        raise KeyboardInterrupt
