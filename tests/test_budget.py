"""The budget: the article's figures, rules that hold for every config, and Triton's own answers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.budget import (
    ALWAYS_OUT_ACCUMULATORS,
    Budget,
    assess,
    blocks_by_registers,
    blocks_by_shared,
    carve_out_kb,
    launched_registers,
    register_cap,
    verdict,
)
from flashtune.gpu import GpuSpec, find_gpu, known_gpus
from flashtune.kernels import KERNELS, Kernel
from flashtune.records import Config, OutClass, Problem
from flashtune.shared import shared_bytes
from flashtune.space import load_space, parse_config

ARTICLE_CARD = find_gpu("rtx-4070-super")
ARTICLE_TRITON = (3, 6)
V0, V6 = KERNELS["v0_baseline"], KERNELS["v6_heads_first"]
CARDS = list(known_gpus().values())


def problem(N: int = 4096, D: int = 64, dtype: str = "bf16", causal: bool = False) -> Problem:
    return Problem(4, 8, 8, N, N, D, causal, dtype)


def article(config: str, p: Problem | None = None, kernel: Kernel = V0) -> Budget:
    return assess(p or problem(), parse_config(config), ARTICLE_CARD, kernel, ARTICLE_TRITON)


# Config, shared bytes, programs per SM by shared memory, registers, programs by registers.
ARTICLE_TABLE = [
    ("16x16x4x3", 10_752, 8, 56, 9),
    ("64x32x4x3", 24_576, 4, 127, 4),
    ("64x32x4x5", 40_960, 2, 127, 4),
    ("128x64x8x4", 65_536, 1, 146, 1),
    ("128x128x8x3", 81_920, 1, 207, 1),
    ("256x64x16x5", 98_304, 1, 128, 1),
    ("64x256x4x2", 73_728, 1, 255, 2),
]


@pytest.mark.parametrize(("config", "shared", "by_shared", "regs", "by_regs"), ARTICLE_TABLE)
def test_the_article_s_table(
    config: str, shared: int, by_shared: int, regs: int, by_regs: int
) -> None:
    for kernel in (V0, V6):
        budget = article(config, kernel=kernel)
        assert budget.shared == shared
        assert budget.blocks_by_shared == by_shared
        assert blocks_by_registers(ARTICLE_CARD, budget.config.num_warps, regs) == by_regs
        assert budget.blocks_per_sm(by_regs) == min(by_shared, by_regs)
        assert verdict(budget, ARTICLE_CARD, exhaustive=True).kept


def test_128x128x8x4_does_not_fit_the_article_s_card() -> None:
    budget = article("128x128x8x4")
    assert (budget.shared, budget.blocks_by_shared) == (114_688, 0)
    answer = verdict(budget, ARTICLE_CARD)
    assert (answer.out, answer.rule) == (OutClass.CANNOT, "shared")
    assert answer.reason is not None
    assert "114,688" in answer.reason
    assert "101,376" in answer.reason


def test_fp32_at_D_128_fits_with_two_stages_only() -> None:
    p = problem(D=128, dtype="fp32")
    three, two = article("64x32x4x3", p), article("64x32x4x2", p)
    assert (three.shared, two.shared) == (107_520, 74_752)
    assert verdict(three, ARTICLE_CARD).out is OutClass.CANNOT
    assert verdict(two, ARTICLE_CARD).out is not OutClass.CANNOT


@pytest.mark.parametrize("kernel", [V0, V6], ids=lambda kernel: kernel.name)
def test_the_article_space_splits_as_in_the_article(kernel: Kernel) -> None:
    space = load_space("article")
    assert len(space) == 625
    rules = Counter(
        verdict(
            assess(problem(), c, ARTICLE_CARD, kernel, ARTICLE_TRITON),
            ARTICLE_CARD,
            exhaustive=True,
        ).rule
        for c in space
    )
    assert rules == {"accumulators_512": 60, "shared": 100, None: 465}


def test_waves_at_512() -> None:
    three, four = article("64x32x4x3", problem(512)), article("64x32x4x4", problem(512))
    assert three.programs == four.programs == 256
    waves = [b.waves(b.blocks_per_sm(4)) for b in (three, four)]
    assert [round(w, 2) for w in waves if w is not None] == [1.14, 1.52]


def test_accumulators_and_repeats_of_the_article() -> None:
    assert article("64x32x4x3").accumulators == 48
    assert article("16x16x4x3").accumulators == 10
    assert article("64x256x4x2").accumulators == 160
    assert article("256x64x16x5").accumulators == 64
    assert article("16x16x4x3").repeats == 1.5  # Q K^T twice, P V once
    assert article("64x32x4x3").repeats == 1
    assert article("64x32x8x3").repeats == 2
    caps = {w: register_cap(ARTICLE_CARD, w) for w in (1, 8, 16, 32)}
    assert caps == {1: 255, 8: 255, 16: 128, 32: 64}


# What holds for every config ---------------------------------------------------------------------

configs = st.builds(
    Config,
    st.sampled_from([16, 32, 64, 128, 256, 512]),
    st.sampled_from([16, 32, 64, 128, 256, 512]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(1, 10),
)
problems = st.builds(
    Problem,
    st.integers(1, 64), st.integers(1, 64), st.just(1),
    st.integers(1, 100_000), st.integers(1, 100_000), st.integers(1, 32).map(lambda n: 8 * n),
    st.booleans(), st.sampled_from(["bf16", "fp16", "fp32"]),
)  # fmt: skip
# Drawn freely, hardly any config would be one that a kernel for one card takes.
likely_configs = st.one_of(
    configs,
    st.builds(
        Config, st.sampled_from([32, 64, 128, 256, 512]), st.sampled_from([16, 64, 128, 256]),
        st.sampled_from([4, 8]), st.integers(1, 4),
    ),
)  # fmt: skip
maxnregs = st.one_of(st.none(), st.integers(3, 31).map(lambda n: 8 * n))
cards = st.sampled_from(CARDS)
hopper_or_not = st.one_of(st.just(find_gpu("h200")), cards)
kernels = st.sampled_from([V0, V6])
for_one_card = st.sampled_from([kernel for kernel in KERNELS.values() if kernel.takes])
every_kernel = st.one_of(st.sampled_from(list(KERNELS.values())), for_one_card)
tritons = st.sampled_from([(3, 6), (3, 7), (3, 8), (3, 9)])


@given(problems, configs, kernels, tritons, st.sampled_from(["num_stages", "k_tile"]))
def test_shared_never_falls_with_more_stages_or_wider_key_tiles(
    p: Problem, c: Config, kernel: Kernel, triton: tuple[int, int], axis: str
) -> None:
    """On the article's card. Wider key tiles may cross the size that is worth pipelining: up."""
    value = getattr(c, axis)
    larger = dataclasses.replace(c, **{axis: 2 * value if axis == "k_tile" else value + 1})
    small = shared_bytes(p, c, ARTICLE_CARD, kernel, triton)
    large = shared_bytes(p, larger, ARTICLE_CARD, kernel, triton)
    assert small is not None
    assert large is not None
    assert large >= small


