"""Registers and spills: what must hold for every prediction, and the compiler's own answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from command_line import CommandLine
from conftest import ROOT, stop_compile_pool
from hypothesis import given
from hypothesis import strategies as st

from flashtune.audit_registers import RegisterFinding, RegisterScore, audit, draw_fitting, score
from flashtune.budget import Budget, assess, verdict
from flashtune.cli.options import triton_version
from flashtune.gpu import find_gpu, known_gpus
from flashtune.kernels import KERNELS
from flashtune.records import Compiled, Config, OutClass, Problem, Status
from flashtune.space import load_space, parse_config
from flashtune.store import find, read

H200 = find_gpu("h200")
V6 = KERNELS["v6_heads_first"]
CARDS = st.sampled_from(list(known_gpus().values()))
SHAPES = st.sampled_from([(16, "bf16"), (64, "fp16"), (128, "bf16"), (128, "fp32"), (256, "fp32")])


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine.at(tmp_path, tmp_path_factory)


def hopper(config: str, D: int = 64, dtype: str = "bf16", causal: bool = False) -> Budget:
    problem = Problem(4, 8, 8, 4096, 4096, D, causal, dtype)
    return assess(problem, parse_config(config), H200, V6, (3, 6))


@given(CARDS, SHAPES, st.sampled_from(load_space("article")), st.booleans())
def test_a_prediction_is_within_what_a_thread_may_have(
    card: object, shape: tuple[int, str], config: Config, causal: bool
) -> None:
    problem = Problem(4, 8, 8, 1024, 1024, shape[0], causal, shape[1])
    budget = assess(problem, config, card, V6, (3, 9))  # type: ignore[arg-type]
    registers = budget.registers
    assert 0 < registers.low <= registers.expected <= registers.high <= budget.register_cap
    assert 0 < registers.spill_probability < 1
    twice = Config(2 * config.q_tile, config.k_tile, config.num_warps, config.num_stages)
    if config.num_warps * 16 <= config.q_tile and config.q_tile >= problem.padded_D:
        larger = assess(problem, twice, card, V6, (3, 9)).registers  # type: ignore[arg-type]
        if larger.wanted > registers.wanted:  # the same instructions, and more of everything
            assert larger.spill_probability >= registers.spill_probability


# ptxas, asked for sm_90 (Triton 3.6.0 and 3.9.0): what it wants for a config's widest wgmma.
REFUSED = [
    ("256x256x16x1", 64, "bf16", 154), ("256x256x16x1", 64, "fp32", 154),
    ("256x16x16x1", 256, "bf16", 154), ("256x32x16x2", 256, "bf16", 154),
    ("256x256x32x1", 64, "bf16", 154), ("256x64x32x1", 256, "bf16", 154),
]  # fmt: skip
TAKEN = [
    ("128x256x16x1", 64, "bf16"), ("64x256x16x3", 64, "bf16"), ("256x128x16x3", 64, "bf16"),
    ("128x32x16x1", 256, "bf16"), ("256x64x32x1", 128, "bf16"), ("256x256x8x1", 64, "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "D", "dtype", "wanted"), REFUSED[:4])
def test_what_ptxas_refuses_cannot(config: str, D: int, dtype: str, wanted: int) -> None:
    budget = hopper(config, D, dtype)
    answer = verdict(budget, H200, exhaustive=True)
    assert answer.out is OutClass.CANNOT and answer.rule == "wgmma_registers"
    assert f"{wanted} registers" in str(answer.reason) and "C7602" in str(answer.reason)


@pytest.mark.parametrize(("config", "D", "dtype"), TAKEN)
def test_what_ptxas_takes_is_not_said_to_be_refused(config: str, D: int, dtype: str) -> None:
    assert verdict(hopper(config, D, dtype), H200, exhaustive=True).rule != "wgmma_registers"


def test_the_recorded_refusals_are_the_predicted_ones() -> None:
    """Every row of the recorded sweeps that ptxas refused was foreseen, and no other."""
    seen = 0
    for path in find(ROOT / "sweeps"):
        file = read(path)
        if file.provenance.gpu != "h200" or not file.provenance.measured:
            continue
        kernel = KERNELS[file.provenance.kernel]
        for row in file.rows:
            if row.status in (Status.COMPILE_FAILED, Status.TIMED):
                budget = assess(row.problem, row.config, H200, kernel, (3, 6))
                rule = verdict(budget, H200, exhaustive=True).rule
                refused = "C7602" in str(row.reason)
                assert (rule == "wgmma_registers") == refused, row
                seen += refused
    assert seen >= 24


def test_spills_are_foreseen_on_the_recorded_sweeps() -> None:
    """As DESIGN.md says: recall over 80% and false alarms under 5% on the kernels that the weights
    were fitted to and v7, less on Hopper's own; and what is called certain is, on all."""
    spilled, clean = Counter[bool](), Counter[bool]()  # by whether the kernel is for Hopper alone
    recalled, alarms = Counter[bool](), Counter[bool]()
    certain = certainly = 0
    for path in find(ROOT / "sweeps"):
        file = read(path)
        kernel = KERNELS[file.provenance.kernel]
        for row in file.rows:
            if row.spills is None:
                continue
            p = assess(row.problem, row.config, H200, kernel, (3, 6)).registers.spill_probability
            own = kernel.takes is not None
            spilled[own] += row.spills > 0
            clean[own] += row.spills == 0
            recalled[own] += row.spills > 0 and p >= 0.5
            alarms[own] += row.spills == 0 and p >= 0.5
            certain += p >= 0.95
            certainly += p >= 0.95 and row.spills > 0
    assert recalled[False] >= 0.8 * spilled[False] and alarms[False] <= 0.05 * clean[False]
    assert (recalled[True], spilled[True], alarms[True], clean[True]) == (222, 456, 18, 1581)
    assert certain > 100 and certainly >= 0.98 * certain


