"""A bench without a GPU: its arithmetic, its entries, the roofline, and its output from made-up
times. Its measuring half runs in Triton's interpreter: see interpreted_bench.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, subprocess_env
from planted_faults import FAULTS

from flashtune.bench import (
    BackendRuns,
    Bench,
    Ceilings,
    KernelRuns,
    ShapeRuns,
    lines,
    paired_share,
    spread,
)
from flashtune.cli.bench import as_document
from flashtune.cli.bench_tables import bench_page, markdown, roofline_page
from flashtune.entries import Entry, entries, entry_names
from flashtune.errors import FlashtuneError
from flashtune.gpu import find_gpu
from flashtune.kernels import KERNELS
from flashtune.ladder import LADDER
from flashtune.provenance import provenance
from flashtune.records import Config, Problem, Status
from flashtune.roofline import Roofs, measured_roofs, published_roofs, roofline
from flashtune.space import parse_config

HERE = Path(__file__).resolve().parent
ADA, H200 = find_gpu("rtx-4070-super"), find_gpu("h200")
V0, V6 = KERNELS["v0_baseline"], KERNELS["v6_heads_first"]
FULL = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
CAUSAL = replace(FULL, causal=True)
CONFIG = Config(64, 32, 4, 3)
FOR_HOPPER = ("v8_warp_specialised", "v9_ping_pong", "v10_persistent")


# -- arithmetic


def test_a_share_is_the_median_of_each_run_s_own_ratio() -> None:
    ours, theirs = (1.0, 2.0, 4.0), (2.0, 2.0, 2.0)
    share = paired_share(ours, theirs)
    assert share == (1.0, 0.5, 2.0)
    # In a run on a slow clock both are slow: the ratio stays, and no median of times shows it.
    share = paired_share((1.0, 10.0, 1.1), (2.0, 20.0, 2.2))
    assert share is not None and share.median == pytest.approx(2.0) and share.half < 1e-9
    # It is not the ratio of the medians, which is 2 / 2 here.
    share = paired_share((1.0, 2.0, 3.0), (3.0, 1.0, 2.0))
    assert share is not None and share.median == pytest.approx(2 / 3)


def test_what_was_not_timed_has_no_share_and_unequal_runs_are_refused() -> None:
    assert spread(()) is None
    assert paired_share((), (1.0,)) is None and paired_share((1.0,), ()) is None
    with pytest.raises(ValueError):
        paired_share((1.0, 2.0), (1.0,))


def test_the_spread_is_half_the_range_of_the_median() -> None:
    seen = spread((1.0, 0.9, 1.3))
    assert seen == (1.0, 0.9, 1.3)
    assert seen is not None and seen.half == pytest.approx(0.2)


def kernel_runs(
    name: str, ms: tuple[float, ...], failure: Status | None = None, reason: str | None = None
) -> KernelRuns:
    entry = Entry(name, V6, (CONFIG, Config(64, 64, 4, 3)), "sweeps/x.parquet: the list")
    config = CONFIG if ms else None
    return KernelRuns(entry, config, ms, failure, reason, (), 0.004 if ms else 0.5)


def made_up_bench(*shapes: ShapeRuns) -> Bench:
    return Bench(
        provenance=replace(
            provenance(H200, "v6_heads_first", "0" * 16),
            driver="580.1", torch="2.11.0", triton="3.6.0",
        ),
        title="NVIDIA H200",
        cudnn="9.10.2",
        started=datetime(2026, 11, 29, 12, tzinfo=UTC),
        command="flashtune bench",
        runs=3,
        dtype="bf16",
        shapes=shapes or (made_up_shape(),),
        ceilings=Ceilings((720.0, 740.0, 736.0), (4000.0, 4200.0, 4100.0), (1500, 1980)),
        notes=("a note",),
    )  # fmt: skip


def made_up_shape(problem: Problem = CAUSAL) -> ShapeRuns:
    return ShapeRuns(
        problem,
        (
            kernel_runs("right", (0.2, 0.25, 0.16)),
            kernel_runs("bad", (), Status.WRONG, "64x32x4x3: O is off"),
        ),
        (
            BackendRuns("flash", (0.3, 0.3, 0.32), None),
            BackendRuns("cudnn", (0.1, 0.2, 0.16), None),
            BackendRuns("efficient", (), "No available kernel."),
        ),
        (1900, 1980),
        (),
    )


def test_a_line_has_the_articles_figures() -> None:
    bench = made_up_bench()
    right, bad, flash, cudnn, efficient = lines(bench.shapes[0], bench.ceilings)
    assert right.ms == (0.2, 0.16, 0.25)
    # 4 x B x H x N^2 x D, halved: 68.7 G in 0.2 ms.
    assert right.tflops == pytest.approx(68.72 / 0.2, rel=1e-4)
    assert right.of_matmul == pytest.approx(right.tflops / 736.0)
    # Q, K, V and O, 16.8 MB each, and L, 0.5 MB: 67.6 MB in 0.2 ms are 338 GB/s of 4,100.
    assert right.of_copy == pytest.approx(338.2 / 4100, rel=1e-3)
    shares = {name: share and share.median for name, share in right.shares.items()}
    assert shares == {"flash": pytest.approx(1.5), "cudnn": pytest.approx(0.8), "efficient": None}
    assert bad.ms is bad.tflops is bad.of_matmul is bad.of_copy is None
    assert flash.sdpa and flash.ms == (0.3, 0.3, 0.32)
    assert cudnn.shares["flash"] == pytest.approx((2.0, 1.5, 3.0))
    assert efficient.ms is None and efficient.reason == "No available kernel."


# -- output


MARKDOWN = """\
NVIDIA H200 (driver 580.1, torch 2.11.0, Triton 3.6.0, cuDNN 9.10.2), measured on 2026-11-29: \
bf16, B=4, H=8, D=64. SDPA is PyTorch's with each backend forced (flash, cuDNN, efficient)\
, on the same inputs in the same runs.

