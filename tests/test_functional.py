"""``flashtune.attention``: what it refuses, and its answers in the interpreter and on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import ROOT, subprocess_env

import flashtune
from flashtune import choose, functional
from flashtune.errors import FlashtuneError
from flashtune.gpu import find_gpu
from flashtune.records import Problem
from flashtune.space import parse_config
from flashtune.tuned import TunedList, Winner

# Those with Hopper's kernels.
BENCHES = sorted(
    path
    for pattern in ("h200_bench_hopper_*.json", "h200_bench_persistent_*.json")
    for path in (ROOT / "sweeps").glob(pattern)
)


def tensors(*shape: int, H_kv: int | None = None, **options: Any) -> list[torch.Tensor]:
    kv = shape if H_kv is None else (shape[0], H_kv, *shape[2:])
    return [torch.randn(s, **options) for s in (shape, kv, kv)]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configs that attention would launch with, on a card that is not there."""
    seen: list[Any] = []
    monkeypatch.setattr(functional, "forward", lambda *values: seen.append(values[-1]))
    monkeypatch.setattr(functional, "_gpu", lambda device: find_gpu("h200"))
    functional._choice.cache_clear()
    functional._warn_once.cache_clear()
    return seen


# What it chooses ----------------------------------------------------------------------------------


def timed(body: str, ms: float, config: str, causal: bool = False) -> TunedList:
    """A list of one shape that ``body`` was timed on."""
    shape = Problem(4, 8, 8, 1024, 1024, 64, causal, "bf16")
    found = parse_config(config)
    winner = Winner(shape, found, ms)
    return TunedList("h200", body, "bf16", 64, "2026-01-01 on one card", (found,), (winner,))


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> dict[str, TunedList]:
    """Tuned lists by kernel, in place of those that come with flashtune."""
    made: dict[str, TunedList] = {}

    def found(gpu: str, kernel: str, dtype: str, D: int) -> TunedList | None:
        return made.get(kernel) if (gpu, dtype, D) == ("h200", "bf16", 64) else None

    monkeypatch.setattr(choose, "tuned_list", found)
    functional._choice.cache_clear()
    return made