def test_a_score_counts_what_it_says() -> None:
    ((case, _), *_) = draw_fitting(1, 1, [H200], (3, 6))

    def finding(config: str, regs: int | None, spills: int | None, reason: str = "",
                refusal: bool = False) -> RegisterFinding:  # fmt: skip
        compiled = Compiled(parse_config(config), regs=regs, spills=spills, reason=reason or None)
        return RegisterFinding(case, hopper(config), refusal, compiled)

    found = [
        finding("64x64x4x3", 128, 0),  # in range
        finding("64x64x4x3", 20, 0),  # not
        finding("64x64x4x3", 255, 8),  # spills, and nobody said so
        finding("256x256x8x1", 255, 100),  # said so
        finding("256x256x8x1", 200, 0),  # a false alarm
        finding("256x256x16x1", None, None, "ptxas fatal : (C7602) …", refusal=True),
    ]
    assert score(found) == RegisterScore(
        total=5, free=3, in_range=1, spilled=2, recalled=1, false_alarms=1, refused=1,
        refusals_predicted=1, wrong_refusals=0,
    )  # fmt: skip
    assert score(found).recall == 0.5 and score(found).false_alarm_rate == 1 / 3
    assert score([]).recall is None and score([]).false_alarm_rate is None


def test_the_sample_fits_and_is_the_seed_s() -> None:
    cards = list(known_gpus().values())
    drawn = draw_fitting(60, 5, cards, (3, 9))
    assert drawn == draw_fitting(60, 5, cards, (3, 9)) != draw_fitting(60, 6, cards, (3, 9))
    for case, budget in drawn:
        assert budget.shared is not None and budget.shared <= budget.shared_limit
        assert not case.odd_address and not case.odd_strides and case.config.num_stages <= 5


def test_this_triton_agrees_more_often_than_not() -> None:
    """A few configs compiled to the end: most registers in range, refusals foreseen."""
    cases = draw_fitting(8, 2, [H200, find_gpu("rtx-4090")], triton_version())
    case = cases[0][0]
    problem = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
    for config in ("256x256x16x1", "128x128x4x2"):
        known = type(case)(V6, problem, parse_config(config), H200)
        cases.append((known, assess(problem, known.config, H200, V6, triton_version())))
    try:
        found = score(audit(cases, 2))
    finally:
        stop_compile_pool()
    assert found.total + found.refused == 10
    assert found.in_range >= found.free / 2
    assert (found.refused, found.refusals_predicted, found.wrong_refusals) == (1, 1, 0)


def test_the_command_line_says_how_well(cli: CommandLine) -> None:
    done = cli.run("audit", "registers", "--samples", "3", "--gpu", "h200", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    scores = document["scores"]
    assert document["schema_version"] == 1 and set(scores) == {"9.0", "all"}
    assert scores["all"]["total"] + scores["all"]["refused"] == 3
