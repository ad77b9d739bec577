"""The exported file: valid Python that Triton takes, with its evidence beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from flashtune.errors import FlashtuneError
from flashtune.export import as_json, parse_param_names, python_module, write_new
from flashtune.records import Config, Problem
from flashtune.results import Provenance, Recommendation, Recommended, RunInfo

FOREIGN = Path(__file__).with_name("foreign_attention.py")
FOREIGN_NAMES = {
    "Q_TILE_SIZE": "BLOCK_M",
    "K_TILE_SIZE": "BLOCK_N",
    "N_QUERIES": "N_CTX",
    "N_KEYS": "",
    "D": "HEAD_DIM",
    "is_causal": "CAUSAL",
}

SHORT = Problem(B=4, H=8, H_kv=8, N=512, N_k=512, D=64, causal=True, dtype="bf16")
LONG = replace(SHORT, N=4096, N_k=4096, causal=False)
SMALL, WIDE = Config(64, 32, 4, 3), Config(128, 128, 16, 2)
TINY = Config(16, 16, 1, 2)

REC = Recommendation(
    gpu="NVIDIA H200",
    cc="9.0",
    kernel="v4_exp2",
    measured=True,
    configs=(
        Recommended(SMALL, ((SHORT, 1.0), (LONG, 0.9375))),
        Recommended(WIDE, ((LONG, 0.9925),)),
        Recommended(TINY, (), "the only one that fits fp32 at D=128"),
    ),
    winners=((SHORT, SMALL, 0.0134567), (LONG, Config(128, 64, 8, 3), 0.337)),
    worst_loss=0.0075,
    serves=(("bf16", 64), ("fp32", 128)),
    unserved=(("fp32", 256),),
    barred=((Config(256, 64, 8, 2), "wrong on some shape"),),
)
UNMEASURED = replace(
    REC,
    measured=False,
    configs=(Recommended(SMALL, ()), Recommended(WIDE, ())),
    winners=(),
    worst_loss=None,
    barred=(),
)
PROVENANCE = Provenance(
    gpu="NVIDIA H200",
    cc="9.0",
    sms=132,
    measured=True,
    driver="580.159",
    torch="2.11.0+cu130",
    triton="3.6.0",
    cuda="13.0",
    python="3.12.1",
    kernel="v4_exp2",
    kernel_hash="abcdef012345",
    sm_clock_mhz=1980,
    mem_clock_mhz=3201,
    power_limit_w=700.0,
    git_commit=None,
)
RUNS = (
    RunInfo("one", "flashtune sweep --N 512 --causal", datetime(2026, 11, 28, tzinfo=UTC), None),
    RunInfo("two", "flashtune sweep --N 4096", datetime(2026, 11, 29, tzinfo=UTC), None),
)


def export(rec: Recommendation = REC, names: dict[str, str] | None = None, **changes: Any) -> str:
    options: dict[str, Any] = {"provenance": PROVENANCE, "runs": RUNS, **changes}
    return python_module(rec, param_names=names or {}, **options)


def executed(text: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(text, "configs.py", "exec"), namespace)
    return namespace


def foreign() -> Any:
    spec = importlib.util.spec_from_file_location("foreign_attention", FOREIGN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def autotuned(rec: Recommendation) -> Any:
    import triton

    made = executed(export(rec, FOREIGN_NAMES))
    decorate = triton.autotune(configs=made["AUTOTUNE_CONFIGS"], key=made["AUTOTUNE_KEY"])
    return decorate(foreign().attend)


def test_triton_reads_the_configs() -> None:
    import triton

    made = executed(export())
    configs = made["AUTOTUNE_CONFIGS"]
    assert all(type(config) is triton.Config for config in configs)
    assert [(c.kwargs, c.num_warps, c.num_stages) for c in configs] == [
        ({"Q_TILE_SIZE": 64, "K_TILE_SIZE": 32}, 4, 3),
        ({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128}, 16, 2),
        ({"Q_TILE_SIZE": 16, "K_TILE_SIZE": 16}, 1, 2),
    ]
    assert made["AUTOTUNE_KEY"] == ["N_QUERIES", "N_KEYS", "D", "is_causal"]


AXES = (
    replace(SMALL, maxnreg=168),
    replace(SMALL, warp_specialize=False),
    replace(WIDE, maxnreg=96, warp_specialize=True),
)
WITH_AXES = replace(REC, configs=tuple(Recommended(config, ((LONG, 0.9),)) for config in AXES))


def test_further_axes_are_in_the_configs_that_set_them() -> None:
    made = executed(export(WITH_AXES))["AUTOTUNE_CONFIGS"]
    tiles = {"Q_TILE_SIZE": 64, "K_TILE_SIZE": 32}
    assert [(c.kwargs, c.maxnreg) for c in made] == [
        (tiles, 168),
        ({**tiles, "WARP_SPECIALIZE": False}, None),
        ({"Q_TILE_SIZE": 128, "K_TILE_SIZE": 128, "WARP_SPECIALIZE": True}, 96),
    ]
    text = " ".join(export(WITH_AXES).replace("#", " ").split())
    assert (
        "Leave Q_TILE_SIZE and K_TILE_SIZE, num_warps, num_stages, maxnreg and WARP_SPECIALIZE out"
        " of the call"
    ) in text
    assert "maxnreg" not in export() and "WARP_SPECIALIZE" not in export()
    renamed = executed(export(WITH_AXES, {**FOREIGN_NAMES, "WARP_SPECIALIZE": "ws"}))
    assert renamed["AUTOTUNE_CONFIGS"][1].kwargs == {"BLOCK_M": 64, "BLOCK_N": 32, "ws": False}
    data: Any = as_json(WITH_AXES, PROVENANCE)
    assert [(c["config"], c["maxnreg"], c["warp_specialize"]) for c in data["configs"]] == [
        ("64x32x4x3:maxnreg=168", 168, None),
        ("64x32x4x3:warp_specialize=off", None, False),
        ("128x128x16x2:maxnreg=96,warp_specialize=on", 96, True),
    ]


def test_it_imports_triton_and_nothing_else() -> None:
    imports = [line for line in export().splitlines() if "import " in line]
    assert imports == ["import triton"]


def test_a_user_s_parameter_names() -> None:
    made = executed(export(names=FOREIGN_NAMES))
    assert made["AUTOTUNE_CONFIGS"][0].kwargs == {"BLOCK_M": 64, "BLOCK_N": 32}
    assert made["AUTOTUNE_KEY"] == ["N_CTX", "HEAD_DIM", "CAUSAL"]
    dropped = dict.fromkeys(("N_QUERIES", "N_KEYS", "D", "is_causal"), "")
    assert executed(export(names=dropped))["AUTOTUNE_KEY"] == []


def test_the_evidence_is_in_the_file() -> None:
    text = export()
    for fact in (
        "NVIDIA H200, compute capability 9.0, driver 580.159",
        "torch 2.11.0+cu130, Triton 3.6.0",
        "v4_exp2",
        "abcdef012345",
        "Measured: 2026-11-28 to 2026-11-29",
        "flashtune sweep --N 512 --causal",
        "flashtune sweep --N 4096",
        "Worst loss of the list on any shape: 0.8%",
        "fits: bf16 at D=64, fp32 at D=128.",
        "NO config that fits: fp32 at D=256.",
        "256x64x8x2: wrong on some shape",
    ):
        assert fact in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"# [1] {SHORT} 64x32x4x3 0.01346 ms 100.0%" in lines
    assert f"# [2] {LONG} 128x64x8x3 0.337 ms 99.2%" in lines
    beside = lines.index("# 64x32x4x3")
    assert lines[beside + 1] == "# [1]=100.0% [2]=93.8%"
    assert lines[beside + 2].startswith("triton.Config(")
    assert "# 16x16x1x2, the only one that fits fp32 at D=128" in lines
    assert "# [1]=untimed [2]=99.2%" in lines
    assert "NOTHING WAS MEASURED" not in text


def test_a_shape_that_no_config_of_the_list_ran() -> None:
    text = export(replace(REC, configs=REC.configs[1:2], worst_loss=1.0))
    assert "No config of the list was timed on [1]." in text
    assert "Worst loss" not in text


def test_nothing_measured_is_said_first() -> None:
    text = export(UNMEASURED, runs=RUNS[:1])
    assert text.splitlines()[2].startswith("# NOTHING WAS MEASURED")
    assert "Compiled: 2026-11-28" in text
    for claim in ("Measured:", "Worst loss", "%", " ms"):
        assert claim not in text
    assert len(executed(text)["AUTOTUNE_CONFIGS"]) == 2


@pytest.mark.parametrize("rec", [REC, UNMEASURED, WITH_AXES])
@pytest.mark.parametrize("names", [{}, FOREIGN_NAMES, {"Q_TILE_SIZE": "Q" * 40, "D": "d" * 50}])
def test_ruff_is_content_and_the_text_is_stable(
    rec: Recommendation, names: dict[str, str], tmp_path: Path
) -> None:
    text = export(rec, names)
    assert text == export(rec, names)
    assert text.endswith("]\n")
    ruff = shutil.which(
        "ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    if ruff is None:
        pytest.skip("ruff is not installed")
    path = tmp_path / "configs.py"
    path.write_text(text, encoding="utf-8")
    select = "--select=E,F,W,I,B,UP,RUF,SIM,D1,PL"
    for command in (["check", "--isolated", select], ["format", "--isolated", "--diff"]):
        result = subprocess.run(
            [ruff, *command, "--no-cache", str(path)], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_hostile_text_stays_in_its_comment() -> None:
    nasty = 'x"""\n\rimport os\u2028raise\x00 \\ \u202e'
    run = RunInfo("one", nasty, RUNS[0].started, None)
    reasons = tuple(replace(item, kept_for=nasty) for item in REC.configs)
    rec = replace(REC, gpu=nasty, kernel=nasty, configs=reasons)
    text = export(rec, runs=[run], provenance=replace(PROVENANCE, driver=nasty, torch=nasty))
    made = executed(text)
    assert set(made) == {"__builtins__", "__doc__", "triton", "AUTOTUNE_CONFIGS", "AUTOTUNE_KEY"}


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"BLOCK_M": "Q_TILE_SIZE"}, "'BLOCK_M' is not a parameter"),
        ({"Q_TILE_SIZE": "block m"}, "not a Python identifier"),
        ({"Q_TILE_SIZE": "lambda"}, "not a Python identifier"),
        ({"K_TILE_SIZE": ""}, "cannot be dropped"),
        ({"WARP_SPECIALIZE": ""}, "cannot be dropped"),
        ({"Q_TILE_SIZE": "num_warps"}, "option of the launch"),
        ({"WARP_SPECIALIZE": "maxnreg"}, "option of the launch"),
        ({"Q_TILE_SIZE": "BLOCK", "K_TILE_SIZE": "BLOCK"}, "both be called 'BLOCK'"),
        ({"Q_TILE_SIZE": "D"}, "both be called 'D'"),
    ],
)
def test_bad_names(names: dict[str, str], says: str) -> None:
    with pytest.raises(FlashtuneError) as error:
        export(names=names)
    assert says in error.value.message
    assert "Q_TILE_SIZE, K_TILE_SIZE, N_QUERIES, N_KEYS, D, is_causal" in error.value.hint


