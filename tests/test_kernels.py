"""Every kernel of the ladder against SDPA and logsumexp: in the interpreter, and on a GPU."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreter_cases
import pytest
from attention_cases import LAYOUTS, VALUES, Case, Outcome, run_case
from conftest import once, subprocess_env

from flashtune.budget import assess, verdict
from flashtune.gpu import find_gpu
from flashtune.interpreter import check_arithmetic
from flashtune.kernels import KERNELS, load_kernel
from flashtune.records import Problem
from flashtune.space import parse_config

HERE = Path(__file__).resolve().parent
GPU_TOLERANCES = {"fp32": 1e-2, "bf16": 2e-2, "fp16": 1e-2}  # the articles'; fp32 rounds to TF32
ARTICLE_SHAPES = (
    (4, 128, 128, 64), (2, 1024, 1024, 64), (2, 100, 100, 64), (1, 37, 53, 32), (1, 200, 96, 128),
)  # fmt: skip


def assert_right(outcome: Outcome, tolerance: float, dtype: str) -> None:
    """Within the tolerance absolutely and relatively, as torch.testing.assert_close has it."""
    assert outcome.o_excess is not None, "O has a NaN or infinity"
    assert outcome.lse_excess is not None, "L has a NaN or infinity"
    assert outcome.o_excess <= tolerance
    assert outcome.lse_excess <= tolerance
    # SDPA's causal mask is the one written out: query i sees keys 0..i, square or not.
    assert outcome.mask_err is not None
    assert outcome.mask_err <= {"fp32": 1e-2, "fp16": 1e-2, "bf16": 5e-2}[dtype]
    assert outcome.stray_writes == 0, "something was stored outside O and L"


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Outcomes of all interpreter cases by name."""
    return once(tmp_path_factory, "interpreted", run_interpreter_cases)


def run_interpreter_cases(_: Path) -> dict[str, dict[str, Any]]:
    """In two processes that share them."""
    command = [sys.executable, str(HERE / "interpreter_cases.py")]
    env = subprocess_env(TRITON_INTERPRET="1")
    halves = [
        subprocess.Popen([*command, str(share), "2"], env=env, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for share in (0, 1)
    ]  # fmt: skip
    outcomes = {}
    for half in halves:
        out, err = half.communicate(timeout=300)
        assert half.returncode == 0, err[-3000:]
        for line in out.splitlines():
            record = json.loads(line)
            outcomes[record.pop("case")] = record
    return outcomes


@pytest.mark.parametrize("case", interpreter_cases.cases(), ids=str)
def test_interpreter(case: Case, interpreted: dict[str, dict[str, Any]]) -> None:
    record = dict(interpreted[str(case)])
    record.pop("seconds")
    tolerance = interpreter_cases.TOLERANCES[case.dtype]
    assert_right(Outcome(**record), tolerance, case.dtype)


def test_case_names_are_unique() -> None:
    names = [str(case) for case in interpreter_cases.cases()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.gluon])
def test_gluon_is_not_interpreted_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process that would fail at its first line."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("something was started"))
    problem = Problem(4, 8, 8, 4096, 4096, 64, True, "bf16")
    reason = f"{name} is Gluon, which Triton cannot interpret"
    assert check_arithmetic(KERNELS[name], [problem]) == {
        (problem, "fp16"): reason,
        (problem, "fp32"): reason,
    }


def source_of(kernel: str, function: str) -> str:
    """The function's source in the kernel's file, without importing triton."""
    text = KERNELS[kernel].path.read_text()
    (node,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )
    return ast.get_source_segment(text, node) or ""


