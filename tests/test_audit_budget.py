"""``flashtune audit budget``: the sample, what it compares, and the budget against this Triton."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandLine
from conftest import stop_compile_pool, subprocess_env
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashtune.audit_budget import (
    Case,
    _asked,
    audit,
    case_arguments,
    draw,
    is_aligned,
    predicted,
)
from flashtune.cli.options import triton_version
from flashtune.gpu import find_gpu, known_gpus
from flashtune.kernels import KERNELS, Kernel, find_kernel
from flashtune.records import Config, Problem, Status
from flashtune.space import parse_config

ADA = find_gpu("rtx-4070-super")
HOPPER, BLACKWELL = find_gpu("h200"), find_gpu("b200")
V0, V7 = KERNELS["v0_baseline"], KERNELS["v7_descriptor"]
V9 = KERNELS["v9_ping_pong"]


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine.at(tmp_path, tmp_path_factory)


def case(D: int = 64, odd_address: str = "", odd_strides: str = "") -> Case:
    problem = Problem(4, 8, 8, 4096, 4096, D, False, "bf16")
    return Case(V0, problem, parse_config("16x16x1x1"), ADA, odd_address, odd_strides)


def asked_of_v9(config: str, D: int) -> Case:
    return Case(V9, Problem(4, 8, 8, 4096, 4096, D, False, "bf16"), parse_config(config), HOPPER)


def test_the_same_seed_draws_the_same_sample_and_another_does_not() -> None:
    cards = list(known_gpus().values())
    assert draw(50, 1, cards) == draw(50, 1, cards)
    assert draw(50, 1, cards) != draw(50, 2, cards)
    assert draw(50, 1, cards)[:20] == draw(20, 1, cards)


def test_the_sample_reaches_every_corner() -> None:
    drawn = draw(2000, 1, list(known_gpus().values()))
    assert {c.gpu.cc for c in drawn} == {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}
    assert {c.kernel.name for c in drawn} == set(KERNELS)
    assert {c.problem.dtype for c in drawn} == {"bf16", "fp16", "fp32"}
    assert {c.problem.causal for c in drawn} == {True, False}
    assert {c.problem.D for c in drawn} == set(range(8, 257, 8))
    assert {c.config.q_tile for c in drawn} == {c.config.k_tile for c in drawn}
    assert {c.config.num_warps for c in drawn} == {1, 2, 4, 8, 16}
    assert {c.config.num_stages for c in drawn} == set(range(1, 8))
    assert {c.odd_address + c.odd_strides for c in drawn} == {"", "k", "v", "kv", "qkv"}
    for c in drawn:
        assert c.kernel.misfit(c.problem, c.config, c.gpu.cc_number) is None
    through_tma = [c for c in drawn if c.kernel is V7]
    assert {c.gpu.cc for c in through_tma} == {"9.0", "10.0", "12.0"}
    assert {c.odd_address + c.odd_strides for c in through_tma} == {""}


@pytest.mark.parametrize(
    ("asked", "aligned"),
    [
        (case(), (True, True)),
        (case(D=40), (True, True)),  # the launch tells the kernel that strides are multiples of 8
        (case(odd_address="k"), (False, True)),
        (case(odd_address="v"), (True, False)),
        (case(odd_strides="k"), (False, True)),
        (case(odd_strides="kv"), (False, False)),
        # An odd K takes the hint away from V too: it is one for all strides.
        (case(D=40, odd_strides="k"), (False, False)),
        (case(D=40, odd_address="k"), (False, True)),
    ],
)
def test_what_counts_as_aligned(asked: Case, aligned: tuple[bool, bool]) -> None:
    values = case_arguments(asked)
    assert (is_aligned(values, "k"), is_aligned(values, "v")) == aligned


def test_the_budget_is_exact_on_a_fresh_sample(cli: CommandLine) -> None:
    seed = str(random.SystemRandom().randrange(2**31))
    done = cli.run("audit", "budget", "--samples", "60", "--seed", seed, "--json")
    assert done.returncode == 0, (seed, done.stdout, done.stderr[-2000:])
    report = json.loads(done.stdout)
    assert report["schema_version"] == 1
    assert report["triton"].startswith(".".join(map(str, triton_version())))
    assert (report["misses"], report["refused"]) == ([], []), seed
    assert report["exact"] + report["not_modelled"] == report["total"] == 60
    drawn = draw(60, int(seed), list(known_gpus().values()))
    left_to_the_compiler = sum(not c.kernel.shared_modelled for c in drawn)
    assert left_to_the_compiler <= report["not_modelled"] <= left_to_the_compiler + 1
    assert report["seed"] == int(seed)
    assert not (cli.cache / "cache").exists()
    assert cli.left_behind() == {}


def test_descriptors_are_exact_on_a_fresh_sample() -> None:
    seed = random.SystemRandom().randrange(2**31)
    cards = [HOPPER, BLACKWELL, find_gpu("rtx-5090")]
    drawn = [c for c in draw(400, seed, cards) if c.kernel is V7][:30]
    assert len(drawn) >= 15
    try:
        report = audit(drawn, triton_version(), 2)
    finally:
        stop_compile_pool()
    assert [
        (str(f.case), f.predicted, f.compiled) for f in report.findings if f.kind != "exact"
    ] == []


def test_the_sample_may_be_of_one_kernel(cli: CommandLine) -> None:
    drawn = draw(300, 1, list(known_gpus().values()), [V9])
    assert {c.kernel.name for c in drawn} == {V9.name}
    assert {c.gpu.cc for c in drawn} == {"9.0"}
    assert {c.config.q_tile for c in drawn} == {64, 128, 256}
    assert {c.config.k_tile for c in drawn} == {16, 32, 64, 128, 256}
    assert {c.config.num_stages for c in drawn} == set(range(1, 8))
    assert {c.problem.dtype for c in drawn} == {"bf16", "fp16"}

    asked = ("audit", "budget", "--kernel", "v9_ping_pong", "--samples", "12")
    done = cli.run(*asked, "--json")
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])
    report = json.loads(done.stdout)
    assert (report["exact"], report["not_modelled"], report["refused"]) == (12, 0, []), report
    elsewhere = cli.run(*asked, "--gpu", "b200")
    assert elsewhere.returncode == 2
    assert "v9_ping_pong cannot run on b200" in elsewhere.stderr


def ping_pong_cases(kernel: Kernel, *lengths: int) -> st.SearchStrategy[Case]:
    """Of all that v9 or v10 takes; queries of all ``lengths``, more than one key."""
    assert kernel.takes is not None
    return st.builds(
        lambda heads, n, n_k, D, causal, dtype, config: Case(
            kernel, Problem(*heads, n, n_k, D, causal, dtype), config, HOPPER
        ),
        st.sampled_from([(1, 1, 1), (4, 8, 8), (1, 8, 2)]),
        st.sampled_from(lengths), st.sampled_from(lengths).filter(lambda n: n > 1),
        st.integers(1, 32).map(lambda n: 8 * n) | st.sampled_from([16, 32, 64, 128, 256]),
        st.booleans(), st.sampled_from(["bf16", "fp16"]),
        st.builds(
            Config,
            st.sampled_from(kernel.takes.q_tiles), st.sampled_from([16, 32, 64, 128, 256]),
            st.just(4), st.integers(1, 10), st.sampled_from([None, 80, 168]),
        ),
    )  # fmt: skip


def assert_exact(asked: Case) -> None:
    (finding,) = audit([asked], triton_version(), 1).findings
    assert (finding.kind, finding.predicted) == ("exact", finding.compiled), finding


def test_ping_pong_is_exact_over_all_that_it_takes() -> None:
    @settings(max_examples=25, deadline=None)
    @given(ping_pong_cases(V9, 1, 100, 4096, 2**23))  # the last: 64-bit offsets at a large D
    @example(asked_of_v9("64x16x4x9", 8))  # more barriers than a descriptor takes
    @example(asked_of_v9("128x16x4x1", 16))
    @example(asked_of_v9("256x256x4x5", 256))
    def check(asked: Case) -> None:
        assert_exact(asked)

    try:
        check()
    finally:
        stop_compile_pool()


def test_persistent_programs_are_exact_over_all_that_they_take() -> None:
    @settings(max_examples=25, deadline=None)
    @given(ping_pong_cases(KERNELS["v10_persistent"], 2, 100, 4096))
    def check(asked: Case) -> None:
        assert_exact(asked)

    try:
        check()
    finally:
        stop_compile_pool()


def test_with_one_key_ping_pong_takes_less_and_the_budget_says_nothing() -> None:
    for causal in (False, True):
        several = asked_of_v9("128x64x4x2", 64)
        one = replace(several, problem=replace(several.problem, N_k=1, causal=causal))
        try:
            ((_, compiled),) = _asked([one], 1)
        finally:
            stop_compile_pool()
        known = predicted(several, triton_version())
        assert compiled.shared is not None and known is not None and compiled.shared < known
        assert predicted(one, triton_version()) is None


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"odd_address": "k"}, "K has address 0x4"),
        ({"odd_strides": "v"}, "V has a stride of"),
        ({"odd_strides": "q", "odd_address": "q"}, "and address 0x4"),
    ],
)
@pytest.mark.parametrize("kernel", [k for k in KERNELS.values() if k.loads == "descriptor"])
def test_a_launch_that_tma_would_get_wrong_is_refused(
    kernel: Kernel, odd: dict[str, str], said: str
) -> None:
    """By the call that a launch makes, too: it fails before it compiles anything."""
    asked = Case(kernel, case().problem, parse_config("128x64x4x1"), HOPPER, **odd)
    try:
        ((_, compiled),) = _asked([asked], 1)
        (finding,) = audit([asked], triton_version(), 1).findings
    finally:
        stop_compile_pool()
    reason = str(compiled.reason)
    assert compiled.failure is Status.CRASHED
    assert said in reason and "reads at multiples of 16 bytes" in reason
    assert finding.kind == ("refused" if kernel.shared_modelled else "not modelled")


WRONG_MODEL = """
import sys
from flashtune import audit_budget
from flashtune.cli.app import main

