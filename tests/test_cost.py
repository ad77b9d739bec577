"""The cost model: counts that are the profiler's, and times that behave as times must."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.budget import Budget, assess, verdict
from flashtune.cost import LIKELY_SPILLS, Cost, operations, order, predict
from flashtune.gpu import GpuSpec, find_gpu, known_gpus
from flashtune.kernels import KERNELS, Kernel
from flashtune.machine import CALIBRATED, Machine, clock_mhz, machine
from flashtune.operations import key_steps
from flashtune.records import Config, OutClass, Problem, Verdict
from flashtune.space import load_space, parse_config

ADA = find_gpu("rtx-4070-super")
H200 = find_gpu("h200")
V0, V6 = KERNELS["v0_baseline"], KERNELS["v6_heads_first"]
FULL = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
CAUSAL = dataclasses.replace(FULL, causal=True)
SPACE = load_space("article")

configs = st.sampled_from(SPACE)
gpus = st.sampled_from(list(known_gpus().values()))
kernels = st.sampled_from(list(KERNELS.values()))
problems = st.builds(
    lambda B, H, group, N, N_k, D, causal, dtype: Problem(
        B, H * group, H, N, N_k, D, causal, dtype
    ),
    st.integers(1, 4), st.integers(1, 8), st.integers(1, 4), st.integers(1, 5000),
    st.integers(1, 5000), st.sampled_from([16, 40, 64, 128, 256]), st.booleans(),
    st.sampled_from(["bf16", "fp16", "fp32"]),
)  # fmt: skip


def ms(problem: Problem, config: str, gpu: GpuSpec = ADA, kernel: Kernel = V6) -> float:
    return predicted(problem, config, gpu, kernel).predicted_ms


def predicted(problem: Problem, config: str, gpu: GpuSpec = ADA, kernel: Kernel = V6) -> Cost:
    return predict(problem, budget(problem, config, gpu, kernel), gpu, kernel)


def budget(problem: Problem, config: str | Config, gpu: GpuSpec, kernel: Kernel) -> Budget:
    parsed = parse_config(config) if isinstance(config, str) else config
    return assess(problem, parsed, gpu, kernel, (3, 6))


def judged(problem: Problem, gpu: GpuSpec, kernel: Kernel) -> tuple[list[Budget], list[Verdict]]:
    budgets = [budget(problem, config, gpu, kernel) for config in SPACE]
    return budgets, [verdict(b, gpu) for b in budgets]


# -- counts: the articles' profiler


@pytest.mark.parametrize(
    ("kernel", "config", "problem", "giga"),
    [
        (V0, "16x16x4x3", FULL, 206.2),  # Round 0: Q K^T is done twice
        (V0, "64x32x4x3", FULL, 137.4),  # Round 2
        (V0, "64x32x8x3", FULL, 274.9),  # Round 2, step 5
        (V0, "64x32x4x3", CAUSAL, 137.4),  # Round 2, step 6: every tile is visited
        (V6, "64x32x4x3", CAUSAL, 69.8),  # Round 4: tiles above the diagonal are not
        (V6, "64x128x4x2", CAUSAL, 70.9),  # the final profile
        (V6, "64x128x4x2", FULL, 137.4),
    ],
)
def test_tensor_operations_are_the_profiler_s(
    kernel: Kernel, config: str, problem: Problem, giga: float
) -> None:
    counted = operations(problem, parse_config(config), ADA, kernel)
    assert round(counted.tensor_executed / 1e9, 1) == giga
    assert round(counted.tensor_needed / 1e9, 1) == (68.7 if problem.causal else 137.4)


@pytest.mark.parametrize(
    ("config", "gigabytes", "steps"), [("16x16x4x3", 8.61, 2_097_152), ("64x32x4x3", 2.16, 262_144)]
)
def test_bytes_from_l2_are_the_profiler_s(config: str, gigabytes: float, steps: int) -> None:
    counted = operations(FULL, parse_config(config), ADA, V0)
    assert round(counted.l2_read_bytes / 1e9, 2) == gigabytes
    assert counted.key_steps == steps


def test_dram_moves_each_tensor_once() -> None:
    counted = operations(FULL, parse_config("64x32x4x3"), ADA, V0)
    assert round(counted.dram_read_bytes / 1e6, 1) == 50.3
    assert counted.dram_write_bytes == 4 * 8 * 4096 * (64 * 2 + 4)
    shared_heads = dataclasses.replace(FULL, H_kv=2)
    assert operations(shared_heads, parse_config("64x32x4x3"), ADA, V0).dram_read_bytes == (
        4 * 4096 * 128 * (8 + 2 + 2)
    )


@pytest.mark.parametrize(("config", "millions"), [("16x16x4x3", 545), ("64x32x4x3", 97)])
def test_shared_memory_wavefronts_are_near_the_profiler_s(config: str, millions: int) -> None:
    counted = operations(FULL, parse_config(config), ADA, V0)
    assert counted.shared_wavefronts / 1e6 == pytest.approx(millions, rel=0.1)


def test_the_causal_staircase_is_the_article_s() -> None:
    """Round 4: 4,032 tiles that every row sees and 128 on the diagonal, of 8,192."""
    steps = key_steps(CAUSAL, parse_config("64x32x4x3"), V6)
    assert (steps.total, steps.masked, steps.programs) == (4032 + 128, 128, 64)
    assert steps.longest_first[:2] == (128, 126)
    everything = key_steps(CAUSAL, parse_config("64x32x4x3"), V0)
    assert everything.total == 8192


@given(problems, configs, gpus, kernels)
def test_no_work_is_lost(problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel) -> None:
    counted = operations(problem, config, gpu, kernel)
    needed = 4.0 * problem.B * problem.H * problem.D
    if problem.causal:
        rows = range(problem.N)
        assert counted.tensor_executed >= needed * sum(min(row + 1, problem.N_k) for row in rows)
    else:
        assert counted.tensor_executed >= needed * problem.N * problem.N_k
    assert 0 <= counted.masked_steps <= counted.key_steps
    assert counted.repeats > 0


# -- times


@given(problems, configs, gpus, kernels)
def test_every_time_is_one(problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel) -> None:
    result = predict(problem, budget(problem, config, gpu, kernel), gpu, kernel)
    parts = result.parts
    assert math.isfinite(result.predicted_ms)
    assert result.predicted_ms > 0
    assert all(part >= 0 and math.isfinite(part) for part in parts)
    whole = parts.launch + parts.start + max(parts.units.values()) + parts.waiting + parts.tail
    assert result.predicted_ms == pytest.approx(whole)


@given(problems, configs, gpus, kernels)
def test_more_work_takes_no_less_time(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel
) -> None:
    def time(p: Problem) -> float:
        return predict(p, budget(p, config, gpu, kernel), gpu, kernel).predicted_ms

    at_most = time(problem) * 1.000001
    assert time(dataclasses.replace(problem, N_k=problem.N_k + 512)) * 1.000001 >= time(problem)
    assert at_most <= time(dataclasses.replace(problem, B=problem.B * 2)) * 1.0001
    if problem.causal and problem.N == problem.N_k and kernel is V0:
        assert time(dataclasses.replace(problem, causal=False)) == pytest.approx(time(problem))


@given(configs, gpus, st.booleans())
def test_faster_parts_never_slow_it_down(config: Config, gpu: GpuSpec, causal: bool) -> None:
    problem = dataclasses.replace(FULL, causal=causal)
    asked = budget(problem, config, gpu, V6)
    now = predict(problem, asked, gpu, V6).predicted_ms
    constants = machine(gpu)
    quicker: list[Machine] = [
        dataclasses.replace(constants, **{name: getattr(constants, name) * 2})
        for name in ("fp32_lanes", "special", "shared_bytes", "lsu_lanes", "l2_bytes")
    ]
    quicker += [
        dataclasses.replace(constants, **{name: getattr(constants, name) / 2})
        for name in CALIBRATED
        if name != "sharpness"
    ]
    for other in quicker:
        assert predict(problem, asked, gpu, V6, other).predicted_ms <= now * 1.000001


def test_the_articles_losers_lose_by_as_much() -> None:
    """v0 at N = 4096: 63.5 TFLOP/s by 64x32x4x3, 21.8 by 16x16x4x3, 33.0 with 8 warps."""
    best = ms(FULL, "64x32x4x3", kernel=V0)
    assert ms(FULL, "16x16x4x3", kernel=V0) / best == pytest.approx(63.5 / 21.8, rel=0.15)
    assert ms(FULL, "64x32x8x3", kernel=V0) / best == pytest.approx(63.5 / 33.0, rel=0.15)


@pytest.mark.parametrize(
    ("kernel", "problem", "config", "tflops"),
    [
        # Round 1's table and text: v0, N = 4096.
        (V0, FULL, "16x16x4x3", 21.8),
        (V0, FULL, "64x32x4x3", 63.5),
        (V0, FULL, "64x32x4x5", 61.9),
        (V0, FULL, "64x32x4x1", 57.9),
        (V0, FULL, "128x64x8x4", 61.9),
        (V0, FULL, "128x128x8x3", 60.5),
        (V0, FULL, "128x64x16x3", 30.7),
        # Round 5's: v4, whose loops are v6's.
        (V6, FULL, "64x128x4x2", 69.4),
        (V6, CAUSAL, "64x64x4x2", 63.5),
        (V6, dataclasses.replace(FULL, N=512, N_k=512), "64x32x4x4", 47.7),
        (V6, dataclasses.replace(FULL, N=1024, N_k=1024), "128x64x4x2", 59.9),
        (V6, dataclasses.replace(CAUSAL, N=1024, N_k=1024), "64x32x4x3", 46.6),
    ],
)
def test_a_card_that_nothing_was_calibrated_on(
    kernel: Kernel, problem: Problem, config: str, tflops: float
) -> None:
    """The articles' RTX 4070 SUPER, within 20% of what they measured."""
    measured = problem.flops / tflops * 1e-9
    assert ms(problem, config, ADA, kernel) == pytest.approx(measured, rel=0.2)