| N | mask | kernel | config | ms | ± | TFLOP/s | % of SDPA flash | % of SDPA cuDNN \
| % of SDPA efficient | % of matmul | % of copy |
| ---: | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 4096 | causal | right | 64x32x4x3 | 0.2000 | 22.5% | 343.6 | 150% | 80% | - | 47% | 8% |
| 4096 | causal | bad | - | wrong | - | - | - | - | - | - | - |
| 4096 | causal | SDPA flash | - | 0.3000 | 3.3% | 229.1 | - | 50% | - | 31% | 5% |
| 4096 | causal | SDPA cuDNN | - | 0.1600 | 31.2% | 429.5 | 200% | - | - | 58% | 10% |
| 4096 | causal | SDPA efficient | - | refused | - | - | - | - | - | - | - |

- bad, B=4 H=8 N=4096 D=64 causal bf16: not timed: 64x32x4x3: O is off
- SDPA efficient, B=4 H=8 N=4096 D=64 causal bf16: not timed: No available kernel.
- right: config from sweeps/x.parquet: the list, the fastest of them here
"""


def test_the_markdown_of_a_bench() -> None:
    text = markdown(bench_page(made_up_bench()))
    assert text.startswith(MARKDOWN)
    below = text.removeprefix(MARKDOWN)
    assert "median of 3 runs" in below and "half the range" in below
    assert "bf16 matmul of 8192^3 736 TFLOP/s (±1.4%)" in below
    assert "device copy 4,100 GB/s (±2.4%), SM clock 1,500 to 1,980 MHz" in below
    assert "SM clock 1,900 to 1,980 MHz" in below and "- a note" in below


def test_one_run_has_no_spread() -> None:
    shape = made_up_shape()
    one = replace(
        shape,
        kernels=(replace(shape.kernels[0], ms=(0.2,)),),
        backends=tuple(replace(b, ms=b.ms[:1]) for b in shape.backends),
    )
    page = bench_page(made_up_bench(one))
    at = page.header.index("±")
    assert {row[at] for row in page.rows} == {"-"}


def test_a_table_names_what_differs_between_its_shapes() -> None:
    wide = Problem(4, 32, 8, 2048, 2048, 128, True, "bf16")
    page = bench_page(made_up_bench(made_up_shape(), made_up_shape(wide)))
    assert page.header[:4] == ["H", "N", "D", "mask"]
    assert page.rows[0][:4] == ["8", "4096", "64", "causal"]
    assert page.rows[5][:4] == ["32", "2048", "128", "causal"]
    assert "bf16, B=4, H_kv=8." in page.caption
    cross = replace(FULL, N_k=77)
    assert bench_page(made_up_bench(made_up_shape(cross))).header[:3] == ["N", "N_k", "mask"]


def test_the_json_of_a_bench() -> None:
    document = as_document(made_up_bench(), [], None, H200)
    assert json.loads(json.dumps(document)) and document["schema_version"] == 1
    assert document["measured"] and document["roofline"] is None
    assert document["ceilings"]["matmul_tflops"] == {"median": 736.0, "min": 720.0, "max": 740.0}
    (shape,) = document["shapes"]
    right, bad = shape["kernels"]
    assert (right["status"], right["config"]) == ("timed", "64x32x4x3")
    assert right["runs_ms"] == (0.2, 0.25, 0.16) and right["ms"]["median"] == 0.2
    flash = {"median": 1.5, "min": 1.2, "max": 2.0}
    assert right["of_sdpa"]["flash"] == pytest.approx(flash)
    assert right["of_sdpa"]["efficient"] is None
    assert (bad["status"], bad["config"], bad["ms"]) == ("wrong", None, None)
    assert bad["reason"] == "64x32x4x3: O is off" and bad["max_abs_err"] == 0.5
    assert [b["backend"] for b in shape["sdpa"]] == ["flash", "cudnn", "efficient"]
    assert shape["sdpa"][2]["reason"] == "No available kernel." and shape["sdpa"][2]["ms"] is None


# -- entries


def recorded(problem: Problem, sweeps: Path = ROOT / "sweeps") -> Entry:
    (entry,) = entries(["v6_heads_first"], problem, H200, sweeps, (3, 6))
    return entry


def test_a_swept_shape_gets_its_winner() -> None:
    # README's table of the recorded sweep.
    for problem, winner in ((FULL, "128x64x8x4"), (CAUSAL, "64x64x4x3")):
        entry = recorded(problem)
        assert entry.configs == (parse_config(winner),)
        assert entry.source.endswith("h200_v6_heads_first_bf16_D64.parquet: the winner")


def test_another_shape_of_a_swept_dtype_and_D_gets_the_list() -> None:
    entry = recorded(replace(FULL, N=3000, N_k=3000))
    assert 1 < len(entry.configs) <= 5 and entry.source.endswith(
        ": the nearest winner and its list"
    )
    assert entry.configs[0] == parse_config("128x64x8x4")  # of N=4096, nearer than 2048


def test_what_was_never_swept_gets_a_list_or_the_model_s_first_choices(tmp_path: Path) -> None:
    packaged = recorded(FULL, tmp_path / "sweeps")
    assert "the best of v6_heads_first" in packaged.source and len(packaged.configs) > 1
    predicted = recorded(replace(FULL, D=80))
    assert predicted.source == "the cost model" and predicted.configs


def test_v3_changes_v2_s_body_and_not_its_list() -> None:
    steps = entries(["v2_autotune", "v3_causal_skip", "v5_final"], FULL, H200,
                    ROOT / "sweeps", (3, 6))  # fmt: skip
    v2, v3, v5 = steps
    assert [step.kernel.name for step in steps] == ["v0_baseline", "v3_causal_skip", "v4_exp2"]
    assert v2.source.endswith("v0_baseline_bf16_D64.parquet: the winner")
    assert v3.source.endswith("v0_baseline_bf16_D64.parquet: the nearest winner and its list")
    assert v2.configs[0] == v3.configs[0] and len(v3.configs) > 1
    assert v5.configs and "v0_baseline" not in v5.source


def test_a_step_that_cannot_run_says_why() -> None:
    problem = replace(FULL, D=256, dtype="fp32")
    (step,) = entries(["v1_tiles"], problem, find_gpu("rtx-4070-super"), ROOT / "sweeps", (3, 6))
    assert step.configs == () and "no config that can launch" in step.source


@pytest.mark.parametrize(
    ("gpu", "dtype", "out"),
    [
        ("h200", "bf16", {}),
        ("h100-sxm", "fp16", {}),
        ("h200", "fp32", dict.fromkeys(FOR_HOPPER, "takes bf16 and fp16 alone")),
        ("b200", "bf16", dict.fromkeys(FOR_HOPPER, "for compute capability 9.0 alone")),
        (
            "rtx-4070-super", "bf16",
            {**dict.fromkeys(FOR_HOPPER, "for compute capability 9.0 alone"),
             "v7_descriptor": "has no TMA"},
        ),
    ],
)  # fmt: skip
def test_who_cannot_take_part_on_a_card_is_left_out_with_the_reason(
    gpu: str, dtype: str, out: dict[str, str], tmp_path: Path
) -> None:
    for D in (64, 128, 96):
        problem = replace(CAUSAL, dtype=dtype, D=D)
        found = entries(entry_names(None), problem, find_gpu(gpu), tmp_path, (3, 6))
        assert [entry.name for entry in found] == list(LADDER)
        assert {entry.name for entry in found if not entry.configs} == set(out)
        for entry in found:
            assert out.get(entry.name, "") in entry.source
            for config in entry.configs:
                assert entry.kernel.misfit(problem, config, find_gpu(gpu).cc_number) is None


def test_a_file_gets_the_model_s_first_choice(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text('BASED_ON = "v6_heads_first"\n' + KERNELS["v6_heads_first"].path.read_text())
    (entry,) = entries([str(mine)], FULL, H200, tmp_path, (3, 6))
    assert entry.name == "mine" and len(entry.configs) == 1
    assert entry.source == "the cost model's first choice"


def test_names_are_the_ladder_s_or_files() -> None:
    assert entry_names(None) == tuple(LADDER)
    assert entry_names("v6_heads_first, mine.py,v6_heads_first") == ("v6_heads_first", "mine.py")
    with pytest.raises(FlashtuneError, match="--kernels: 'v6'") as raised:
        entry_names("v0_baseline,v6")
    assert "v6_heads_first" in raised.value.hint


# -- roofline: the articles' arithmetic on their card

ARTICLE = Roofs(tensor_tflops=72.2, dram_gb_s=504.0, l2_gb_s=3100.0, measured=True)


def test_the_articles_roofline_of_the_baseline() -> None:
    r = roofline(FULL, V0, parse_config("16x16x4x3"), ADA, ARTICLE)
    assert f"{r.needed / 1e9:.1f} {r.executed / 1e9:.1f}" == "137.4 206.2"
    assert f"{r.l2_bytes / 1e9:.1f}" == "8.6"
    assert r.l2_intensity == pytest.approx(23.9, abs=0.1)
    assert r.dram_ridge == pytest.approx(143, abs=0.5)
    # The articles count N / 2 operations a byte: without L, 4 bytes beside 4 rows of 128.
    assert r.dram_intensity * (512 + 4) / 512 == pytest.approx(2048)
    assert r.dram_bytes == 4 * 16_777_216 + 4 * 8 * 4096 * 4
    # 8.6 GB take 2.8 ms at 3.1 TB/s, less than the 6.27 ms that the kernel took.
    assert r.l2_ms == pytest.approx(8.6e9 / 3.1e12 * 1e3, rel=0.01)
    assert r.dram_ms == pytest.approx(0.134, abs=0.001)
    assert r.tensor_ms == pytest.approx(206.2 / 72.2, rel=0.001)
    assert r.bound == "tensor cores"


def test_the_articles_roofline_of_the_tuned_kernel() -> None:
    r = roofline(FULL, V0, parse_config("64x32x4x3"), ADA, ARTICLE)
    assert r.executed == r.needed
    assert f"{r.l2_bytes / 1e9:.2f}" == "2.16"
    assert r.l2_intensity == pytest.approx(63.5, abs=0.1)
    causal = roofline(CAUSAL, V6, parse_config("64x32x4x3"), ADA, ARTICLE)
    assert f"{causal.needed / 1e9:.1f} {causal.executed / 1e9:.1f}" == "68.7 69.8"


def test_DRAM_is_the_limit_below_the_articles_length() -> None:
    """Below about N = 290 on their card, whose ridge is 143 operations a byte."""

    def bound(N: int) -> bool:
        r = roofline(replace(FULL, N=N, N_k=N), V0, parse_config("64x32x4x3"), ADA, ARTICLE)
        assert r.dram_ridge is not None
        return r.dram_intensity < r.dram_ridge

    assert bound(256) and not bound(320)


def test_the_published_ceilings_and_the_measured_ones() -> None:
    roofs = published_roofs(ADA, "bf16")
    assert roofs.tensor_tflops == pytest.approx(512 * 56 * 2475e6 * 1e-12)
    assert roofs.dram_gb_s == 504.0 and not roofs.measured
    assert roofs.l2_gb_s == pytest.approx(3100, rel=0.06)
    assert published_roofs(replace(ADA, tensor_rates=None), "bf16").tensor_tflops is None
    reached = measured_roofs(roofs, 69.4, 450.0)
    assert reached == Roofs(69.4, 450.0, roofs.l2_gb_s, True)
    unknown = roofline(FULL, V0, CONFIG, ADA, replace(roofs, tensor_tflops=None))
    assert unknown.tensor_ms is unknown.dram_ridge is None and unknown.bound == "L2"


def test_the_roofline_s_table_says_what_was_measured() -> None:
    found = [roofline(FULL, V0, parse_config("16x16x4x3"), ADA, ARTICLE)]
    page = roofline_page(found, ARTICLE, ADA)
    row = dict(zip(page.header, page.rows[0], strict=False))
    assert (row["G op needed"], row["G op run"], row["L2 MB"]) == ("137.4", "206.2", "8,607")
    assert "measured in this run" in page.below[0]
    published = roofline_page(found, replace(ARTICLE, measured=False), ADA)
    assert "as published, not measured" in published.below[0]


# -- the measuring half, interpreted


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[str]]]:
    """The document of a bench in the interpreter, and the order of its rounds."""
    folder = tmp_path_factory.mktemp("bench")
    fault = next(fault for fault in FAULTS if fault.name == "rescale_left_out")
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted_bench.py"), str(fault.write(folder))],
        cwd=folder,
        env=subprocess_env(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="-1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), json.loads((folder / "rounds.json").read_text())


def test_what_is_wrong_or_refused_is_a_row_and_not_timed(
    interpreted: tuple[dict[str, Any], list[list[str]]],
) -> None:
    (shape,) = interpreted[0]["shapes"]
    right, wrong, refused, none = shape["kernels"]
    assert right["status"] == "timed" and right["reason"] is None
    assert right["left_out"] == ["64x16x4x2: ptxas fatal: made up"]
    assert 0 < right["max_abs_err"] < 0.01
    assert wrong["status"] == "wrong" and re.search("O is off SDPA's", wrong["reason"])
    assert wrong["max_abs_err"] > 0.1
    assert (refused["status"], none["status"]) == ("compile_failed", "pruned")
    for not_timed in (wrong, refused, none):
        assert not_timed["runs_ms"] == [] and not_timed["ms"] is not_timed["config"] is None
    # torch's own answer on a CPU, which has no cuDNN.
    reasons = {backend["backend"]: backend["reason"] for backend in shape["sdpa"]}
    assert reasons["flash"] is None and reasons["cudnn"] and reasons["efficient"]


def test_the_fastest_config_runs_and_runs_are_paired(
    interpreted: tuple[dict[str, Any], list[list[str]]],
) -> None:
    (shape,) = interpreted[0]["shapes"]
    right = shape["kernels"][0]
    assert right["config"] == "16x16x4x2"  # 1 ms; the first of the entry takes 2
    # The made-up clock slows down from run to run: times move, ratios do not.
    assert right["runs_ms"] == [2.0, 3.0, 4.0]
    assert shape["sdpa"][0]["runs_ms"] == [1.0, 1.5, 2.0]
    assert right["of_sdpa"]["flash"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_everybody_is_in_every_round_in_changing_order(
    interpreted: tuple[dict[str, Any], list[list[str]]],
) -> None:
    tuning, *rounds = interpreted[1]
    assert tuning == ["32x16x4x2", "16x16x4x2"]
    assert all(sorted(order) == ["16x16x4x2", "SDPA"] for order in rounds)
    assert len({tuple(order) for order in rounds}) == 2
