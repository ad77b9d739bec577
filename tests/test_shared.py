"""Shared memory by buffers: the articles' figures, Triton's answers, the allocator's rules."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import TARGET, CommandLine
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.allocator import Buffer, place, total
from flashtune.descriptors import has_tma
from flashtune.gpu import GpuSpec, find_gpu, known_gpus
from flashtune.kernels import KERNELS, Kernel
from flashtune.records import Config, Problem
from flashtune.shared import buffers, shared_bytes, terms
from flashtune.space import parse_config

V0, V6, V7 = KERNELS["v0_baseline"], KERNELS["v6_heads_first"], KERNELS["v7_descriptor"]
V9, V10 = KERNELS["v9_ping_pong"], KERNELS["v10_persistent"]
ADA, HOPPER, BLACKWELL = find_gpu("rtx-4070-super"), find_gpu("h200"), find_gpu("b200")
TRITONS = ((3, 6), (3, 7), (3, 8), (3, 9))


def problem(D: int = 64, dtype: str = "bf16", causal: bool = False) -> Problem:
    return Problem(4, 8, 8, 4096, 4096, D, causal, dtype)


def bytes_of(
    config: str, p: Problem | None = None, gpu: GpuSpec = ADA, kernel: Kernel = V0,
    triton: tuple[int, int] = (3, 9), **aligned: bool,
) -> int | None:  # fmt: skip
    return shared_bytes(p or problem(), parse_config(config), gpu, kernel, triton, **aligned)


def sum_of(config: str, p: Problem, gpu: GpuSpec = ADA, kernel: Kernel = V0) -> dict[str, int]:
    found = terms(p, parse_config(config), gpu, kernel, (3, 9))
    assert found is not None
    return {term.name: term.bytes for term in found if term.counted}


# What the terms say ------------------------------------------------------------------------------


def test_the_terms_of_the_article_s_favourite() -> None:
    assert sum_of("64x32x4x3", problem()) == {"Q tile": 8192, "K ring": 8192, "V ring": 8192}
    # One more stage is one more tile of K and one of V.
    four = sum_of("64x32x4x4", problem())
    assert four == {"Q tile": 8192, "K ring": 12_288, "V ring": 12_288}


def test_the_article_s_round_0_with_warps_side_by_side() -> None:
    """16x16x4x3: P's round trip is live where the reductions' scratch was, and not beside it."""
    found = terms(problem(), parse_config("16x16x4x3"), ADA, V0, (3, 9))
    assert found is not None
    counted = {term.name: term.bytes for term in found if term.counted}
    assert counted == {"Q tile": 2048, "K ring": 4096, "V ring": 4096, "P round trip": 512}
    assert [term.name for term in found if not term.counted] == ["row reductions"]
    assert sum(counted.values()) == 10_752


def test_hopper_reads_k_and_v_in_place_and_needs_one_more_tile_of_each() -> None:
    assert sum_of("64x32x4x2", problem(), HOPPER)["K ring"] == 2 * 32 * 64 * 2
    assert bytes_of("64x32x4x2", gpu=HOPPER) == bytes_of("64x32x4x3", gpu=ADA)


def test_datacentre_blackwell_has_barriers_and_the_gap_that_alignment_leaves() -> None:
    parts = sum_of("64x32x4x3", problem(), BLACKWELL, V6)
    assert parts["barriers"] == 32
    assert parts["alignment"] == 1024 - 32  # Q starts a whole swizzle block after the barriers
    assert sum(parts.values()) == 33_792


def test_tma_signals_a_barrier_for_each_tile_in_flight() -> None:
    parts = sum_of("128x64x8x3", problem(), HOPPER, V7)
    tiles = {"Q tile": 16_384, "K ring": 3 * 8192, "V ring": 3 * 8192}
    # Q is placed behind the barriers, a whole swizzle block further.
    assert parts == {**tiles, "barriers": 3 * 8, "alignment": 1024 - 3 * 8}
    # Without wgmma K and V go on into registers, each with barriers of its own; so did Q, before.
    assert sum_of("64x32x2x3", problem(), HOPPER, V7) == {
        "K ring": 2 * 4096, "V ring": 2 * 4096, "barriers": 2 * 2 * 8,
    }  # fmt: skip


def test_wgmma_reads_fp32_along_the_keys_only_so_that_v_is_turned_round() -> None:
    parts = sum_of("256x32x4x4", problem(128, "fp32"), HOPPER, V7)
    tile = 32 * 128 * 4
    assert (parts["K ring"], parts["V ring"], parts["V turned round"]) == (4 * tile, 3 * tile, tile)
    assert parts["barriers"] == 4 * 8 + 3 * 8  # K and V are not waited for together any more


def test_v9_keeps_what_its_source_allocates_and_what_its_warps_are_given() -> None:
    parts = sum_of("128x128x4x2", problem(128), HOPPER, V9)
    assert parts == {
        "Q tile": 32_768, "K ring": 65_536, "V ring": 65_536,
        "barriers": 8 * (4 * 2 + 2),
        "warp states": 8, "warp arguments": 168,
        "alignment": 8,  # the arguments end at no multiple of 16, where barriers start
    }  # fmt: skip
    # One warpgroup is the first four warps: the producer's arguments are less than a descriptor.
    one = sum_of("64x128x4x2", problem(128), HOPPER, V9)
    assert (one["tensor map"], one["warp states"], one["barriers"]) == (128, 4, 8 * (4 * 2 + 1))
    assert "warp arguments" not in one and "alignment" not in one


def test_v9_is_left_to_the_compiler_where_its_warps_are_given_who_knows_what() -> None:
    """One key is a constant to Triton: 128x64x4x2 took 49,384 bytes with 3.9, 49,400 with 3.6 and
    with more keys 49,416."""
    assert bytes_of("128x64x4x2", gpu=HOPPER, kernel=V9) == 49_416
    single = dataclasses.replace(problem(), N_k=1)
    for causal in (False, True):
        args: Any = (
            dataclasses.replace(single, causal=causal), parse_config("128x64x4x2"), HOPPER, V9,
            (3, 9),
        )  # fmt: skip
        assert (shared_bytes(*args), buffers(*args), terms(*args)) == (None, None, None)
    # One query is too, and changes nothing.
    assert bytes_of("128x64x4x2", dataclasses.replace(problem(), N=1), HOPPER, V9) == 49_416


def test_v10_keeps_two_q_tiles_where_there_is_room() -> None:
    parts = sum_of("128x128x4x2", problem(128), HOPPER, V10)
    assert parts["Q tile"] == 2 * 128 * 256 and parts["K ring"] == 2 * 128 * 256
    assert sum_of("128x128x4x3", problem(128), HOPPER, V10)["Q tile"] == 128 * 256


def test_v10_is_left_to_the_compiler_where_its_warps_are_given_who_knows_what() -> None:
    """A length of 1 is no argument, and a stride beyond 32 bits a larger one."""
    for other in ({"N": 1}, {"N_k": 1}, {"N": 2**24}):
        asked = dataclasses.replace(problem(128), **other)
        assert bytes_of("128x64x4x2", asked, HOPPER, V10) is None


def test_v9_is_not_modelled_where_it_refuses_to_run() -> None:
    for gpu, config, dtype in (
        (BLACKWELL, "128x64x4x2", "bf16"),
        (HOPPER, "128x64x8x2", "bf16"),
        (HOPPER, "32x64x4x2", "bf16"),
        (HOPPER, "128x64x4x2", "fp32"),
    ):
        assert bytes_of(config, problem(dtype=dtype), gpu, V9) is None


@pytest.mark.parametrize("kernel", [V0, V6], ids=lambda kernel: kernel.name)
def test_reductions_in_chunks_from_triton_3_8_on(kernel: Kernel) -> None:
    """fp32: P and the scratch of the row reductions are live together, so the chunks show."""
    p, config = problem(128, "fp32"), "64x64x8x2"
    q, kv, round_trip = 64 * 128 * 4, 64 * 128 * 4, 64 * 64 * 4
    before, after = 64 * 8 * 4, 8 * 128
    for triton, scratch in (((3, 6), before), ((3, 7), before), ((3, 8), after), ((3, 9), after)):
        expected = q + 2 * kv + round_trip + scratch
        assert bytes_of(config, p, kernel=kernel, triton=triton) == expected


def test_a_compute_capability_that_nobody_checked_is_not_modelled() -> None:
    other = dataclasses.replace(ADA, cc="11.0")
    args: Any = (problem(), parse_config("64x32x4x3"), other, V0, (3, 9))
    assert shared_bytes(*args) is None
    assert buffers(*args) is None
    assert terms(*args) is None


def test_descriptors_are_not_modelled_where_triton_emulates_them() -> None:
    assert bytes_of("64x32x4x3", gpu=ADA, kernel=V7) is None
    assert bytes_of("64x32x4x3", gpu=HOPPER, kernel=V7) == 33_792


def test_budget_prints_the_sum(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    cli = CommandLine.at(tmp_path, tmp_path_factory)
    asked = ("budget", "16x16x4x3", *TARGET, "--triton", "3.9")
    told = json.loads(cli.run(*asked, "--json").stdout)["budgets"][0]
    counted = {t["name"]: t["bytes"] for t in told["shared_terms"] if t["counted"]}
    assert sum(counted.values()) == told["shared"] == 10_752
    printed = cli.run(*asked).stdout
    for name, size in counted.items():
        assert f"{size:,} {name}: " in printed


# Recorded from Triton ----------------------------------------------------------------------------

RECORDED = [
    # kernel, card, config, D, dtype, (K aligned, V aligned), Triton, metadata.shared
    (V6, "rtx-3090", "64x16x1x4", 32, "bf16", (False, True), (3, 6), 7680),
    (V6, "rtx-4070-super", "16x32x8x2", 256, "bf16", (False, True), (3, 6), 40_960),
    (V0, "b200", "32x16x4x6", 24, "bf16", (False, True), (3, 6), 8192),
    (V0, "h200", "256x64x4x5", 80, "fp16", (False, True), (3, 9), 163_840),
    (V6, "h200", "256x64x8x3", 24, "bf16", (True, False), (3, 9), 32_768),
    (V0, "rtx-5090", "16x128x16x3", 24, "fp16", (True, False), (3, 9), 29_696),
    (V6, "a100", "16x16x4x5", 24, "fp32", (False, False), (3, 9), 19_584),
    (V6, "h200", "16x16x16x4", 16, "bf16", (True, True), (3, 9), 512),
    (V6, "b200", "64x128x4x3", 72, "fp16", (True, False), (3, 9), 181_248),
    (V0, "b200", "128x256x4x5", 40, "bf16", (False, False), (3, 9), 114_712),
    (V6, "b200", "256x64x8x4", 192, "fp16", (False, False), (3, 9), 229_400),
    (V0, "b200", "64x256x8x3", 24, "bf16", (False, False), (3, 9), 53_272),
    (V6, "b200", "128x128x8x4", 16, "bf16", (False, False), (3, 9), 16_408),
    (V6, "b200", "128x128x8x7", 80, "bf16", (True, False), (3, 9), 328_704),
    (V0, "b200", "64x256x8x3", 80, "bf16", (False, True), (3, 9), 279_568),
    (V0, "b200", "128x32x8x1", 40, "fp16", (True, True), (3, 8), 25_600),
    # One warp and rows of 16 fp32: V is turned round among its lanes, if no load of that shape is
    # aligned; with equal tiles Q is one.
    (V0, "rtx-4070-super", "64x128x1x1", 16, "fp32", (False, False), (3, 7), 6144),
    (V6, "rtx-4070-super", "16x64x1x1", 16, "fp32", (False, False), (3, 6), 3072),
    (V0, "h200", "32x16x1x1", 8, "fp32", (False, False), (3, 9), 3072),
    (V0, "rtx-4070-super", "256x256x1x1", 16, "fp32", (False, False), (3, 9), 32_768),
    # Through descriptors: how K and V lie does not matter.
    (V7, "h200", "128x64x8x1", 64, "bf16", (True, True), (3, 6), 32_776),
    (V7, "h200", "128x64x8x2", 64, "bf16", (True, True), (3, 9), 49_168),
    (V7, "h200", "64x32x2x1", 64, "bf16", (True, True), (3, 6), 8200),
    (V7, "h200", "32x64x4x3", 64, "bf16", (True, True), (3, 9), 36_896),
    (V7, "h200", "16x64x4x2", 64, "bf16", (True, True), (3, 9), 18_456),
    (V7, "h200", "256x32x16x4", 136, "fp32", (True, True), (3, 6), 524_344),
    (V7, "h200", "64x32x4x1", 128, "fp32", (True, True), (3, 9), 65_544),
    (V7, "b200", "64x64x8x3", 64, "bf16", (True, True), (3, 9), 58_464),
    (V7, "b200", "128x64x8x1", 64, "bf16", (True, True), (3, 9), 32_776),
    (V7, "b200", "128x32x8x3", 64, "fp32", (True, True), (3, 6), 98_912),
    (V7, "b200", "256x256x8x4", 256, "fp32", (True, True), (3, 6), 2_884_608),
    (V7, "b200", "64x32x4x3", 112, "fp32", (True, True), (3, 9), 164_864),
    (V7, "rtx-5090", "64x32x4x3", 64, "bf16", (True, True), (3, 9), 16_416),
    # By hand in Gluon: one, two and four warpgroups; a D that is padded; more barriers than a
    # descriptor takes, which then starts at a multiple of 128.
    (V9, "h200", "64x64x4x2", 64, "bf16", (True, True), (3, 9), 41_164),
    (V9, "h200", "128x64x4x2", 64, "bf16", (True, True), (3, 6), 49_416),
    (V9, "h200", "256x64x4x2", 64, "bf16", (True, True), (3, 9), 65_824),
    (V9, "h200", "64x16x4x1", 8, "bf16", (True, True), (3, 6), 3244),
    (V9, "h200", "64x256x4x3", 56, "fp16", (True, True), (3, 6), 205_036),
    (V9, "h200", "64x16x4x8", 16, "bf16", (True, True), (3, 9), 10_636),
    (V9, "h200", "64x16x4x9", 16, "bf16", (True, True), (3, 9), 11_788),
    (V9, "h200", "64x32x4x10", 16, "bf16", (True, True), (3, 6), 23_052),
    (V10, "h200", "128x128x4x2", 128, "bf16", (True, True), (3, 6), 196_904),
    (V10, "h200", "128x128x4x3", 128, "bf16", (True, True), (3, 9), 229_704),  # no second Q tile
    (V10, "h200", "256x64x4x3", 64, "bf16", (True, True), (3, 9), 115_040),
    (V10, "h200", "128x32x4x1", 40, "bf16", (True, True), (3, 6), 41_224),
]


@pytest.mark.parametrize(("kernel", "gpu", "config", "D", "dtype", "aligned", "triton", "shared"),
                         RECORDED)  # fmt: skip
def test_what_triton_said(
    kernel: Kernel, gpu: str, config: str, D: int, dtype: str, aligned: tuple[bool, bool],
    triton: tuple[int, int], shared: int,
) -> None:  # fmt: skip
    assert shared == bytes_of(
        config, problem(D, dtype), find_gpu(gpu), kernel, triton,
        aligned_k=aligned[0], aligned_v=aligned[1],
    )  # fmt: skip


def test_the_allocator_repeats_a_layout_that_took_a_second_colouring() -> None:
    """Sizes, alignments, lives and offsets of v0 64x64x4x7, fp16, D=24, sm_100, Triton 3.9."""
    recorded = [
        (4096, 512, 105, 254, 0),
        (16, 16, 116, 260, 16_384),
        (4096, 512, 135, 148, 4096),
        (4096, 512, 142, 256, 12_288),
        (8, 16, 145, 150, 8192),
        (4096, 512, 184, 256, 4096),
        (4096, 512, 209, 215, 8192),
        (8, 16, 212, 217, 16_400),
        (4096, 128, 273, 274, 0),
        (256, 128, 277, 278, 0),
    ]
    placed = place(
        [Buffer("", size, start, end, None, "", al) for size, al, start, end, _ in recorded]
    )
    assert [b.offset for b in placed] == [offset for *_, offset in recorded]
    assert total(placed) == 16_408


# What holds for every kernel ---------------------------------------------------------------------

lives = st.tuples(st.integers(0, 30), st.integers(1, 12))
some_buffers = st.lists(
    st.builds(
        lambda size, life, alignment: Buffer(
            "", size, life[0], life[0] + life[1], None, "", alignment
        ),
        st.integers(1, 5000), lives, st.sampled_from([16, 128, 1024]),
    ),
    max_size=12,
)  # fmt: skip


@given(some_buffers)
def test_placed_buffers_never_share_a_byte_while_both_live(given_buffers: list[Buffer]) -> None:
    placed = place(given_buffers)
    assert [dataclasses.replace(b, offset=None) for b in placed] == given_buffers
    for i, a in enumerate(placed):
        assert a.offset is not None
        assert a.offset % a.alignment == 0
        for b in placed[:i]:
            assert b.offset is not None
            apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
            assert apart or a.end <= b.start or b.end <= a.start
    for moment in {b.start for b in placed}:
        live = sum(b.bytes for b in placed if b.start <= moment < b.end)
        assert live <= total(placed)


problems = st.builds(
    Problem,
    st.just(4), st.just(8), st.just(8), st.just(4096), st.just(4096),
    st.integers(1, 32).map(lambda n: 8 * n), st.booleans(),
    st.sampled_from(["bf16", "fp16", "fp32"]),
)  # fmt: skip
tiles = st.sampled_from([16, 32, 64, 128, 256])
configs = st.builds(Config, tiles, tiles, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 7))
cards = list(known_gpus().values())
kernels_on_cards = [
    (card, kernel)
    for card in cards
    for kernel in KERNELS.values()
    if kernel.shared_modelled and not kernel.takes and (kernel.loads == "pointer" or has_tma(card))
]
cases = st.builds(
    lambda p, config, where, triton: (p, config, *where, triton),
    problems, configs, st.sampled_from(kernels_on_cards), st.sampled_from(TRITONS),
) | st.builds(
    lambda p, dtype, q_tile, config, triton: (
        dataclasses.replace(p, dtype=dtype),
        dataclasses.replace(config, q_tile=q_tile, num_warps=4), HOPPER, V9, triton,
    ),
    problems, st.sampled_from(["bf16", "fp16"]), st.sampled_from([64, 128, 256]), configs,
    st.sampled_from(TRITONS),
)  # fmt: skip
aligned = st.fixed_dictionaries({f"aligned_{letter}": st.booleans() for letter in "qkv"})


@settings(max_examples=600)
@given(cases, aligned)
def test_the_quick_answer_is_where_the_last_buffer_ends(case: Any, how: dict[str, bool]) -> None:
    """shared_bytes takes short cuts; the placed buffers and the printed sum must agree with it."""
    placed, shared, found = buffers(*case, **how), shared_bytes(*case, **how), terms(*case, **how)
    assert placed is not None
    assert found is not None
    assert shared == total(placed)
    assert shared == sum(term.bytes for term in found if term.counted)
    assert all(term.bytes > 0 and term.name and term.why for term in found)
    assert found[0].name.startswith("Q") or not any(t.name == "Q tile" for t in found if t.counted)


def test_the_quick_answer_on_every_tile_that_blackwell_pipelines() -> None:
    """The formulas for tensor memory, against the allocator, on the whole grid."""
    for kernel in (V0, V6):
        for D in (16, 32, 64, 128, 256):
            for q in (64, 128, 256):
                for k in (16, 32, 64, 128, 256):
                    for warps in (4, 8):
                        for stages in (1, 2, 3, 7):
                            case: Any = (
                                problem(D), Config(q, k, warps, stages), BLACKWELL, kernel, (3, 9),
                            )  # fmt: skip
                            placed = buffers(*case)
                            assert placed is not None
                            assert shared_bytes(*case) == total(placed), case


@given(cases, aligned, st.booleans())
def test_the_mask_changes_nothing(case: Any, how: dict[str, bool], causal: bool) -> None:
    masked = dataclasses.replace(case[0], causal=causal)
    assert shared_bytes(*case, **how) == shared_bytes(masked, *case[1:], **how)


@given(cases, aligned)
def test_every_buffer_fits_into_what_the_kernel_asks_for(case: Any, how: dict[str, bool]) -> None:
    placed = buffers(*case, **how)
    assert placed is not None
    for b in placed:
        assert b.offset is not None
        assert b.start < b.end
        assert 0 <= b.offset < b.offset + b.bytes <= total(placed)