def test_what_won_there_is_near_the_front() -> None:
    """Round 5's winners are within 5% of the model's first choice at N = 4096."""
    costs = order(FULL, *judged(FULL, ADA, V6), ADA, V6)
    times = {str(c.config): c.predicted_ms for c in costs}
    for config in "64x32x4x3", "64x128x4x2", "128x64x4x2", "64x64x4x2", "64x64x4x3":
        assert times[config] <= 1.05 * costs[0].predicted_ms


def test_the_baseline_waits_for_shared_memory_and_the_tuned_one_for_tensor_cores() -> None:
    """What Nsight Compute said of both (Round 0, step 2; Round 2, step 4)."""
    slow = predicted(FULL, "16x16x4x3", kernel=V0).parts.units
    fast = predicted(FULL, "64x32x4x3", kernel=V0).parts.units
    assert max(slow, key=lambda name: slow[name]) == "shared"
    assert max(fast, key=lambda name: fast[name]) == "tensor"


def test_a_card_without_a_row_has_its_architecture_s_rate() -> None:
    unknown = dataclasses.replace(ADA, name="other", tensor_rates=None)
    assert ms(FULL, "64x32x4x3", unknown) > 0
    assert machine(dataclasses.replace(ADA, cc="12.1")) == machine(find_gpu("rtx-5090"))
    assert clock_mhz(unknown) == ADA.boost_clock_mhz


