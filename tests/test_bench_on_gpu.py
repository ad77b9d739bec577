"""``flashtune bench`` on a card: structure and sanity; no figure is held to a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import ROOT, subprocess_env
from planted_faults import FAULTS

from flashtune.kernels import KERNELS
from flashtune.ladder import LADDER
from flashtune.records import Problem
from flashtune.space import parse_config

pytestmark = pytest.mark.gpu

ANY = parse_config("128x128x4x2")  # one that every kernel takes


def bench(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashtune", "bench", *options],
        cwd=folder,
        env=subprocess_env(),
        capture_output=True,
        text=True,
        timeout=540,
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bench")
    done = bench(
        folder, "--N", "512,1024", "--both", "--runs", "2", "--roofline", "--json",
        "--sweeps", str(ROOT / "sweeps"), "--out", "bench.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compiling" in done.stderr and "timing: 8" in done.stderr
    found = json.loads(done.stdout)
    assert json.loads((folder / "bench.json").read_text()) == found
    return found


def card() -> int:
    """The compute capability, 90 for 9.0."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def test_every_kernel_of_the_ladder_is_right_and_timed(document: Any) -> None:
    assert document["schema_version"] == 1 and document["measured"]
    asked = [(shape["problem"]["N"], shape["problem"]["causal"]) for shape in document["shapes"]]
    assert asked == [(512, False), (512, True), (1024, False), (1024, True)]
    for shape in document["shapes"]:
        assert {kernel["name"] for kernel in shape["kernels"]} == set(LADDER)
        for kernel in shape["kernels"]:
            unfit = KERNELS[kernel["kernel"]].misfit(Problem(**shape["problem"]), ANY, card())
            if unfit is not None:
                assert kernel["status"] == "pruned" and unfit in kernel["reason"]
                continue
            if kernel["name"] == "v8_warp_specialised":  # Triton compiles what it likes of it
                assert kernel["status"] in ("timed", "wrong", "compile_failed")
                if kernel["status"] != "timed":
                    assert kernel["reason"] and kernel["runs_ms"] == []
                    continue
                assert all(not out.startswith(f"{kernel['config']}:") for out in kernel["left_out"])
            else:
                assert kernel["status"] == "timed", kernel["reason"]
                assert kernel["left_out"] == []
            assert kernel["config"] in kernel["configs"]
            assert len(kernel["runs_ms"]) == 2 and min(kernel["runs_ms"]) > 0
            assert 0 < kernel["max_abs_err"] < 0.1


def test_times_ratios_and_rates_agree_with_each_other(document: Any) -> None:
    for shape in document["shapes"]:
        p = shape["problem"]
        flops = 4 * p["B"] * p["H"] * p["N"] * p["N_k"] * p["D"] / (2 if p["causal"] else 1)
        theirs = {backend["backend"]: backend for backend in shape["sdpa"]}
        assert set(theirs) == {"flash", "cudnn", "efficient"}
        assert theirs["flash"]["reason"] is None  # every card from Ampere on has it
        for kernel in shape["kernels"]:
            ms = kernel["ms"]
            if ms is None:  # left out, or wrong: told apart above
                assert set(kernel["of_sdpa"].values()) == {None} and kernel["tflops"] is None
                continue
            assert ms["min"] <= ms["median"] <= ms["max"]
            assert kernel["tflops"] == pytest.approx(flops / ms["median"] * 1e-9)
            for name, share in kernel["of_sdpa"].items():
                runs = theirs[name]["runs_ms"]
                if theirs[name]["reason"] is not None:
                    assert share is None and runs == []
                    continue
                pairs = [t / o for t, o in zip(runs, kernel["runs_ms"], strict=True)]
                assert share["median"] == pytest.approx(median(pairs)) and min(pairs) > 0


def test_the_ceilings_are_above_what_runs_below_them(document: Any) -> None:
    ceilings = document["ceilings"]
    published = document["roofline"]["roofs"]
    assert published["measured"]
    assert ceilings["matmul_tflops"]["median"] == pytest.approx(published["tensor_tflops"])
    assert ceilings["copy_gb_s"]["median"] == pytest.approx(published["dram_gb_s"])
    assert ceilings["sm_clock_mhz"] is None or ceilings["sm_clock_mhz"][0] > 100
    for shape in document["shapes"]:
        for timed in [*shape["kernels"], *shape["sdpa"]]:
            if timed["ms"] is not None:
                assert 0 < timed["of_matmul"] < 1.2 and 0 < timed["of_copy"] < 1.2


def test_a_refusal_is_null_with_its_reason(tmp_path: Path) -> None:
    options = ("--dtype", "fp32", "--N", "256", "--runs", "1", "--kernels", "v6_heads_first")
    done = bench(tmp_path, *options, "--json", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    (shape,) = json.loads(done.stdout)["shapes"]
    flash = next(backend for backend in shape["sdpa"] if backend["backend"] == "flash")
    assert flash["ms"] is None and flash["reason"]


def test_a_wrong_kernel_is_a_row_that_says_so(tmp_path: Path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "rescale_left_out")
    names = f"v6_heads_first,{fault.write(tmp_path).name}"
    done = bench(tmp_path, "--N", "512", "--runs", "1", "--kernels", names, "--markdown")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| 512 | full | resc")]
    assert row.split(" | ")[4] == "wrong"
    assert "rescale_left_out, B=4 H=8 N=512 D=64 full bf16: not timed:" in done.stdout
