"""The ladder's steps, the tuned lists, and which configs a step gets on a card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune import choose as choose_module
from flashtune import tuned
from flashtune.budget import assess, verdict
from flashtune.choose import MODEL_CONFIGS, choose, nearest_list
from flashtune.cli.options import triton_version
from flashtune.compiler import CompileJob
from flashtune.errors import FlashtuneError
from flashtune.fan_out import compile_all
from flashtune.gpu import find_gpu, known_gpus
from flashtune.kernels import KERNELS, find_kernel
from flashtune.ladder import LADDER, Fixed, Step, Tuned
from flashtune.records import Config, OutClass, Problem
from flashtune.shortlist import recommend_for
from flashtune.space import parse_config
from flashtune.store import find, read
from flashtune.tuned import TunedList, Winner, as_toml, from_sweep, tuned_list

ADA, H200, B200 = find_gpu("rtx-4070-super"), find_gpu("h200"), find_gpu("b200")
PROBLEM = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
TRITON = (3, 9)
FILES = sorted((ROOT / "configs" / "tuned").glob("*.toml"))


def configs(step: str, problem: Problem = PROBLEM, gpu: str = "h200") -> list[str]:
    return [str(c) for c in choose(LADDER[step], problem, find_gpu(gpu), TRITON).configs]


# The steps ----------------------------------------------------------------------------------------


def test_the_steps_stand_in_the_articles_order() -> None:
    assert list(LADDER) == [
        "v0_baseline", "v1_tiles", "v2_autotune", "v3_causal_skip", "v4_exp2", "v5_final",
        "v6_heads_first", "v7_descriptor", "v8_warp_specialised", "v9_ping_pong",
        "v10_persistent",
    ]  # fmt: skip
    assert [step.body for step in LADDER.values()] == [
        "v0_baseline", "v0_baseline", "v0_baseline", "v3_causal_skip", "v4_exp2", "v4_exp2",
        "v6_heads_first", "v7_descriptor", "v8_warp_specialised", "v9_ping_pong",
        "v10_persistent",
    ]  # fmt: skip


def test_every_kernel_is_a_step_and_every_body_a_kernel() -> None:
    assert {step.body for step in LADDER.values()} == set(KERNELS)
    assert all(LADDER[name].body == name for name in KERNELS)


@pytest.mark.parametrize("step", [s for s in LADDER.values() if s.name not in KERNELS])
def test_a_step_without_a_body_is_refused_by_name(step: Step) -> None:
    with pytest.raises(FlashtuneError) as refused:
        find_kernel(step.name)
    assert f"{step.body}'s" in refused.value.message
    how = f"fixed at {step.choice.config}" if isinstance(step.choice, Fixed) else "tuned"
    assert how in refused.value.message
    assert f"--kernel {step.body}" in refused.value.hint


# Fixed configs ------------------------------------------------------------------------------------


def test_v1_gives_up_a_stage_where_rows_are_too_wide() -> None:
    wide = replace(PROBLEM, D=128, dtype="fp32")
    assert configs("v1_tiles", gpu="rtx-4070-super") == ["64x32x4x3"]
    assert configs("v1_tiles", replace(PROBLEM, D=128), "rtx-4070-super") == ["64x32x4x3"]
    assert configs("v1_tiles", replace(PROBLEM, dtype="fp32"), "rtx-4070-super") == ["64x32x4x3"]
    assert configs("v1_tiles", wide, "rtx-4070-super") == ["64x32x4x2"]
    assert configs("v1_tiles", wide, "h200") == ["64x32x4x3"]  # 227 KB a block


def test_the_compiler_agrees_that_v1_needs_the_fallback(triton_cache: Path) -> None:
    wide = replace(PROBLEM, D=128, dtype="fp32")
    step = LADDER["v1_tiles"].choice
    assert isinstance(step, Fixed) and step.fallback is not None
    jobs = [CompileJob(KERNELS["v0_baseline"], wide, c, 89) for c in (step.config, step.fallback)]
    shared = {job.config: compiled.shared for job, compiled in compile_all(jobs, 2)}
    # The articles' figures, of Triton 3.6. From 3.8 on a row reduction's scratch is 512 bytes less.
    less = 512 if triton_version() >= (3, 8) else 0
    assert shared == {step.config: 107_520 - less, step.fallback: 74_752 - less}
    assert shared[step.fallback] <= ADA.shared_per_block < shared[step.config]


def test_a_step_none_of_whose_configs_fits_says_why() -> None:
    widest = replace(PROBLEM, D=256, dtype="fp32")
    with pytest.raises(FlashtuneError, match=r"64x32x4x2 needs [\d,]+ bytes .* allows 101,376"):
        choose(LADDER["v1_tiles"], widest, ADA, TRITON)


@pytest.mark.parametrize("step", ["v0_baseline", "v2_autotune", "v3_causal_skip", "v4_exp2"])
def test_more_heads_than_the_grid_has_room_for_are_refused(step: str) -> None:
    """CUDA launches 65,535 programs along axis 1, where these have B * H."""
    for heads, fits in ((65_535, True), (65_536, False)):
        problem = Problem(heads, 1, 1, 64, 64, 64, False, "bf16")
        if fits:
            assert configs(step, problem)
        else:
            with pytest.raises(FlashtuneError, match=r"65,536 programs on grid axis 1"):
                configs(step, problem)
    assert configs("v6_heads_first", Problem(2**17, 1, 1, 64, 64, 64, False, "bf16"))


def test_more_query_tiles_than_the_grid_has_room_for_rule_out_small_ones() -> None:
    v6 = KERNELS["v6_heads_first"]
    problem = Problem(1, 1, 1, 2**20, 64, 64, False, "bf16")
    answers = [
        verdict(assess(problem, parse_config(config), ADA, v6, TRITON), ADA)
        for config in ("16x16x1x1", "32x32x2x2")
    ]
    assert [answer.out for answer in answers] == [OutClass.CANNOT, None]
    assert "65,536 programs on grid axis 1" in str(answers[0].reason)


# Tuned configs ------------------------------------------------------------------------------------


def test_a_tuned_step_has_its_shape_s_winner_first() -> None:
    recorded = tuned_list("h200", "v6_heads_first", "bf16", 64)
    assert recorded is not None
    for winner in recorded.winners:
        first, *rest = configs("v6_heads_first", winner.problem)
        assert first == str(winner.config)
        assert {first, *rest} == {str(c) for c in (winner.config, *recorded.configs)}


@settings(deadline=None)
@given(
    N=st.integers(1, 10**5), N_k=st.integers(1, 10**5), causal=st.booleans(),
    gpu=st.sampled_from([ADA, H200]),
)  # fmt: skip
def test_the_nearest_shape_has_the_same_mask(N: int, N_k: int, causal: bool, gpu: object) -> None:
    recorded = tuned_list("h200", "v6_heads_first", "bf16", 64)
    assert recorded is not None
    problem = replace(PROBLEM, N=N, N_k=N_k, causal=causal)
    first = parse_config(configs("v6_heads_first", problem)[0])
    assert first in {w.config for w in recorded.winners if w.problem.causal == causal}


def test_the_nearest_length_is_the_nearest_by_ratio() -> None:
    causal = replace(PROBLEM, causal=True)
    by_length = {N: configs("v6_heads_first", replace(causal, N=N, N_k=N))[0]
                 for N in (1, 512, 740, 1440, 1460, 2048, 2800, 3000, 10**6)}  # fmt: skip
    assert by_length == {
        1: "64x64x4x3", 512: "64x64x4x3", 740: "64x64x4x4", 1440: "64x64x4x4",
        1460: "128x64x8x3", 2048: "128x64x8x3", 2800: "128x64x8x3", 3000: "64x64x4x3",
        10**6: "64x64x4x3",
    }  # fmt: skip


def test_a_kernel_that_nobody_swept_takes_the_nearest_one_s_list() -> None:
    def kernel_of(kernel: str, gpu: str, dtype: str = "bf16", D: int = 64) -> tuple[str, str]:
        found = nearest_list(KERNELS[kernel], gpu, dtype, D)
        return ("", "") if found is None else (found.kernel, found.dtype)

    # On the H200 v0, v4 and v6 were swept, with D=128 only v6; on the articles' card v0 and v4.
    assert kernel_of("v0_baseline", "h200") == ("v0_baseline", "bf16")
    assert kernel_of("v3_causal_skip", "h200") == ("v4_exp2", "bf16")  # v0 has one loop
    assert kernel_of("v4_exp2", "h200", D=128) == ("v6_heads_first", "bf16")
    assert kernel_of("v6_heads_first", "rtx-4070-super") == ("v4_exp2", "bf16")
    assert kernel_of("v0_baseline", "h200", D=128) == ("v6_heads_first", "bf16")
    assert kernel_of("v6_heads_first", "h200", "fp16") == ("v6_heads_first", "bf16")
    assert kernel_of("v6_heads_first", "h200", "fp32") == ("", "")
    assert kernel_of("v6_heads_first", "h200", D=96) == ("", "")
    assert kernel_of("v6_heads_first", "b200") == ("", "")


def test_kernels_of_other_warps_lend_and_borrow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """v9's best would have v0 run with four warps on 256 rows, and v6's has eight for v9."""
    recorded = tuned_list("h200", "v6_heads_first", "bf16", 64)
    assert recorded is not None
    for only in KERNELS:
        swept = replace(recorded, kernel=only)
        monkeypatch.setattr(
            choose_module, "tuned_list",
            lambda gpu, name, dtype, D, swept=swept: swept if name == swept.kernel else None,
        )  # fmt: skip
        borrowers = {k for k in KERNELS.values() if nearest_list(k, "h200", "bf16", 64)}
        assert borrowers == {k for k in KERNELS.values() if k.takes == KERNELS[only].takes}
    monkeypatch.undo()
    for step in ("v8_warp_specialised", "v9_ping_pong"):
        choice = choose(LADDER[step], PROBLEM, find_gpu("h100-sxm"), TRITON)
        assert choice.predicted and len(choice.configs) == MODEL_CONFIGS


def test_without_a_list_the_model_s_first_choices_serve() -> None:
    for gpu in known_gpus().values():
        choice = choose(LADDER["v6_heads_first"], replace(PROBLEM, dtype="fp32"), gpu, TRITON)
        assert choice.predicted
        assert len(choice.configs) == MODEL_CONFIGS
        v6 = KERNELS["v6_heads_first"]
        for config in choice.configs:
            answer = verdict(assess(replace(PROBLEM, dtype="fp32"), config, gpu, v6, TRITON), gpu)
            assert answer.kept
    assert not choose(LADDER["v6_heads_first"], PROBLEM, H200, TRITON).predicted


@pytest.mark.parametrize("step", [s for s in LADDER.values() if isinstance(s.choice, Tuned)])
@pytest.mark.parametrize("gpu", ["h200", "rtx-4070-super"])
def test_every_config_of_a_tuned_step_can_launch(step: Step, gpu: str) -> None:
    card, kernel = find_gpu(gpu), KERNELS[step.body]
    if kernel.loads == "descriptor" and gpu == "rtx-4070-super":
        why = "has no TMA" if kernel.takes is None else "for compute capability 9.0 alone"
        with pytest.raises(FlashtuneError, match=why):
            choose(step, PROBLEM, card, TRITON)
        return
    for causal in (False, True):
        problem = replace(PROBLEM, causal=causal)
        found = choose(step, problem, card, TRITON).configs
        assert found
        for config in found:
            answer = verdict(assess(problem, config, card, kernel, TRITON), card)
            assert answer.out is not OutClass.CANNOT, (config, answer.reason)


# The lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_list_is_what_its_name_says(path: Path) -> None:
    words = path.stem.split("_")
    gpu, kernel, dtype, D = words[0], "_".join(words[1:-2]), words[-2], int(words[-1][1:])
    found = tuned_list(gpu, kernel, dtype, D)
    assert found is not None
    assert found.file_name == path.name
    assert (found.gpu, found.kernel, found.dtype, found.D) == (gpu, kernel, dtype, D)
    assert gpu in known_gpus()
    assert kernel in KERNELS
    assert found.configs
    assert len({winner.problem for winner in found.winners}) == len(found.winners) > 0


@pytest.mark.parametrize(
    "path", [p for p in find(ROOT / "sweeps") if read(p).provenance.measured], ids=lambda p: p.stem
)
def test_a_recorded_sweep_s_list_is_the_one_it_gives(path: Path) -> None:
    """benchmarks/make_tuned.py makes the committed file again."""
    file = read(path)
    made = from_sweep(file, recommend_for([file]))
    assert (ROOT / "configs" / "tuned" / made.file_name).read_text() == as_toml(made)


texts = st.from_regex(r"[a-z0-9-]{1,12}", fullmatch=True)
powers = st.sampled_from([16, 32, 64, 128])
some_configs = st.builds(Config, powers, powers, st.sampled_from([1, 4, 8]), st.integers(1, 5))
lengths = st.integers(1, 2**20)


@st.composite
def lists(draw: st.DrawFn) -> TunedList:
    dtype, D = draw(st.sampled_from(["bf16", "fp32"])), draw(st.integers(1, 32)) * 8
    shapes = st.builds(
        Problem, lengths, lengths, lengths, lengths, lengths, st.just(D), st.booleans(),
        st.just(dtype),
    )  # fmt: skip
    times = st.none() | st.floats(1e-4, 1e3).map(lambda ms: round(ms, 5))
    winners = draw(st.lists(st.builds(Winner, shapes, some_configs, times), max_size=4))
    listed = draw(st.lists(some_configs, min_size=1, max_size=5))
    return TunedList(draw(texts), draw(texts), dtype, D, draw(texts), tuple(listed), tuple(winners))


@settings(deadline=None)
@given(made=lists())
def test_a_list_comes_back_from_its_file(
    made: TunedList, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lists")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "config_dir", lambda: folder)
        (folder / "tuned").mkdir()
        (folder / "tuned" / made.file_name).write_text(as_toml(made))
        assert tuned_list(made.gpu, made.kernel, made.dtype, made.D) == made
        assert tuned_list(made.gpu, made.kernel, made.dtype, made.D + 8) is None


@pytest.mark.parametrize(
    ("sound", "broken", "named"),
    [
        ('gpu = "h200"', "gpu = 200", "gpu is 200"),
        ("D = 64", "D = true", "D is True"),
        ("causal = false", "causal = 0", "causal in .* is 0"),
        ('config = "64x64x4x3"', 'config = "64x64x4"', "64x64x4"),
        ("configs = [", "config = [", "configs is None"),
    ],
)
def test_a_broken_list_is_refused_by_its_key(
    sound: str, broken: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "h200_v6_heads_first_bf16_D64.toml"
    text = (ROOT / "configs" / "tuned" / name).read_text()
    assert sound in text
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / name).write_text(text.replace(sound, broken, 1))
    monkeypatch.setattr(tuned, "config_dir", lambda: tmp_path)
    with pytest.raises(FlashtuneError, match=named):
        tuned_list("h200", "v6_heads_first", "bf16", 64)


def test_a_sweep_that_measured_nothing_makes_no_list() -> None:
    file = read(find(ROOT / "sweeps")[0])
    unmeasured = replace(recommend_for([file]), measured=False)
    with pytest.raises(FlashtuneError, match="measured nothing"):
        from_sweep(file, unmeasured)
