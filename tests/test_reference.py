"""The tiled PyTorch forward against SDPA and logsumexp, on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.reference import tiled_attention


def whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """O by SDPA and L by torch.logsumexp, each on the whole score matrix."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal), scores.logsumexp(-1)


@settings(deadline=None)
@given(
    B=st.integers(1, 2), H_kv=st.integers(1, 2), group=st.integers(1, 3),
    N=st.integers(1, 70), N_k=st.integers(1, 70), D=st.sampled_from([1, 8, 40, 64]),
    causal=st.booleans(), q_tile=st.integers(1, 40), k_tile=st.integers(1, 40),
    scale=st.sampled_from([1e-3, 1.0, 40.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_sdpa_and_logsumexp(
    B: int, H_kv: int, group: int, N: int, N_k: int, D: int, causal: bool, q_tile: int,
    k_tile: int, scale: float, seed: int,
) -> None:  # fmt: skip
    """Odd sizes, tiles that divide nothing, unequal lengths, grouped heads, scores in the hundreds:
    in fp64, so that nothing but rounding may differ."""
    draw = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(B, group * H_kv, N, D, generator=draw, dtype=torch.float64)
    k = torch.randn(B, H_kv, N_k, D, generator=draw, dtype=torch.float64)
    v = torch.randn(B, H_kv, N_k, D, generator=draw, dtype=torch.float64)
    o, lse = tiled_attention(q, k, v, causal, q_tile, k_tile)
    expected_o, expected_lse = whole(q, k, v, causal)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:-1])
    torch.testing.assert_close(o, expected_o, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(lse, expected_lse, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_kept_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 64, dtype=dtype) for _ in range(3))
    o, lse = tiled_attention(q, k, v, causal=True)
    expected_o, expected_lse = whole(q.float(), k.float(), v.float(), causal=True)
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    # One rounding, of O to its dtype.
    torch.testing.assert_close(o, expected_o.to(dtype), atol=1e-5, rtol=torch.finfo(dtype).eps)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_inputs_without_a_batch_will_do() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16) for n in (20, 30, 30))
    o, lse = tiled_attention(q, k, v)
    flat_o, flat_lse = tiled_attention(q[0], k[0], v[0])
    assert torch.equal(o[0], flat_o)
    assert torch.equal(lse[0], flat_lse)
