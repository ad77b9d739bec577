"""What budget explains: neighbours, the nearest config that runs, and the words it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CommandLine
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.explain import Explainer, Explanation
from flashtune.gpu import find_gpu, known_gpus
from flashtune.kernels import KERNELS
from flashtune.records import Config, OutClass, Problem
from flashtune.space import load_space, parse_config

ARTICLE_CARD = "rtx-4070-super"
FULL = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
V6 = KERNELS["v6_heads_first"]


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine.at(tmp_path, tmp_path_factory)


def explained(config: str, gpu: str = ARTICLE_CARD) -> Explanation:
    return Explainer(FULL, find_gpu(gpu), V6, (3, 9)).explain(parse_config(config))


def test_why_the_articles_large_config_cannot_run_and_what_can() -> None:
    """128x128x8x4 needs 114,688 bytes where a block may have 101,376; a stage fewer fits."""
    found = explained("128x128x8x4")
    assert found.line.verdict.out is OutClass.CANNOT and found.cost is None
    assert found.line.budget.shared == sum(t.bytes for t in found.line.terms if t.counted)
    assert found.nearest is not None
    assert str(found.nearest.budget.config) == "128x128x8x3"
    assert found.nearest.budget.shared == 81_920
    assert found.nearest.change == "1 stage fewer"


def test_what_a_stage_more_and_twice_the_warps_cost() -> None:
    """The articles' figures: a stage costs 8 KB and a block an SM, 8 warps on 64 rows do all
    twice."""
    found = explained("64x32x4x3")
    assert found.nearest is None and found.cost is not None
    stage, warps = found.beside
    assert (stage.change, warps.change) == ("one more stage", "twice the warps")
    assert found.line.budget.shared is not None and stage.budget.shared is not None
    assert stage.budget.shared - found.line.budget.shared == 8_192
    assert (found.line.budget.blocks_per_sm(), stage.budget.blocks_per_sm()) == (4, 3)
    assert warps.budget.repeats == 2 and not warps.verdict.kept
    assert warps.cost is not None
    assert warps.cost.predicted_ms > 1.5 * found.cost.predicted_ms


def test_what_ptxas_refuses_has_a_nearest_that_it_takes() -> None:
    found = explained("256x256x16x2", "h200")
    assert found.line.verdict.rule == "wgmma_registers"
    assert found.nearest is not None and found.nearest.verdict.kept


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(load_space("article")),
    st.integers(1, 7),
    st.sampled_from(sorted(known_gpus())),
    st.sampled_from([(64, "bf16"), (128, "bf16"), (128, "fp32"), (256, "fp32")]),
)
def test_the_nearest_is_smaller_runs_and_nothing_nearer_does(
    base: Config, stages: int, gpu: str, shape: tuple[int, str]
) -> None:
    config = Config(base.q_tile, base.k_tile, base.num_warps, stages)
    problem = Problem(4, 8, 8, 1024, 1024, shape[0], True, shape[1])
    explainer = Explainer(problem, find_gpu(gpu), V6, (3, 9))
    nearest = explainer.nearest_that_runs(config)
    if nearest is None:
        return
    there = nearest.budget.config
    assert nearest.cost is not None and nearest.cost.predicted_ms > 0
    assert there != config
    for axis in ("q_tile", "k_tile", "num_warps", "num_stages"):
        assert getattr(there, axis) <= getattr(config, axis)
    one_less = explainer.explain(Config(config.q_tile, config.k_tile, config.num_warps, stages - 1))
    if stages > 1 and one_less.line.verdict.kept:  # one step away: nothing is nearer
        steps = (config.q_tile // there.q_tile) * (config.k_tile // there.k_tile)
        steps *= config.num_warps // there.num_warps
        assert (steps, stages - there.num_stages) in ((1, 1), (2, 0))


def test_the_card_says_it_all_in_words(cli: CommandLine) -> None:
    done = cli.run("budget", "64x32x4x3", "--gpu", ARTICLE_CARD, "--triton", "3.6")
    text = done.stdout
    assert done.returncode == 0 and not done.stderr
    for said in (
        "24,576 of 101,376 bytes", "8,192 Q tile", "8,192 K ring", "8,192 V ring",
        "predicted; spills unlikely", "4, held by shared memory",
        "9.14: 2,048 programs on 56 SMs", "fills 14% of its places",
        "leaves 28 KB of L1", "by a model: not measured", "worth trying",
        "one more stage", "+8,192", "blocks per SM 3 for 4", "twice the warps", "tensor work x2",
    ):  # fmt: skip
        assert said in text, said
    refused = cli.run("budget", "128x128x8x4", "--gpu", ARTICLE_CARD).stdout
    assert "cannot: needs 114,688 bytes" in refused and "nearest to run  128x128x8x3" in refused
    assert "1 stage fewer" in refused and "one more stage" not in refused


def test_the_json_has_the_neighbours(cli: CommandLine) -> None:
    done = cli.run("budget", "128x128x8x4", "64x32x4x3", "--gpu", ARTICLE_CARD, "--json")
    large, small = json.loads(done.stdout)["budgets"]
    assert large["nearest_that_runs"]["config"] == "128x128x8x3"
    assert small["nearest_that_runs"] is None
    assert [n["change"] for n in small["beside"]] == ["one more stage", "twice the warps"]
    assert 0 <= small["registers"]["spill_probability"] <= 1
    assert 0 < small["last_wave_busy"] <= 1