# -- the order


@pytest.mark.parametrize("gpu", known_gpus().values(), ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("problem", [FULL, CAUSAL], ids=["full", "causal"])
def test_hopeless_last_and_cannot_left_out(gpu: GpuSpec, problem: Problem) -> None:
    budgets, verdicts = judged(problem, gpu, V6)
    costs = order(problem, budgets, verdicts, gpu, V6)
    by_config = {b.config: v for b, v in zip(budgets, verdicts, strict=True)}
    can = [config for config, v in by_config.items() if v.out is not OutClass.CANNOT]
    assert sorted(c.config for c in costs) == sorted(can)
    hopeless = [not by_config[c.config].kept for c in costs]
    assert hopeless == sorted(hopeless)
    spills = {b.config: b.registers.spill_probability >= LIKELY_SPILLS for b in budgets}
    kept = [(spills[c.config], c.predicted_ms) for c in costs if by_config[c.config].kept]
    assert kept == sorted(kept)
    assert order(problem, budgets, verdicts, gpu, V6) == costs
    alone = predict(problem, next(b for b in budgets if b.config == can[0]), gpu, V6)
    assert alone in costs


def test_the_order_does_not_depend_on_the_order_it_was_asked_in() -> None:
    budgets, verdicts = judged(FULL, H200, V6)
    forwards = order(FULL, budgets, verdicts, H200, V6)
    backwards = order(FULL, budgets[::-1], verdicts[::-1], H200, V6)
    assert [c.predicted_ms for c in backwards] == [c.predicted_ms for c in forwards]


def test_the_register_estimate_is_near_the_articles_table() -> None:
    """Compiled for sm_89: 127, 146 and 207 registers; the cap holds the last two below."""
    for config, compiled in ("64x32x4x3", 127), ("128x64x8x4", 146), ("128x128x8x3", 207):
        registers = budget(FULL, config, ADA, V0).registers
        assert registers.low <= compiled <= registers.high
        assert registers.spill_probability < 0.5