def test_parsing_names() -> None:
    assert parse_param_names("") == {}
    assert parse_param_names(" Q_TILE_SIZE=BLOCK_M, K_TILE_SIZE = BLOCK_N,is_causal=, ") == {
        "Q_TILE_SIZE": "BLOCK_M",
        "K_TILE_SIZE": "BLOCK_N",
        "is_causal": "",
    }
    for bad in ("Q_TILE_SIZE", "D=A,D=B", "BLOCK_M=x", "Q_TILE_SIZE=", "D=a=b", "=x"):
        with pytest.raises(FlashtuneError):
            parse_param_names(bad)


def test_json() -> None:
    data: Any = as_json(REC, PROVENANCE)
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data))
    assert data["schema_version"] == 1
    assert data["configs"][0]["config"] == "64x32x4x3"
    assert data["configs"][0]["num_stages"] == 3
    assert data["configs"][0]["share_of_best"][1]["share"] == 0.9375
    assert data["configs"][0]["share_of_best"][1]["problem"]["N"] == 4096
    assert data["winners"][0]["ms"] == 0.0134567
    assert data["unserved"] == [{"dtype": "fp32", "D": 256}]
    assert data["provenance"]["driver"] == "580.159"


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "configs.py"
    write_new(path, "one\n", force=False)
    path.chmod(0o640)
    with pytest.raises(FlashtuneError) as error:
        write_new(path, "two\n", force=False)
    assert "--force" in error.value.hint
    assert path.read_text() == "one\n"
    write_new(path, "two\n", force=True)
    assert path.read_text() == "two\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("one\n")
    link = tmp_path / "link.py"
    link.symlink_to("real.py")
    write_new(link, "two\n", force=True)
    assert link.is_symlink()
    assert (tmp_path / "real.py").read_text() == "two\n"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "configs.py"
    path.write_text("one\n")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(FlashtuneError, match="Permission denied"):
        write_new(path, "two\n", force=True)
    assert path.read_text() == "one\n"
    assert list(tmp_path.iterdir()) == [path]


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FlashtuneError, match="no folder"):
        write_new(tmp_path / "missing" / "configs.py", "", force=False)
    with pytest.raises(FlashtuneError, match="is a directory"):
        write_new(tmp_path, "", force=True)
    with pytest.raises(FlashtuneError):
        write_new(tmp_path / ("x" * 300), "", force=False)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write anywhere")
        with pytest.raises(FlashtuneError, match="Permission denied"):
            write_new(tmp_path / "configs.py", "", force=False)
    finally:
        tmp_path.chmod(0o700)


def test_a_foreign_kernel_takes_the_list_without_a_gpu() -> None:
    tuner = autotuned(REC)
    assert [c.kwargs["BLOCK_M"] for c in tuner.configs] == [64, 128, 16]
    assert set(tuner.keys) <= set(tuner.arg_names)
    for config in tuner.configs:
        assert set(config.kwargs) <= set(tuner.arg_names)


def test_the_foreign_kernel_is_right_in_the_interpreter() -> None:
    # In a process of its own, because Triton reads the variable when it is first imported.
    result = subprocess.run(
        [sys.executable, str(FOREIGN)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == "ok\n"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [512, 500])
def test_a_foreign_kernel_tunes_itself_on_the_gpu(length: int, causal: bool) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    module = foreign()
    tuner = autotuned(REC)
    for dtype, limit in ((torch.bfloat16, 4e-2), (torch.float16, 5e-3)):
        q, k, v = module.inputs("cuda", dtype, length, 64)
        out = module.run(tuner, q, k, v, causal)
        assert module.error(out, q, k, v, causal) < limit
        assert tuner.best_config in tuner.configs