def test_v6_is_v4_on_another_grid() -> None:
    """Each step of the ladder changes what it says it does. These two share the key loops, and the
    programs differ in nothing but which tile and head each takes."""
    v4, v6 = "v4_exp2", "v6_heads_first"
    assert source_of(v4, "attend_key_tiles") == source_of(v6, "attend_key_tiles")
    old, new = (source_of(kernel, "flash_fwd_kernel").splitlines() for kernel in (v4, v6))
    changed = [(a.strip(), b.strip()) for a, b in zip(old, new, strict=True) if a != b]
    assert changed == [
        (
            "q_start = tl.program_id(0) * Q_TILE_SIZE",
            "q_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * Q_TILE_SIZE",
        ),
        (
            "tl.program_id(1), H, heads_per_kv, Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,",
            "tl.program_id(0), H, heads_per_kv, Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,",
        ),
    ]


@pytest.mark.parametrize("name", ["Q", "K", "V", "O", "L"])
def test_last_stride_other_than_one_is_refused(name: str) -> None:
    import torch

    from flashtune.kernels.launch import arguments

    tensors = {n: torch.empty(1, 2, 32, 64) for n in "QKVO"} | {"L": torch.empty(1, 2, 32)}
    q, k, v, o, lse = tensors.values()
    arguments(q, k, v, o, lse, causal=False)
    tensors[name] = torch.empty(*tensors[name].shape, 2)[..., 0]  # same shape, last stride 2
    q, k, v, o, lse = tensors.values()
    with pytest.raises(ValueError, match=f"{name} has last stride 2"):
        arguments(q, k, v, o, lse, causal=False)