right = audit_budget.predicted

def predicted(case, triton):
    answer = right(case, triton)
    if case.gpu.cc == "9.0" or answer is None:
        return None  # a case without a model
    return answer + 16 if case.problem.dtype == "fp32" else answer

if __name__ == "__main__":
    audit_budget.predicted = predicted
    sys.argv = ["flashtune", "audit", "budget", "--samples", "24", "--seed", "1", *sys.argv[1:]]
    main()
"""


def test_a_wrong_model_is_found_out(tmp_path: Path) -> None:
    script = tmp_path / "wrong_model.py"
    script.write_text(WRONG_MODEL)
    drawn = draw(24, 1, list(known_gpus().values()))
    unknown = [c for c in drawn if c.gpu.cc == "9.0" or not c.kernel.shared_modelled]
    off = [c for c in drawn if c.problem.dtype == "fp32" and c not in unknown]
    assert off and unknown

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), *more], cwd=tmp_path, env=subprocess_env(), text=True,
            capture_output=True,
        )  # fmt: skip

    done = run("--json")
    assert done.returncode == 1, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["total"] == 24
    assert report["not_modelled"] == len(unknown)
    assert report["exact"] == 24 - len(unknown) - len(off)
    assert [m["config"] for m in report["misses"]] == [str(c.config) for c in off]
    assert all(m["predicted"] == m["compiled"] + 16 for m in report["misses"])

    told = run()
    assert told.returncode == 1
    assert f"{len(off)} wrong" in told.stdout
    assert f"wrong: {off[0]}: predicted" in told.stdout
    assert "seed 1" in told.stdout


BROKEN = """
import triton
import triton.language as tl

BASED_ON = "v0_baseline"


@triton.jit
def flash_fwd_kernel({parameters}, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr):
    tl.static_assert(Q_TILE_SIZE == 0)
"""


def test_what_the_compiler_refuses_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN.format(parameters=", ".join(case_arguments(case()))))
    asked = Case(find_kernel(str(file)), case().problem, parse_config("16x16x1x1"), ADA)
    try:
        report = audit([asked, case()], triton_version(), 1)
    finally:
        stop_compile_pool()
    assert [finding.kind for finding in report.findings] == ["refused", "exact"]
    assert report.findings[0].reason is not None
    assert "static_assert" in report.findings[0].reason or "triton" in report.findings[0].reason


@pytest.mark.parametrize("option", [("--samples", "0"), ("--jobs", "0"), ("--gpu", "h2000")])
def test_wrong_options_are_named(cli: CommandLine, option: tuple[str, str]) -> None:
    done = cli.run("audit", "budget", *option)
    assert done.returncode == 2
    assert option[1] in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
