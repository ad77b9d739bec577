"""An attention kernel that flashtune knows nothing of, with parameter names of its own.

Run as a script under ``TRITON_INTERPRET=1``, it checks itself against SDPA on the CPU.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    scale,
    N_CTX,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """softmax(q k^T * scale) v for contiguous (batch * heads, N_CTX, HEAD_DIM) tensors."""
    first_row = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64) * N_CTX * HEAD_DIM
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    row_offsets = head + rows[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + row_offsets, mask=rows[:, None] < N_CTX, other=0.0)

    top = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in range(0, N_CTX, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        offsets = head + cols[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=cols[:, None] < N_CTX, other=0.0)
        v = tl.load(v_ptr + offsets, mask=cols[:, None] < N_CTX, other=0.0)
        seen = (cols < N_CTX)[None, :]
        if CAUSAL:
            seen = seen & (cols[None, :] <= rows[:, None])
        # Far below any score, yet finite: a tile that is wholly masked then yields no NaN, and
        # key 0, which every row sees, has already raised the maximum before such a tile comes.
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1.0e30)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - new_top[:, None])
        fade = tl.exp(top - new_top)
        total = total * fade + tl.sum(weights, axis=1)
        out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = new_top
    out = out / total[:, None]
    tl.store(out_ptr + row_offsets, out.to(out_ptr.dtype.element_ty), mask=rows[:, None] < N_CTX)


def run(
    kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, **options: int
) -> torch.Tensor:
    """Launches ``attend``, or an autotuned form of it, on contiguous (B, H, N, D) tensors."""
    batch, heads, length, dim = q.shape
    out = torch.empty_like(q)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return (triton.cdiv(length, meta["BLOCK_M"]), batch * heads)

    kernel[grid](
        q, k, v, out, dim**-0.5, N_CTX=length, HEAD_DIM=dim, CAUSAL=causal, **options
    )  # fmt: skip
    return out


def inputs(device: str, dtype: torch.dtype, length: int, dim: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(2, 2, length, dim, device=device, dtype=dtype, generator=generator)
        for _ in range(3)
    ]


def error(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> float:
    """The largest absolute difference from SDPA in fp32."""
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=causal
    )
    return float((out.float() - expected).abs().max())


def main() -> None:
    limits = {torch.float32: 1e-5, torch.float16: 2e-3}
    for (dtype, limit), causal, (length, tiles) in itertools.product(
        limits.items(), (False, True), ((32, (16, 16)), (45, (32, 16)), (45, (16, 32)))
    ):
        q, k, v = inputs("cpu", dtype, length, 16)
        out = run(attend, q, k, v, causal, BLOCK_M=tiles[0], BLOCK_N=tiles[1])
        worst = error(out, q, k, v, causal)
        assert worst < limit, (dtype, causal, length, tiles, worst)
    print("ok")


if __name__ == "__main__":
    main()