def chosen(*, tma_reads: bool = True, causal: bool = False, gpu: str = "h200") -> str:
    problem = Problem(2, 4, 4, 700, 700, 64, causal, "bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "_gpu", lambda device: find_gpu(gpu))
        kernel, config = functional._choice(problem, torch.device("cuda", 0), tma_reads)
    functional._choice.cache_clear()
    return f"{kernel.name} {config}"


def test_the_kernel_that_was_fastest_on_the_card_is_chosen(lists: dict[str, TunedList]) -> None:
    lists["v6_heads_first"] = timed("v6_heads_first", 0.3, "64x64x4x3")
    lists["v9_ping_pong"] = timed("v9_ping_pong", 0.2, "128x128x4x2")
    assert chosen() == "v9_ping_pong 128x128x4x2"
    lists["v9_ping_pong"] = timed("v9_ping_pong", 0.4, "128x128x4x2")
    assert chosen() == "v6_heads_first 64x64x4x3"


def test_kernels_are_compared_on_one_shape_alone(lists: dict[str, TunedList]) -> None:
    """A longer sequence runs at a higher rate: that of N=1024 says nothing at N=4096."""
    long = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
    v6 = timed("v6_heads_first", 0.03, "64x64x4x3")
    beside = Winner(long, parse_config("128x64x8x4"), 0.3)  # sixteen times the work, ten the time
    lists["v6_heads_first"] = replace(v6, winners=(beside,))
    lists["v9_ping_pong"] = timed("v9_ping_pong", 0.04, "128x128x4x2")
    assert chosen() == "v9_ping_pong 128x128x4x2"  # nobody else was timed on the nearest shape
    lists["v6_heads_first"] = replace(v6, winners=(*v6.winners, beside))
    assert chosen() == "v6_heads_first 64x64x4x3"


def test_what_triton_miscompiles_is_never_chosen(lists: dict[str, TunedList]) -> None:
    lists["v7_descriptor"] = timed("v7_descriptor", 0.3, "128x64x8x3")
    lists["v8_warp_specialised"] = timed("v8_warp_specialised", 0.1, "128x128x4x2")
    assert chosen() == "v7_descriptor 128x64x8x3"


def test_on_a_recorded_shape_a_kernel_is_chosen_that_the_bench_found_among_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists of sweeps on different days are compared: one in a hundred is within their noise."""
    monkeypatch.setattr(functional, "_gpu", lambda device: find_gpu("h200"))
    benched: dict[Problem, list[dict[str, float]]] = defaultdict(list)
    for path in BENCHES:
        for shape in json.loads(path.read_text())["shapes"]:
            rates = {kernel["name"]: kernel["tflops"] for kernel in shape["kernels"]}
            benched[Problem(**shape["problem"])].append(rates)
    for problem, benches in benched.items():
        kernel, _ = functional._choice(problem, torch.device("cuda", 0), True)
        with_it = [rates for rates in benches if kernel.name in rates]
        assert with_it, f"{kernel.name} was not timed on {problem}"
        assert all(rates[kernel.name] >= 0.96 * max(rates.values()) for rates in with_it), problem
    functional._choice.cache_clear()


def test_tensors_that_tma_cannot_read_get_pointers(lists: dict[str, TunedList]) -> None:
    lists["v6_heads_first"] = timed("v6_heads_first", 0.3, "64x64x4x3")
    lists["v9_ping_pong"] = timed("v9_ping_pong", 0.2, "128x128x4x2")
    assert chosen(tma_reads=False) == "v6_heads_first 64x64x4x3"
    q, k, v = (torch.zeros(2, 3, 8, 40, dtype=torch.bfloat16) for _ in range(3))
    assert functional._tma_reads(q, k, v)
    assert not functional._tma_reads(q, k, torch.zeros(2, 3, 8, 44, dtype=torch.bfloat16)[..., :40])
    assert not functional._tma_reads(
        q, torch.zeros(1000, dtype=torch.bfloat16)[1:641].view(2, 8, 40)
    )
    alone = torch.zeros(1, 1, 1, 44, dtype=torch.bfloat16)[..., :40]  # never stepped along
    assert functional._tma_reads(alone)


def test_where_nothing_was_timed_the_default_kernel_runs(lists: dict[str, TunedList]) -> None:
    with pytest.warns(UserWarning, match="measured nothing"):
        functional._warn_once.cache_clear()
        assert chosen(gpu="rtx-4090").startswith("v6_heads_first ")


# What it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k", "v", "said"),
    [
        ((2, 4, 32, 64), (4, 32, 64), (4, 32, 64), r"must all be \(B, H, N, D\) or"),
        ((32, 64), (32, 64), (32, 64), r"must all be \(B, H, N, D\) or"),
        ((2, 4, 32, 64), (2, 4, 32, 64), (2, 4, 33, 64), "k and v must have one shape"),
        ((2, 4, 32, 64), (2, 4, 32, 32), (2, 4, 32, 32), "one head dimension"),
        ((2, 4, 32, 64), (1, 4, 32, 64), (1, 4, 32, 64), "one batch size"),
        ((2, 4, 32, 64), (2, 3, 32, 64), (2, 3, 32, 64), "multiple of k's"),
        ((2, 2, 32, 64), (2, 4, 32, 64), (2, 4, 32, 64), "multiple of k's"),
        ((2, 4, 32, 64), (2, 4, 0, 64), (2, 4, 0, 64), "no axis may be empty"),
        ((2, 4, 32, 60), (2, 4, 32, 60), (2, 4, 32, 60), "multiple of 8 up to 256"),
        ((2, 4, 32, 264), (2, 4, 32, 264), (2, 4, 32, 264), "multiple of 8 up to 256"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        flashtune.attention(*(torch.empty(shape) for shape in (q, k, v)))
    assert str(q) in str(refused.value)
    assert str(v) in str(refused.value)


@pytest.mark.parametrize("dtypes", [("float64",) * 3, ("bfloat16", "bfloat16", "float32")])
def test_dtypes_that_will_not_do_are_refused(dtypes: tuple[str, ...]) -> None:
    mixed = [torch.empty(1, 1, 16, 16, dtype=getattr(torch, name)) for name in dtypes]
    with pytest.raises(TypeError, match=f"torch.{dtypes[0]}.*torch.{dtypes[2]}"):
        flashtune.attention(*mixed)


def test_devices_that_will_not_do_are_refused() -> None:
    q, k, v = tensors(1, 1, 16, 16)
    with pytest.raises(ValueError, match="are on cpu: move them to a CUDA device"):
        flashtune.attention(q, k, v)
    with pytest.raises(ValueError, match="one device: q is on cpu, k on meta, v on cpu"):
        flashtune.attention(q, k.to("meta"), v)


def test_gradients_are_refused_rather_than_lost(launches: list[Any]) -> None:
    q, k, v = tensors(1, 1, 16, 64, dtype=torch.bfloat16)
    v.requires_grad_()
    with pytest.raises(RuntimeError, match="no backward pass"):
        flashtune.attention(q, k, v)
    assert launches == []
    with torch.no_grad():
        flashtune.attention(q, k, v)
    flashtune.attention(q, k, v.detach())
    assert len(launches) == 2


def test_a_last_stride_other_than_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_gpu", lambda device: find_gpu("h200"))
    q, k, v = tensors(1, 2, 64, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="K has last stride 64"):
        flashtune.attention(q, k.transpose(-1, -2), v)


# What it launches ---------------------------------------------------------------------------------


def test_the_config_is_the_tuned_list_s(launches: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for causal in (False, True):
            flashtune.attention(*tensors(1, 1, 1024, 64, dtype=torch.bfloat16), causal)
        flashtune.attention(*tensors(1, 1024, 64, dtype=torch.float16))
        wide = torch.zeros(1, 1024, 68, dtype=torch.bfloat16)[..., :64]  # rows TMA cannot read
        flashtune.attention(wide, wide, wide)
    # v9's, whose list is that of the other 16-bit dtype too, and v6's.
    assert list(map(str, launches)) == [
        "256x64x4x3", "64x64x4x1:maxnreg=80", "256x64x4x3", "128x64x8x4",
    ]  # fmt: skip


def test_a_config_of_one_s_own(launches: list[Any]) -> None:
    flashtune.attention(*tensors(1, 1, 64, 96), config="32x64x2x2")
    assert list(map(str, launches)) == ["32x64x2x2"]
    with pytest.raises(FlashtuneError, match="not of the form"):
        flashtune.attention(*tensors(1, 1, 64, 96), config="32x64")


def test_an_unmeasured_card_warns_once(launches: list[Any]) -> None:
    for N in (64, 128):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flashtune.attention(*tensors(1, 1, N, 96, dtype=torch.bfloat16))
        said = [str(warning.message) for warning in caught]
        if N == 64:
            assert len(said) == 1
            assert "measured nothing for bf16 at D=96" in said[0]
            assert "flashtune sweep --both --dtype bf16 --D 96" in said[0]
            assert caught[0].filename == __file__
        else:
            assert said == []
    assert len(launches) == 2


def test_o_keeps_the_layout_of_q(launches: list[Any]) -> None:
    """So that a model's (B, N, H, D) activations can be read on as they are."""
    activations = torch.randn(2, 32, 4, 64, dtype=torch.bfloat16)
    q = activations.transpose(1, 2)
    o, lse = flashtune.attention(q, q, q, return_lse=True)
    assert o.stride() == q.stride()
    assert (lse.shape, lse.dtype) == ((2, 4, 32), torch.float32)
    plain = flashtune.attention(q, q, q)
    assert isinstance(plain, torch.Tensor)
    packed = torch.randn(2, 32, 3, 4, 64, dtype=torch.bfloat16)[:, :, 1].transpose(1, 2)
    assert flashtune.attention(packed, packed, packed).stride()[-1] == 1
    expanded = torch.randn(1, 1, 32, 64, dtype=torch.bfloat16).expand(2, 4, 32, 64)
    assert flashtune.attention(expanded, expanded, expanded).is_contiguous()


def test_import_flashtune_loads_nothing_and_the_name_stays_a_function() -> None:
    code = """
import json, sys
import flashtune
light = "torch" not in sys.modules
first, second = flashtune.attention, flashtune.attention
import flashtune.functional
print(json.dumps([light, callable(first), first is second is flashtune.attention]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=subprocess_env(), text=True, capture_output=True,
        check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [True, True, True]
    with pytest.raises(AttributeError, match="no attribute 'attenton'"):
        _ = flashtune.attenton


# Its answers --------------------------------------------------------------------------------------

# (q's shape, k's and v's, causal)
SHAPES = [
    ((1, 2, 50, 64), (1, 2, 50, 64), True),
    ((2, 4, 20, 40), (2, 2, 33, 40), False),
    ((2, 4, 33, 40), (2, 1, 20, 40), True),
    ((6, 20, 16), (2, 20, 16), True),  # three axes: heads 0 to 2 read key head 0
    ((3, 1, 8), (3, 17, 8), False),
]

ANSWERS = """
import json, sys, torch
import flashtune
from flashtune.reference import tiled_attention

device, tolerance = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
for q_shape, kv_shape, causal in json.loads(sys.argv[3]):
    for dtype in (torch.float32, torch.float16):
        q, k, v = (torch.randn(s, device=device).to(dtype) for s in (q_shape, kv_shape, kv_shape))
        o, lse = flashtune.attention(q, k, v, causal, return_lse=True)
        expected_o, expected_lse = tiled_attention(q.float(), k.float(), v.float(), causal)
        torch.testing.assert_close(o.float(), expected_o, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)
        assert torch.equal(flashtune.attention(q, k, v, causal), o)
        print("right")
"""


def answers(device: str, tolerance: float, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ANSWERS, device, str(tolerance), json.dumps(SHAPES)],
        env=subprocess_env(**env), text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_interpreted_answers_are_the_reference_s() -> None:
    assert answers("cpu", 2e-3, TRITON_INTERPRET="1") == ["right"] * 2 * len(SHAPES)


@pytest.mark.gpu
def test_answers_on_a_gpu_are_the_reference_s() -> None:
    assert answers("cuda", 1e-2) == ["right"] * 2 * len(SHAPES)


@pytest.mark.gpu
def test_more_heads_than_a_grid_axis_holds_run_on_a_gpu() -> None:
    """Heads are on axis 0, which takes 2**31 - 1 of them."""
    q, k, v = (torch.randn(70_000, 32, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    o = flashtune.attention(q, k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(o, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_a_second_gpu_gets_its_own_launch() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (torch.randn(1, 4, 200, 64, device="cuda:1", dtype=torch.bfloat16) for _ in range(3))
    o = flashtune.attention(q, k, v, True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected, atol=2e-2, rtol=2e-2)


def test_sizes_for_which_nothing_can_launch_are_refused(launches: list[Any]) -> None:
    """Query tiles are on axis 1, which takes 65,535: even 256 rows a tile are too few here."""
    functional._choice.cache_clear()
    problem = Problem(1, 1, 1, 65_536 * 256, 64, 64, False, "bf16")
    with pytest.raises(FlashtuneError, match="programs on grid axis 1"):
        functional._choice(problem, torch.device("cuda", 0), False)
    fits = replace(problem, N=65_535 * 64)
    assert functional._choice(fits, torch.device("cuda", 0), False)[1].q_tile >= 64
