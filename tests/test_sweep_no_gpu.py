"""The whole sweep where there is no GPU: everything but time, for a card that is named."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command_line import TARGET, CommandLine
from planted_faults import BASE, FAULTS, LENGTHS, PlantedFault

from flashtune.kernels import KERNELS
from flashtune.records import Status
from flashtune.results import Row, SweepFile
from flashtune.store import find, read


def _gpu_is_present() -> bool:
    import torch

    return torch.cuda.is_available()


pytestmark = pytest.mark.skipif(_gpu_is_present(), reason="a sweep would time on this GPU")

# Two that compile, one that --top 2 leaves for later, and two that cannot or should not run.
CONFIGS = "64x32x4x3 32x32x2x2 16x16x1x1 128x128x8x4 16x16x4x3"
SWEEP = ("sweep", *TARGET, "--space", "small.toml")
TOP_2 = (*SWEEP, "--top", "2")
MORE = "64x32x4x3 32x32x2x2 64x64x4x3 32x64x2x2 64x32x4x2 64x64x4x2 128x32x8x2 128x64x8x3"


def write_space(folder: Path, configs: str = CONFIGS) -> None:
    listed = ", ".join(f'"{config}"' for config in configs.split())
    (folder / "small.toml").write_text(f"configs = [{listed}]\n")


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    write_space(tmp_path)
    return CommandLine.at(tmp_path, tmp_path_factory)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a finished sweep of two lengths and both masks, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    write_space(folder)
    done = CommandLine.at(folder, tmp_path_factory).run(*TOP_2, "--N", "128,256", "--both")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.fixture
def swept(cli: CommandLine, finished: tuple[Path, str]) -> CommandLine:
    """A command line in a copy of that folder."""
    shutil.copytree(finished[0] / "sweeps", cli.folder / "sweeps")
    return cli


def results(folder: Path) -> Path:
    (path,) = find(folder / "sweeps")
    return path


def results_of(cli: CommandLine) -> SweepFile:
    return read(results(cli.folder))


def counts(rows: tuple[Row, ...]) -> Counter[str]:
    return Counter(str(row.status) for row in rows)


# -- what a finished sweep says


def test_every_config_ends_in_one_row_with_one_status(finished: tuple[Path, str]) -> None:
    rows = read(results(finished[0])).rows
    keys = [(row.N, row.causal, str(row.config)) for row in rows]
    assert len(set(keys)) == len(keys)
    assert set(keys) == {
        (n, c, s) for n in (128, 256) for c in (False, True) for s in CONFIGS.split()
    }
    for n in (128, 256):
        for causal in (False, True):
            some = {str(row.config): row for row in rows if (row.N, row.causal) == (n, causal)}
            statuses = {config: str(row.status) for config, row in some.items()}
            assert statuses == {
                "64x32x4x3": "compiled",
                "32x32x2x2": "compiled",
                "16x16x1x1": "ranked",
                "128x128x8x4": "pruned",
                "16x16x4x3": "pruned",
            }
            assert some["128x128x8x4"].reason.startswith("cannot: needs ")
            assert some["16x16x4x3"].reason.startswith("hopeless: ")
            assert "the first 2 were tried" in some["16x16x1x1"].reason


def test_compiled_rows_have_the_compilers_figures(finished: tuple[Path, str]) -> None:
    for row in read(results(finished[0])).rows:
        figures = (row.shared, row.regs, row.spills, row.code_hash)
        if row.status == "compiled":
            assert None not in figures and row.shared == row.shared_predicted
        else:
            assert figures == (None, None, None, None)


def test_lengths_share_their_compiles_and_masks_do_not(finished: tuple[Path, str]) -> None:
    rows = [row for row in read(results(finished[0])).rows if row.status == "compiled"]
    assert len(rows) == 8
    for row in rows:
        same = [r for r in rows if (r.config, r.causal) == (row.config, row.causal)]
        assert {(r.compile_s, r.code_hash) for r in same} == {(row.compile_s, row.code_hash)}
        assert row.code_hash not in {r.code_hash for r in rows if r.causal != row.causal}


def test_nothing_was_measured_and_everything_says_so(finished: tuple[Path, str]) -> None:
    folder, table = finished
    path = results(folder)
    assert path.name.endswith("_unmeasured.parquet")
    assert "Nothing was measured" in table and "Recommended, unmeasured" in table
    file = read(path)
    assert not file.provenance.measured and file.provenance.driver is None
    assert any("Nothing was measured" in note for note in file.notes)
    for dtype in ("fp16", "fp32"):
        for mask in ("full", "causal"):
            assert f"arithmetic right in Triton's interpreter, {dtype}, {mask}" in file.notes
    text = (folder / "sweeps" / f"{path.stem}_autotune.py").read_text()
    assert "NOTHING WAS MEASURED" in text
    best: dict[object, float] = {}
    total: dict[str, float] = {}
    compiled = [row for row in file.rows if row.status is Status.COMPILED]
    for row in compiled:
        assert row.predicted_ms is not None
        best[row.problem] = min(row.predicted_ms, best.get(row.problem, row.predicted_ms))
    for row in compiled:
        slowdown = (row.predicted_ms or 0) / best[row.problem]
        total[str(row.config)] = total.get(str(row.config), 0) + slowdown
    assert re.findall(r"# (\S+x\S+)\n", text) == sorted(total, key=lambda config: total[config])


def test_every_row_that_could_run_has_a_predicted_time(finished: tuple[Path, str]) -> None:
    for row in read(results(finished[0])).rows:
        cannot = row.reason is not None and row.reason.startswith("cannot")
        assert (row.predicted_ms is None) == cannot
        assert row.predicted_ms is None or row.predicted_ms > 0


def test_no_column_claims_a_measurement(finished: tuple[Path, str]) -> None:
    path = results(finished[0])

    frame = pd.read_parquet(path)
    measured = ["ms", "ms_lo", "ms_hi", "tflops", "samples_ms", "sm_clock_mhz", "measured_at"]
    assert frame[measured].isna().all(axis=None)
    metadata = json.loads(_metadata(path))
    assert metadata["provenance"]["measured"] is False


def _metadata(path: Path) -> bytes:
    import pyarrow.parquet as pq

    return bytes(pq.read_metadata(path).metadata[b"flashtune"])


# -- the same command, a larger one, another card, another kernel


def test_running_again_does_nothing_again(swept: CommandLine) -> None:
    path = results(swept.folder)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    done = swept.run(*TOP_2, "--N", "128,256", "--both")
    assert done.returncode == 0, done.stderr
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert "compiling: 0\n" in done.stderr and "interpreting" not in done.stderr


def test_another_length_adds_only_its_rows(swept: CommandLine) -> None:
    before = results_of(swept).rows
    done = swept.run(*TOP_2, "--N", "128,256,384", "--both", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"] == {"compiled": 12, "pruned": 12, "ranked": 6}
    file = results_of(swept)
    assert len(file.rows) == 30 and set(before) <= set(file.rows)
    added = set(file.rows) - set(before)
    assert {row.N for row in added} == {384}
    assert {row.run_id for row in added} == {file.runs[-1].run_id} != {file.runs[0].run_id}
    # Its code came from the cache, and what it once took to compile is known.
    seconds = {(row.config, row.causal): row.compile_s for row in before if row.compile_s}
    for row in added:
        assert row.compile_s == seconds.get((row.config, row.causal))


def test_a_longer_list_compiles_what_was_ranked(swept: CommandLine) -> None:
    done = swept.run(*SWEEP, "--top", "3", "--N", "128", "--causal")
    assert done.returncode == 0, done.stderr
    assert "compiling: 1\n" in done.stderr
    rows = [row for row in results_of(swept).rows if row.N == 128 and row.causal]
    assert counts(tuple(rows)) == {"compiled": 3, "pruned": 2}


def test_another_card_has_another_file(swept: CommandLine) -> None:
    before = results(swept.folder).read_bytes()
    done = swept.run(*TOP_2, "--N", "128", "--gpu", "h200")
    assert done.returncode == 0, done.stderr
    ada, hopper = (swept.folder / "sweeps" / f"{gpu}_{BASE}_bf16_D64_unmeasured.parquet"
                   for gpu in ("rtx-4070-super", "h200"))  # fmt: skip
    assert ada.read_bytes() == before
    assert {row.cc for row in read(hopper).rows} == {"9.0"}


def test_descriptors_are_swept_for_a_card_with_tma_and_for_no_other(cli: CommandLine) -> None:
    write_space(cli.folder, "64x32x4x2 64x64x4x1 128x256x8x7")
    command = ("sweep", "--kernel", "v7_descriptor", "--space", "small.toml", "--N", "128", "-q")
    assert cli.run(*command, "--gpu", "h200").returncode == 0
    rows = {str(row.config): row for row in results_of(cli).rows}
    assert rows["128x256x8x7"].reason.startswith("cannot: needs ")
    for config in ("64x32x4x2", "64x64x4x1"):
        assert rows[config].status is Status.COMPILED, rows[config].reason
        assert rows[config].shared == rows[config].shared_predicted

    without = cli.run(*command, "--gpu", "rtx-4090", "--out", "others")
    assert without.returncode == 1
    (path,) = find(cli.folder / "others")
    for row in read(path).rows:
        assert row.status is Status.PRUNED and "GeForce RTX 4090 has no TMA" in str(row.reason)


def test_a_kernel_that_triton_cannot_interpret_is_compiled_and_the_notes_say_so(
    cli: CommandLine,
) -> None:
    write_space(cli.folder, "64x64x4x2 64x64x8x2 32x64x4x2 128x256x4x8")
    command = ("sweep", "--kernel", "v9_ping_pong", "--space", "small.toml", "--N", "128", "-q")
    done = cli.run(*command, "--gpu", "h200")
    assert done.returncode == 0, done.stderr
    file = results_of(cli)
    for dtype in ("fp16", "fp32"):
        why = "v9_ping_pong is Gluon, which Triton cannot interpret"
        assert f"arithmetic not checked in {dtype}, full: {why}" in file.notes
    rows = {str(row.config): row for row in file.rows}
    assert rows["64x64x4x2"].status is Status.COMPILED, rows["64x64x4x2"].reason
    assert rows["64x64x4x2"].shared == rows["64x64x4x2"].shared_predicted == 41_164
    for config, why in (
        ("64x64x8x2", "cannot: v9_ping_pong takes 4 warps"),
        ("32x64x4x2", "cannot: v9_ping_pong takes query tiles of 64, 128, 256 rows"),
        ("128x256x4x8", "cannot: needs 541,"),
    ):
        assert rows[config].status is Status.PRUNED and str(rows[config].reason).startswith(why)

    elsewhere = cli.run(*command, "--gpu", "b200", "--out", "others")
    assert elsewhere.returncode == 1
    (path,) = find(cli.folder / "others")
    for row in read(path).rows:
        assert row.status is Status.PRUNED
        assert "written for compute capability 9.0 alone" in str(row.reason)


def test_an_edited_kernel_is_refused_until_fresh(cli: CommandLine) -> None:
    write_space(cli.folder, "32x32x2x2")
    mine = cli.folder / "mine.py"
    source = f'{KERNELS[BASE].path.read_text()}\nBASED_ON = "{BASE}"\n'
    mine.write_text(source)
    command = (*SWEEP, "--N", "128", "--kernel", "mine.py", "-q")
    assert cli.run(*command).returncode == 0
    path = results(cli.folder)
    before = path.read_bytes()

    mine.write_text(f"{source}\n# a thought\n")
    refused = cli.run(*command)
    assert refused.returncode == 2 and not refused.stdout
    first, second = refused.stderr.splitlines()
    assert re.search(r"another setup: kernel_hash: \w+ there, \w+ here$", first)
    assert "--fresh" in second and f"{path.name}.old" in second
    assert path.read_bytes() == before

    assert cli.run(*command, "--fresh").returncode == 0
    assert path.with_name(f"{path.name}.old").read_bytes() == before
    assert (
        read(path).provenance.kernel_hash
        != read(path.with_name(f"{path.name}.old")).provenance.kernel_hash
    )


# -- kills and crowds


def comparable(file: SweepFile) -> list[Row]:
    """The rows without what differs between two equal runs."""
    return [replace(row, run_id="", compile_s=None) for row in file.rows]


def test_kills_at_any_moment_change_nothing(
    cli: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    command = (*SWEEP, "--N", "128")
    cli.cache = cli.folder / "cache"  # empty, so that there is work to kill
    write_space(cli.folder, MORE)
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    kills = 0
    for stage in ("interpreting", "compiling", "compiling"):
        running = cli.start(*command)
        running.wait_for_stage(stage)
        time.sleep(moments.uniform(0, 4))
        if running.process.poll() is None:
            kills += 1
        running.kill()
        for path in find(cli.folder / "sweeps") if (cli.folder / "sweeps").exists() else []:
            read(path)  # at every moment, what is there can be read
    assert kills, seed
    done = cli.run(*command)
    assert done.returncode == 0, (seed, done.stderr)

    calm = CommandLine.at(tmp_path_factory.mktemp("calm"), tmp_path_factory)
    calm.cache = cli.cache  # what compiled there is the same: this test is about rows
    write_space(calm.folder, MORE)
    assert calm.run(*command).returncode == 0
    assert comparable(results_of(cli)) == comparable(results_of(calm)), seed
    assert counts(results_of(cli).rows) == {"compiled": 8}
    assert not list((cli.folder / "sweeps").glob(".*")), "the parts are merged and gone"


def test_two_sweeps_at_once_and_a_killed_worker(cli: CommandLine) -> None:
    cli.cache = cli.folder / "cache"
    write_space(cli.folder, MORE)
    command = (*SWEEP, "--N", "128", "--jobs", "2")
    running = cli.start(*command)
    running.wait_for_stage("interpreting")

    second = cli.run(*command, "-q")
    assert second.returncode == 2 and not second.stdout
    lines = second.stderr.splitlines()
    assert (
        len(lines) == 2 and f"another sweep is writing it (pid {running.process.pid})" in lines[0]
    )

    running.wait_for_stage("compiling")
    running.wait_until(lambda: cli.compiled() > 0)  # the workers are at work
    workers = [pid for pid, name in cli.processes().items() if "loky.backend.popen" in name]
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    assert running.process.wait(300) == 0, running.stderr
    assert counts(results_of(cli).rows) == {"compiled": 8}
    assert "Traceback" not in running.stderr
    assert not cli.left_behind()


# -- planted faults


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_never_recommended(
    cli: CommandLine, fault: PlantedFault
) -> None:
    write_space(cli.folder, "32x32x2x2")
    kernel = fault.write(cli.folder)
    done = cli.run(*SWEEP, *LENGTHS, "--kernel", kernel.name, *fault.options, "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["recommendation"] is None and document["list"] is None
    assert not list((cli.folder / "sweeps").glob("*.py"))
    assert "nothing to recommend" in done.stderr
    rows = results_of(cli).rows
    assert [row.causal for row in rows] == [False, True]
    for row in rows:
        if fault.causal_only and not row.causal:
            assert row.status == "compiled"
            continue
        assert row.status == fault.status, row.reason
        assert re.search(fault.reason, row.reason or ""), row.reason
        assert "\n" not in (row.reason or "")


def test_the_kernel_that_the_faults_are_planted_in_is_right(cli: CommandLine) -> None:
    write_space(cli.folder, "32x32x2x2")
    sound = PlantedFault("sound", (), "compiled", "")
    done = cli.run(*SWEEP, *LENGTHS, "--kernel", sound.write(cli.folder).name)
    assert done.returncode == 0, done.stderr
    assert counts(results_of(cli).rows) == {"compiled": 2}


def test_a_fault_found_later_takes_the_old_list_back(cli: CommandLine) -> None:
    write_space(cli.folder, "32x32x2x2")
    (fault,) = (fault for fault in FAULTS if fault.name == "diagonal_hidden")
    command = (*SWEEP, "--N", "128", "--kernel", fault.write(cli.folder).name)
    assert cli.run(*command).returncode == 0
    (listed,) = (cli.folder / "sweeps").glob("*.py")
    assert cli.run(*command, "--causal").returncode == 1
    assert not listed.exists()
