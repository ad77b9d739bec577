"""Tensors that 32-bit arithmetic cannot address, and what the check's references depend on."""

from __future__ import annotations

import pytest

from flashtune.kernels import KERNELS, load_kernel
from flashtune.space import parse_config

pytestmark = pytest.mark.gpu

N_BIG = 1 << 20
CONFIG = parse_config("64x64x4x3")  # one that every kernel takes but v10
CONFIG_OF_V10 = parse_config("128x64x4x3")
# Not v8: with the Tritons that there are, hardly any config of it can be relied on.
RELIABLE = [name for name in KERNELS if name != "v8_warp_specialised"]


def launch(kernel: str, q, k, v, causal: bool = False):  # type: ignore[no-untyped-def]
    import torch

    from flashtune.kernels.launch import forward

    o = torch.full_like(q, torch.nan)
    lse = torch.full(q.shape[:-1], torch.nan, device="cuda")
    function = load_kernel(KERNELS[kernel]).flash_fwd_kernel
    config = CONFIG_OF_V10 if kernel == "v10_persistent" else CONFIG
    forward(KERNELS[kernel], function, q, k, v, o, lse, causal, config)
    return o, lse


def assert_last_rows(q, k, v, o, lse, rows: int = 64) -> None:  # type: ignore[no-untyped-def]
    """The last rows of the last head, which lie farthest from the base pointer."""
    import torch
    import torch.nn.functional as F

    last = (slice(-1, None), slice(-1, None))
    some = q[last][:, :, -rows:].contiguous()
    keys, values = k[last].contiguous(), v[last].contiguous()
    expected = F.scaled_dot_product_attention(some, keys, values)
    torch.testing.assert_close(o[last][:, :, -rows:], expected, atol=2e-2, rtol=2e-2)
    scores = some.float() @ keys.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    torch.testing.assert_close(lse[last][:, :, -rows:], scores.logsumexp(-1), atol=2e-2, rtol=2e-2)
    assert not lse.isnan().any()


@pytest.fixture(autouse=True)
def on_a_card_that_it_takes(request: pytest.FixtureRequest) -> None:
    import torch

    takes = KERNELS[request.node.callspec.params["kernel"]].takes
    major, minor = torch.cuda.get_device_capability()
    if takes is not None and takes.cc != 10 * major + minor:
        pytest.skip("the kernel is written for another card")


def enough_memory(gigabytes: int) -> None:
    import torch

    if torch.cuda.mem_get_info()[0] < gigabytes << 30:
        pytest.skip(f"this card has no {gigabytes} GB free")


@pytest.mark.parametrize("kernel", RELIABLE)
def test_queries_of_more_than_2_to_the_31_elements(kernel: str) -> None:
    import torch

    enough_memory(16)
    q = torch.randn(1, 33, N_BIG, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 3, 128, 64, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    o, lse = launch(kernel, q, k, v)
    assert_last_rows(q, k, v, o, lse)


@pytest.mark.parametrize("kernel", RELIABLE)
def test_keys_of_more_than_2_to_the_31_elements(kernel: str) -> None:
    import torch

    enough_memory(24)
    q = torch.randn(1, 33, 64, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 33, N_BIG, 64, device="cuda", dtype=torch.bfloat16)
    o, lse = launch(kernel, q, k, v)
    assert_last_rows(q, k, v, o, lse)


@pytest.mark.parametrize("kernel", RELIABLE)
def test_rows_of_one_head_that_lie_2_to_the_31_elements_apart(kernel: str) -> None:
    """As in a model's (B, N, H, D) activations: the offset within a head needs 64 bits."""
    import torch

    enough_memory(20)
    q = torch.randn(1, N_BIG + 192, 32, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    k, v = torch.randn(2, 1, 32, 128, 64, device="cuda", dtype=torch.bfloat16)
    assert q.stride(2) * q.shape[2] > 2**31
    o, lse = launch(kernel, q, k, v)
    assert_last_rows(q, k, v, o, lse)


@pytest.mark.parametrize("kernel", [k for k in RELIABLE if KERNELS[k].takes is None])
def test_the_users_tf32_switch_changes_neither_answer_nor_reference(kernel: str) -> None:
    """fp32 kernels round their inputs to TF32 whatever torch is told; the references never do."""
    import torch

    from flashtune.check import random_inputs, references
    from flashtune.records import Problem

    problem = Problem(2, 2, 2, 190, 150, 64, True, "fp32")
    inputs = random_inputs(problem, "cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    answers, exact = [], []
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            answers.append(launch(kernel, inputs.q, inputs.k, inputs.v, causal=True))
            exact.append(references(problem, inputs))
            assert torch.backends.cuda.matmul.allow_tf32 == allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
    assert torch.equal(exact[0].o_fp32, exact[1].o_fp32)
    assert torch.equal(exact[0].lse, exact[1].lse)
    assert (answers[0][0] - exact[0].o_fp32).abs().max() < 1e-2