@given(problems, configs, kernels, cards, st.integers(1, 32))
def test_waves_times_slots_are_the_programs(
    p: Problem, c: Config, kernel: Kernel, card: GpuSpec, blocks: int
) -> None:
    budget = assess(p, c, card, kernel, (3, 9))
    waves = budget.waves(blocks)
    assert waves is not None
    assert waves * card.sms * blocks == pytest.approx(budget.programs, rel=1e-12)
    assert (budget.programs - p.B * p.H) * c.q_tile < p.B * p.H * p.N <= budget.programs * c.q_tile
    assert budget.waves(0) is None
    assert budget.waves(None) is None


@given(cards, st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 255))
def test_blocks_by_registers_are_never_above_the_simple_formula(
    card: GpuSpec, warps: int, regs: int
) -> None:
    rounded = -(-regs // 8) * 8
    simple = card.registers_per_sm // (rounded * 32 * warps)
    exact = blocks_by_registers(card, warps, regs)
    assert 0 <= exact <= simple
    if regs <= register_cap(card, warps):
        assert exact >= 1
    if warps % 4 == 0:  # whole rounds of the four sub-partitions: the formulas agree
        assert exact == simple


@given(cards, st.integers(0, 300_000))
def test_blocks_by_shared_fill_the_sm_and_no_more(card: GpuSpec, shared: int) -> None:
    blocks = blocks_by_shared(card, shared)
    assert (blocks == 0) == (shared > card.shared_per_block)
    assert blocks * (shared + card.shared_reserved_per_block) <= card.shared_per_sm
    assert blocks_by_shared(card, shared + 1) <= blocks


@given(cards, st.integers(0, 232_448), st.integers(1, 32))
def test_a_carve_out_holds_the_blocks_that_fit(card: GpuSpec, shared: int, blocks: int) -> None:
    fit = min(blocks, blocks_by_shared(card, shared))
    kb = carve_out_kb(card, shared, fit)
    assert kb in card.shared_carve_outs_kb and kb < card.l1_kb
    assert fit * (shared + card.shared_reserved_per_block) <= kb * 1024 or fit == 0
    smaller = [size for size in card.shared_carve_outs_kb if size < kb]
    assert all(size * 1024 < fit * (shared + 128 + 1024) for size in smaller)
    assert card.shared_carve_outs_kb[-1] * 1024 == card.shared_per_sm


@given(problems, likely_configs, every_kernel, hopper_or_not, tritons)
def test_cannot_means_exactly_a_misfit_or_no_tma_or_that_no_block_fits_or_ptxas_refuses(
    p: Problem, c: Config, kernel: Kernel, card: GpuSpec, triton: tuple[int, int]
) -> None:
    budget = assess(p, c, card, kernel, triton)
    answer, exhaustive = verdict(budget, card), verdict(budget, card, exhaustive=True)
    too_large = budget.accumulators > ALWAYS_OUT_ACCUMULATORS
    # Accumulators over 512 are out first, as in the article's count of 60 and 100.
    refused = budget.blocks_by_shared == 0 or budget.wgmma_registers > budget.register_cap
    other = kernel.misfit(p, c, card.cc_number) is not None
    emulated = kernel.loads == "descriptor" and float(card.cc) < 9.0 and not other
    never = other or emulated
    assert (answer.out is OutClass.CANNOT) == (never or (refused and not too_large))
    assert (answer.rule == "kernel") == other
    assert (answer.rule == "no_tma") == emulated
    assert (exhaustive.out is OutClass.CANNOT) == (answer.out is OutClass.CANNOT)
    assert (exhaustive.out is OutClass.HOPELESS) == (too_large and not never)
    assert answer.out is not None or exhaustive.out is None  # exhaustive leaves out no more
    for given_answer in (answer, exhaustive):
        assert (given_answer.rule is None) == (given_answer.reason is None) == given_answer.kept
    assert budget.repeats >= 1
    if budget.shared is not None:
        assert budget.shared > 0


@given(problems, likely_configs, every_kernel, hopper_or_not)
def test_a_kernel_of_one_card_takes_what_it_says_and_nothing_else(
    p: Problem, c: Config, kernel: Kernel, card: GpuSpec
) -> None:
    takes, why = kernel.takes, kernel.misfit(p, c, card.cc_number)
    if takes is None:
        assert why is None
        return
    fits = {
        "compute capability 9.0": card.cc_number == takes.cc,
        "bf16 and fp16": p.dtype in takes.dtypes,
        "4 warps": c.num_warps == takes.num_warps,
        "64, 128, 256 rows": c.q_tile in takes.q_tiles,
    }
    assert (why is None) == all(fits.values())
    assert why is None or [said for said in fits if said in why] == [
        next(said for said, fit in fits.items() if not fit)  # the first that is in the way
    ]


@given(likely_configs, every_kernel, hopper_or_not)
def test_warps_that_compute_come_in_whole_groups_beside_one_that_loads(
    c: Config, kernel: Kernel, card: GpuSpec
) -> None:
    computing, block = kernel.warps(c, card.cc_number)
    specialised = block != computing
    assert specialised == (kernel.may_specialise(c) and c.num_warps == 4)
    if not specialised:
        assert computing == block == c.num_warps
        return
    assert computing % 4 == 0 and block == computing + 4
    assert 4 <= computing <= 4 * kernel.warpgroups
    assert kernel.rows_a_warpgroup is None or computing // 4 <= max(1, c.q_tile // 64)


@given(problems, likely_configs, every_kernel, hopper_or_not, maxnregs)
def test_computing_warps_get_what_the_loading_ones_leave(
    p: Problem, c: Config, kernel: Kernel, card: GpuSpec, maxnreg: int | None
) -> None:
    c = dataclasses.replace(c, maxnreg=maxnreg)
    budget = assess(p, c, card, kernel, (3, 9))
    computing, block, cap = budget.working.num_warps, budget.block_warps, budget.register_cap
    assert 8 <= cap <= card.registers_per_thread
    if block == computing:
        assert computing == c.num_warps
        return
    launched = launched_registers(card, block, maxnreg)
    assert launched * block * 32 <= card.registers_per_sm or maxnreg is not None
    # They are dealt out: never more than there are, and no eight a thread are left.
    pool = launched * block
    assert cap * computing + 24 * (block - computing) <= pool or cap == 8
    assert cap == 255 or (cap + 8) * computing + 24 * (block - computing) > pool
    more = assess(p, dataclasses.replace(c, maxnreg=(maxnreg or 248) + 8), card, kernel, (3, 9))
    assert maxnreg is None or more.register_cap >= cap


@given(problems, configs, kernels, cards)
def test_blocks_per_sm_is_the_least_limit(
    p: Problem, c: Config, kernel: Kernel, card: GpuSpec
) -> None:
    budget = assess(p, c, card, kernel, (3, 9))
    blocks = budget.blocks_per_sm()
    if budget.shared is None:
        assert blocks is None
        return
    assert blocks is not None
    assert blocks <= card.blocks_per_sm
    assert blocks * c.num_warps <= card.warps_per_sm
    assert budget.blocks_per_sm(0) == 0


# Against the recorded H200 landscape -------------------------------------------------------------


def test_the_hopeless_rules_lose_nothing_worth_having(h200_landscape: Path) -> None:
    """Of each recorded shape: nothing within 2% of the best is out, and most of the space is."""
    import pandas as pd

    h200, space = find_gpu("h200"), load_space("article")
    rows = pd.read_parquet(h200_landscape, columns=[
        "N", "causal", "D", "q_tile", "k_tile", "num_warps", "num_stages", "status", "shared", "ms",
    ])  # fmt: skip
    shapes = list(rows.groupby(["N", "causal", "D"]))
    assert len(shapes) == 4
    for (N, causal, D), group in shapes:
        p = problem(int(N), int(D), causal=bool(causal))
        kept = {c for c in space if verdict(assess(p, c, h200, V6, ARTICLE_TRITON), h200).kept}
        assert len(kept) <= 0.3 * len(space)
        recorded: list[Any] = list(group.itertuples())
        timed = {
            Config(int(r.q_tile), int(r.k_tile), int(r.num_warps), int(r.num_stages)): float(r.ms)
            for r in recorded
            if r.status == "timed"
        }
        best = min(timed.values())
        assert [str(c) for c, ms in timed.items() if ms <= 1.02 * best and c not in kept] == []


def test_cannot_is_what_the_h200_refused(h200_landscape: Path) -> None:
    import pandas as pd

    h200 = find_gpu("h200")
    r: Any
    for r in pd.read_parquet(h200_landscape).itertuples():
        c = Config(int(r.q_tile), int(r.k_tile), int(r.num_warps), int(r.num_stages))
        p = problem(int(r.N), int(r.D), causal=bool(r.causal))
        budget = assess(p, c, h200, V6, ARTICLE_TRITON)
        answer = verdict(budget, h200, exhaustive=True)
        if r.status == "timed":
            assert answer.kept, (c, answer)
        if r.status == "out_of_resources":
            assert not answer.kept, c
        if pd.notna(r.shared):
            assert budget.shared == r.shared
