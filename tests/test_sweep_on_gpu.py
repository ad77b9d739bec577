"""The whole job on a card: timed rows, faults that never win, a killed sweep that goes on."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from conftest import subprocess_env
from planted_faults import FAULTS, LENGTHS, PlantedFault

from flashtune.kernels import DEFAULT_KERNEL, KERNELS, load_kernel
from flashtune.space import load_space
from flashtune.store import find, read

pytestmark = pytest.mark.gpu

SPACE = 'configs = ["64x64x4x3", "64x32x4x2", "128x64x8x3", "64x64x4x2"]\n'


def sweep(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "space.toml").write_text(SPACE)
    return subprocess.run(
        [sys.executable, "-m", "flashtune", "sweep", "--space", "space.toml", *options],
        cwd=folder,
        env=subprocess_env(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def results(folder: Path) -> pd.DataFrame:
    (path,) = (folder / "sweeps").glob("*.parquet")
    return pd.read_parquet(path)


def test_every_config_is_checked_and_timed(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--N", "256,1000", "--both", "--exhaustive", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["measured"]
    frame = results(tmp_path)
    assert len(frame) == 16 and set(frame.status) == {"timed"}
    assert (frame.ms > 0).all() and (frame.ms_lo <= frame.ms).all()
    assert (frame.ms <= frame.ms_hi).all()
    assert (frame.samples_ms.str.len() >= 10).all()
    assert (frame.max_abs_err <= 2 * frame.sdpa_abs_err).all()
    assert (frame.shared == frame.shared_predicted).all()
    backends = {timing["backend"] for shape in document["problems"] for timing in shape["sdpa"]}
    assert backends == {"flash", "cudnn"}
    assert all(t["ms"] > 0 for shape in document["problems"] for t in shape["sdpa"])

    again = sweep(tmp_path, "--N", "256,1000", "--both", "--exhaustive", "--json")
    assert again.returncode == 0, again.stderr
    pd.testing.assert_frame_equal(results(tmp_path), frame)  # nothing was timed twice


def test_a_backend_that_refuses_is_null_with_its_reason(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--N", "256", "--dtype", "fp32", "--json")
    assert done.returncode == 0, done.stderr
    (shape,) = json.loads(done.stdout)["problems"]
    flash = next(timing for timing in shape["sdpa"] if timing["backend"] == "flash")
    assert flash["ms"] is None and flash["reason"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_never_wins(fault: PlantedFault, tmp_path: Path) -> None:
    kernel = fault.write(tmp_path)
    done = sweep(tmp_path, "--kernel", kernel.name, *LENGTHS, *fault.options)
    assert done.returncode == 1, done.stdout + done.stderr  # nothing is fit to be recommended
    (path,) = find(tmp_path / "sweeps")
    touched = [row for row in read(path).rows if row.causal or not fault.causal_only]
    assert {str(row.status) for row in touched} == {fault.status}
    assert all(re.search(fault.reason, str(row.reason)) for row in touched), touched[0].reason


def test_a_killed_sweep_goes_on_and_times_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(SPACE)
    command = [sys.executable, "-m", "flashtune", "sweep", "--space", "space.toml",
               "--N", "512,1024,2048,4096", "--both", "--exhaustive"]  # fmt: skip
    running = subprocess.Popen(
        command, cwd=tmp_path, env=subprocess_env(), stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    for line in running.stderr:  # kill it when it is well into the timing
        if line.startswith("timing") and "N=2048" in line:
            break
    time.sleep(0.3)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    (path,) = find(tmp_path / "sweeps")
    kept = {(row.problem, row.config): row for row in read(path).rows}
    assert kept, "a second of work at most may be lost, and this ran for several"
    done = subprocess.run(command, cwd=tmp_path, env=subprocess_env(), capture_output=True)
    assert done.returncode == 0
    rows = {(row.problem, row.config): row for row in read(path).rows}
    assert len(rows) == 32 and {str(row.status) for row in rows.values()} == {"timed"}
    assert all(rows[key] == row for key, row in kept.items())


def test_a_race_gives_every_config_a_row_and_each_shape_a_verdict(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--N", "512,4096", "--both", "--json")
    assert done.returncode == 0, done.stderr
    (path,) = find(tmp_path / "sweeps")
    file = read(path)
    assert len(file.rows) == 16
    assert {str(row.status) for row in file.rows} <= {"timed", "screened"}
    assert len(file.verdicts) == 4
    for verdict in file.verdicts:
        rows = {row.config: row for row in file.rows if row.problem == verdict.problem}
        best = min(row.ms for row in rows.values() if row.ms is not None and row.status == "timed")
        assert rows[verdict.chosen].status == "timed"
        assert verdict.ms <= 1.01 * best
        assert verdict.conditions and all(c.sm_clock_mhz for c in verdict.conditions)


# A launch that reads far beyond its tensor, one that never ends, one that stores into Q: each in
# one config of the space.
LAUNCH_FAULTS = {
    "stray": ("        Q_base += 1 << 40\n", "crashed", "illegal memory access"),
    "endless": (
        "        while tl.load(L_ptr, volatile=True) != 12345.0:\n            q_rows += 0\n",
        "timeout", "no answer",
    ),
    "stores": (
        "        tl.store(Q_ptr + q_rows, q_rows.to(Q_ptr.dtype.element_ty))\n",
        "wrong", "changed the inputs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCH_FAULTS)
def test_a_launch_that_goes_wrong_is_one_row_and_the_others_go_on(
    name: str, tmp_path: Path
) -> None:
    source = KERNELS[DEFAULT_KERNEL].path.read_text()
    anchor = "    q_rows = q_start + tl.arange(0, Q_TILE_SIZE)\n"
    assert anchor in source
    lines, status, reason = LAUNCH_FAULTS[name]
    fault = f"    if Q_TILE_SIZE == 128:\n{lines}"  # only one config of the space
    place = fault + anchor if name == "stray" else anchor + fault
    text = f'BASED_ON = "{DEFAULT_KERNEL}"\n' + source.replace(anchor, place)
    (tmp_path / "bad.py").write_text(text)
    done = sweep(tmp_path, "--kernel", "bad.py", "--N", "512")
    assert done.returncode == (1 if status == "crashed" else 0), done.stderr
    frame = results(tmp_path)
    bad = frame[frame.q_tile == 128].iloc[0]
    assert bad.status == status and reason in bad.reason
    assert set(frame[frame.q_tile != 128].status) <= {"timed", "screened"}


def test_who_is_right_only_most_of_the_time_does_not_win(tmp_path: Path) -> None:
    """In one microsecond of sixteen a program mistakes its rows; and it is the fastest config."""
    source = KERNELS[DEFAULT_KERNEL].path.read_text()
    anchor = "    q_rows = q_start + tl.arange(0, Q_TILE_SIZE)\n"
    fault = (
        "    if Q_TILE_SIZE == K_TILE_SIZE:\n"
        "        q_rows += (tl.extra.cuda.globaltimer() // 1024 % 16 == 0).to(tl.int32)\n"
    )
    text = f'BASED_ON = "{DEFAULT_KERNEL}"\n' + source.replace(anchor, anchor + fault)
    (tmp_path / "bad.py").write_text(text)
    done = sweep(tmp_path, "--kernel", "bad.py", "--N", "512,1024", "--json")
    assert done.returncode == 0, done.stderr
    frame = results(tmp_path)
    bad = frame[frame.q_tile == frame.k_tile]
    assert set(bad.status) <= {"wrong", "screened"} and "wrong" in set(bad.status)
    for shape in json.loads(done.stdout)["problems"]:
        assert shape["best"]["config"] not in ("64x64x4x3", "64x64x4x2")


@pytest.mark.parametrize("how", ["race", "exhaustive"])
def test_what_triton_miscompiles_is_wrong_and_never_chosen(how: str, tmp_path: Path) -> None:
    """v8 leaves giving warps jobs of their own to Triton, and judging that to the sweep."""
    import torch
    import triton

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("v8_warp_specialised is written for compute capability 9.0 alone")
    command = [sys.executable, "-m", "flashtune", "sweep", "--kernel", "v8_warp_specialised",
               "--space", "specialised", "--N", "256", "--D", "64", "--json"]  # fmt: skip
    done = subprocess.run(
        [*command, "--exhaustive"] if how == "exhaustive" else command,
        cwd=tmp_path, env=subprocess_env(), capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    (path,) = find(tmp_path / "sweeps")
    rows = {str(row.config): row for row in read(path).rows}
    assert set(rows) == {str(config) for config in load_space("specialised")}
    statuses = {str(row.status) for row in rows.values()}
    assert done.returncode == (1 if "crashed" in statuses else 0), done.stderr
    assert not statuses & {"compiled"}  # nothing is left half done
    for row in rows.values():
        if row.status == "timed":
            assert row.ms is not None and row.max_abs_err is not None
            assert row.sdpa_abs_err is not None and row.lse_abs_err is not None
            assert row.max_abs_err <= 2 * row.sdpa_abs_err and row.lse_abs_err <= 5e-3
        elif row.status != "screened":
            assert row.ms is None and row.reason
    document = json.loads(done.stdout)
    (shape,) = document["problems"]
    assert rows[shape["best"]["config"]].status == "timed"
    listed = {item["config"] for item in document["recommendation"]["configs"]}
    assert listed and all(rows[config].status == "timed" for config in listed)
    for verdict in read(path).verdicts:
        named = [verdict.chosen, verdict.leader, *(tie.config for tie in verdict.ties)]
        assert all(rows[str(config)].status == "timed" for config in named)

    if how == "exhaustive" and triton.__version__.startswith("3.6."):
        split = [row for row in rows.values() if row.config.warp_specialize]
        assert any(row.status == "wrong" for row in split), "seen on an H200 with Triton 3.6"
        plain = [row for row in rows.values() if not row.config.warp_specialize]
        assert not any(row.status == "wrong" for row in plain)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_autotune_takes_the_exported_list(tmp_path: Path) -> None:
    import torch
    import torch.nn.functional as F
    import triton

    from flashtune.kernels.launch import arguments

    assert sweep(tmp_path, "--N", "512,4096", "--both").returncode == 0
    command = [sys.executable, "-m", "flashtune", "export-autotune", "configs.py"]
    subprocess.run(command, cwd=tmp_path, env=subprocess_env(), check=True)
    exported = load(tmp_path / "configs.py")
    tuned = triton.autotune(configs=exported.AUTOTUNE_CONFIGS, key=exported.AUTOTUNE_KEY)(
        load_kernel(KERNELS[DEFAULT_KERNEL]).flash_fwd_kernel
    )
    for dtype, D, tolerance in ((torch.bfloat16, 64, 2e-2), (torch.float32, 128, 1e-2)):
        for N in (512, 1000, 2048):
            for causal in (False, True):
                q, k, v = torch.randn(3, 2, 4, N, D, device="cuda", dtype=dtype)
                o = torch.full_like(q, torch.nan)
                lse = torch.full((2, 4, N), torch.nan, device="cuda")
                tuned[lambda meta, N=N: (8, triton.cdiv(N, meta["Q_TILE_SIZE"]))](
                    **arguments(q, k, v, o, lse, causal)
                )
                expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                torch.testing.assert_close(o, expected, atol=tolerance, rtol=tolerance)


def test_a_small_card_closes_problems_and_opens_them_again(tmp_path: Path) -> None:
    """With room for one problem at a time, each of two is looked at and raced all the same."""
    import torch

    from flashtune.kernels import find_kernel
    from flashtune.records import Problem
    from flashtune.results import Conditions
    from flashtune.space import parse_config
    from flashtune.timing import Timer
    from flashtune.worker import GpuWorker

    one, two = (Problem(4, 8, 8, n, n, 64, False, "bf16") for n in (8192, 8208))
    config = parse_config("64x64x4x3")
    total = torch.cuda.get_device_properties(0).total_memory
    quiet = Conditions(None, None, None, None)
    worker = GpuWorker(find_kernel(DEFAULT_KERNEL), Timer(lambda: None), lambda: quiet)
    worker.open(one)
    alone = torch.cuda.max_memory_allocated()
    try:
        torch.cuda.set_per_process_memory_fraction(1.2 * alone / total)
        for problem in (two, one, two, one):
            assert worker.check(problem, config).failure is None
            samples, _ = worker.round(problem, [config], 3, 0)
            assert len(samples[config]) == 3
            assert set(worker._open) == {problem}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