def test_descriptors_get_scratch_memory_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton asks for it at a launch, and a launch that nobody answers fails."""
    import torch
    from triton.runtime import _allocation

    load_kernel(KERNELS["v7_descriptor"])
    give = _allocation._allocator.get()
    empty = functools.partial(torch.empty, device="cpu")
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
    scratch = give(384, 128, None)
    assert (scratch.dtype, scratch.numel()) == (torch.int8, 384)


def test_last_stride_of_a_single_element_is_anything() -> None:
    import torch

    from flashtune.kernels.launch import arguments

    q = torch.empty(1, 2, 1, 64)
    lse = torch.empty_strided((1, 2, 1), (2, 1, 7))
    arguments(q, q, q, q, lse, causal=False)


ANY_CARD = tuple(name for name, kernel in KERNELS.items() if kernel.takes is None)


def gpu_cases() -> list[Case]:
    """Each compiles its own binary, about a second: the broad questions are asked of v6 alone."""
    shapes = [
        Case(kernel, batch, 1, 1, n, n_k, d, causal, dtype, config, layout)
        for kernel, (batch, n, n_k, d), causal, dtype in itertools.product(
            ANY_CARD, ARTICLE_SHAPES, (False, True), ("fp32", "bf16")
        )
        for config, layout in (("64x32x4x3", "contiguous"), ("16x16x4x3", "guarded"))
    ]
    dimensions = [
        Case("v6_heads_first", 2, 4, 2, 190, 150, d, True, dtype, "64x32x4x2", layout)
        for dtype, layout, dims in (
            ("bf16", "contiguous", range(8, 257, 8)),
            ("fp16", "guarded", (8, 40, 72, 96, 136, 256)),
            ("fp32", "packed", (8, 40, 72, 96, 136, 256)),
        )
        for d in dims
    ]
    layouts = [
        Case("v6_heads_first", 2, 8, kv_heads, 190, 150, d, causal, "bf16", "64x64x4x3", layout)
        for layout in LAYOUTS
        for d in (40, 64)
        for causal in (False, True)
        for kv_heads in ((8,) if layout == "three_axes" else (8, 2))
    ]
    through_tma = [
        Case("v7_descriptor", 2, 4, 2, 190, 150, d, causal, dtype, config, layout)
        for d in (8, 40, 72, 128, 136, 256)
        for causal, dtype in ((True, "bf16"), (False, "fp16"), (True, "fp32"))
        for config, layout in (
            ("64x32x4x2", "packed"), ("32x16x2x1", "transposed"), ("128x64x8x3", "guarded")
        )
    ]  # fmt: skip
    edges = [
        Case(kernel, 2, 2, 2, n, n_k, 64, causal, "bf16", "64x16x4x3")
        for kernel in ANY_CARD
        for n, n_k in EDGES
        for causal in (False, True)
    ]
    values = [
        Case(kernel, 2, 2, 2, 190, 150, 64, causal, "bf16", "64x32x4x3", values=values)
        for kernel in ANY_CARD
        for causal in (False, True)
        for values in VALUES[1:]
    ]
    return [*shapes, *dimensions, *layouts, *edges, *values, *through_tma]


EDGES = ((1, 1), (1, 300), (300, 1), (64, 64), (65, 64), (64, 65), (500, 60), (60, 500))


def ping_pong_cases(kernel: str) -> list[Case]:
    """The same questions of v9 and v10: in 16 bits, with one, two and four warpgroups, and a ring
    of one, two and three tiles. They alone have barriers of their own, so lengths go through every
    number of key tiles up to two rounds of the ring."""
    shapes = [
        Case(kernel, batch, 1, 1, n, n_k, d, causal, dtype, config, layout)
        for (batch, n, n_k, d), causal, dtype in itertools.product(
            ARTICLE_SHAPES, (False, True), ("bf16", "fp16")
        )
        for config, layout in (
            ("128x64x4x3", "contiguous"), ("64x64x4x2", "guarded"), ("256x64x4x2", "transposed")
        )
    ]  # fmt: skip
    dimensions = [
        Case(kernel, 2, 4, 2, 190, 150, d, causal, dtype, config, layout)
        for causal, dtype, config, layout, dims in (
            (True, "bf16", "128x32x4x2", "packed", range(8, 257, 8)),
            (False, "fp16", "64x64x4x1", "guarded", (8, 16, 24, 40, 72, 96, 136, 192, 256)),
            (True, "fp16", "64x32x4x3", "transposed", (8, 40, 64, 72, 128, 136, 256)),
        )
        for d in dims
    ]
    layouts = [
        Case(kernel, 2, 8, kv_heads, 190, 150, d, causal, "bf16", "128x64x4x3", layout)
        for layout in LAYOUTS
        if layout != "odd_rows"  # TMA reads no such rows: they are refused, below
        for d in (40, 64)
        for causal in (False, True)
        for kv_heads in ((8,) if layout == "three_axes" else (8, 2, 1))
    ]
    edges = [
        Case(kernel, 2, 2, 2, n, n_k, 64, causal, "bf16", config)
        for n, n_k in EDGES
        for causal in (False, True)
        for config in ("64x16x4x3", "128x64x4x2", "256x32x4x3", "128x128x4x1")
    ]
    tiles = [
        Case(kernel, 1, 2, 1, 257, n_k, 64, causal, "fp16", f"{q_tile}x64x4x{stages}")
        for q_tile in (64, 128, 256)
        for stages in (1, 2, 3)
        for n_k in (64, 130, 256, 320)
        for causal in (False, True)
    ]
    values = [
        Case(kernel, 2, 2, 2, 190, 150, 64, causal, "bf16", config, values=values)
        for causal in (False, True)
        for config in ("128x64x4x3", "256x64x4x2")
        for values in VALUES[1:]
    ]
    takes = KERNELS[kernel].takes
    assert takes is not None
    return [
        case
        for case in (*shapes, *dimensions, *layouts, *edges, *tiles, *values)
        if parse_config(case.config).q_tile in takes.q_tiles
    ]


def assert_right_on_the_gpu(case: Case) -> None:
    from triton.runtime.errors import OutOfResources

    tolerance = GPU_TOLERANCES[case.dtype]
    try:
        outcome = run_case(case, device="cuda", tolerance=tolerance)
    except OutOfResources:
        pytest.skip("this config does not fit this card at this head dimension")
    assert_right(outcome, tolerance, case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_gpu(case: Case) -> None:
    assert_right_on_the_gpu(case)


@pytest.fixture(scope="module")
def hopper() -> None:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for compute capability 9.0 alone")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", ping_pong_cases("v9_ping_pong"), ids=str)
def test_ping_pong_on_a_gpu(case: Case) -> None:
    assert_right_on_the_gpu(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", ping_pong_cases("v10_persistent"), ids=str)
def test_persistent_on_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the card had two multiprocessors, so that each program gets several items."""
    monkeypatch.setattr(load_kernel(KERNELS[case.kernel]), "multiprocessors", lambda device: 2)
    assert_right_on_the_gpu(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("config", ["128x64x4x2", "128x64x4x3"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "n"), [(1, 50), (2, 500), (9, 900)])
def test_persistent_with_as_many_programs_as_fit(
    config: str, causal: bool, batch: int, n: int
) -> None:
    """Fewer items than programs, about as many, and many more."""
    case = Case("v10_persistent", batch, 16, 4, n, n + 30, 128, causal, "bf16", config)
    assert_right_on_the_gpu(case)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("kernel_name", "config"),
    [
        *itertools.product(
            ("v9_ping_pong", "v10_persistent"), ("128x128x4x2", "256x64x4x3", "128x64x4x1")
        ),
        ("v9_ping_pong", "64x64x4x2"),
    ],
)
def test_ping_pong_gives_the_same_bits_each_time(kernel_name: str, config: str) -> None:
    """A warp that did not wait for another would show in some launch."""
    import torch

    from flashtune.kernels.launch import forward

    torch.manual_seed(0)
    q = torch.randn(2, 8, 2000, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 1500, 64, device="cuda", dtype=torch.bfloat16)
    kernel = KERNELS[kernel_name]
    answers = []
    for _ in range(64):
        o, lse = torch.full_like(q, torch.nan), torch.full((2, 8, 2000), torch.nan, device="cuda")
        function = load_kernel(kernel).flash_fwd_kernel
        forward(kernel, function, q, k, v, o, lse, True, parse_config(config))
        answers.append((o, lse))
    (first_o, first_lse), *others = answers
    assert not first_o.isnan().any() and not first_lse.isnan().any()
    assert all(torch.equal(o, first_o) and torch.equal(lse, first_lse) for o, lse in others)


@pytest.mark.parametrize("kernel", ["v9_ping_pong", "v10_persistent"])
def test_ping_pong_cases_are_ones_that_it_takes(kernel: str) -> None:
    """And all different: a case that the kernel refuses would be no test of it."""
    cases = ping_pong_cases(kernel)
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        p = Problem(case.B, case.H, case.H_kv, case.N, case.N_k, case.D, case.causal, case.dtype)
        budget = assess(
            p, parse_config(case.config), find_gpu("h200"), KERNELS[case.kernel], (3, 6)
        )
        assert budget.misfit is None and verdict(budget, find_gpu("h200"), exhaustive=True).kept


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ANY_CARD])
@pytest.mark.parametrize("off", ["rows", "address"])
def test_what_tma_cannot_read_is_refused_on_a_gpu(kernel: str, off: str) -> None:
    """And not answered wrong. The refusal comes before the kernel compiles."""
    import torch

    from flashtune.kernels.launch import forward

    wide = torch.randn(1, 2, 64, 72, device="cuda", dtype=torch.bfloat16)
    good = wide[..., :64]
    bad = torch.randn(1, 2, 64, 67, device="cuda", dtype=torch.bfloat16)[..., :64]
    if off == "address":
        bad = wide[..., 1:65]
    function = load_kernel(KERNELS[kernel]).flash_fwd_kernel
    o, lse = torch.full_like(good, torch.nan), torch.full((1, 2, 64), torch.nan, device="cuda")
    for at, name in enumerate("QKV"):
        inputs = [good, good, good]
        inputs[at] = bad
        with pytest.raises(ValueError, match=f"{name} has .*reads at multiples of 16 bytes"):
            forward(KERNELS[kernel], function, *inputs, o, lse, False, parse_config("128x64x4x2"))
    torch.cuda.synchronize()
    assert o.isnan().all() and lse.isnan().all()
