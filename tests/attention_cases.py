"""Attention cases for the kernels, with inputs on poisoned storage and an explicit reference.

Used in the interpreter (interpreter_cases.py) and on a GPU (test_kernels.py). Importing this file
imports neither torch nor triton: the interpreter's switch must be set before triton is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flashtune.records import Config

VALUES = ("normal", "large", "equal", "one_key", "zeros")
LAYOUTS = ("contiguous", "guarded", "transposed", "odd_rows", "packed", "three_axes")


@dataclass(frozen=True)
class Case:
    kernel: str
    B: int
    H: int
    H_kv: int
    N: int
    N_k: int
    D: int
    causal: bool
    dtype: str
    config: str
    layout: str = "guarded"
    values: str = "normal"

    def __str__(self) -> str:
        heads = f"H{self.H}" if self.H == self.H_kv else f"H{self.H}over{self.H_kv}"
        mask = "causal" if self.causal else "full"
        return (
            f"{self.kernel}-B{self.B}-{heads}-{self.N}x{self.N_k}-D{self.D}-{mask}-{self.dtype}"
            f"-{self.config}-{self.layout}" + ("" if self.values == "normal" else f"-{self.values}")
        )


@dataclass(frozen=True)
class Outcome:
    """Largest errors; None where a NaN or infinity took a value's place."""

    o_err: float | None  # |O - SDPA|
    o_excess: float | None  # |O - SDPA| - tolerance * |SDPA|, to hold against an absolute one
    lse_excess: float | None  # the same for L against logsumexp
    mask_err: float | None  # SDPA against softmax under an explicit mask: the convention itself
    stray_writes: int  # elements changed outside O and L


def _poisoned(
    case: Case, heads: int, rows: int, dtype: torch.dtype, device: str, fill: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A (B, heads, rows, D) view in the case's layout and the NaN-filled storage it lies in.

    ``fill``: the view gets random values. What lies around it stays NaN, so that a load past the
    tensor that is not masked shows in the result, and a store past it shows in the storage.
    """
    import torch

    B, D = case.B, case.D

    def nans(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    if case.layout in ("contiguous", "three_axes"):
        storage = nans(B, heads, rows, D)
        view = storage
    elif case.layout == "guarded":  # rows follow each head that belong to nobody
        storage = nans(B, heads, rows + 40, D)
        view = storage[:, :, :rows]
    elif case.layout == "transposed":  # as a model's (B, N, H, D) activations
        storage = nans(B, rows + 40, heads, D)
        view = storage[:, :rows].transpose(1, 2)
    elif case.layout == "odd_rows":  # no row but the first is 16-byte aligned
        storage = nans(B, heads, rows + 40, D + 3)
        view = storage[:, :, :rows, :D]
    elif case.layout == "packed":  # one slice of a fused (B, N, 3, H, D) projection
        storage = nans(B, rows + 40, 3, heads, D)
        view = storage[:, :rows, 1].transpose(1, 2)
    else:
        raise ValueError(case.layout)
    if fill:
        view.copy_(torch.randn(view.shape, device=device).to(dtype))
    return view, storage


def _set_values(values: str, q: torch.Tensor, k: torch.Tensor) -> None:
    """Inputs on which a running softmax goes wrong where it is careless."""
    if values == "large":  # scores of some hundreds: exp of anything but a difference overflows
        q *= 8
        k *= 8
    elif values == "equal":  # every row of scores has one value: O is the mean of V
        k.copy_(k[:, :, :1].expand_as(k))
    elif values == "one_key":  # the last key outweighs all before it: every rescale goes to zero
        q.abs_()
        k[:, :, -1] = 16
    elif values == "zeros":
        q.zero_()
    else:
        assert values == "normal", values


def run_case(case: Case, device: str, tolerance: float) -> Outcome:
    """Launch the case's kernel once and compare O with SDPA, and L with logsumexp."""
    import torch
    import torch.nn.functional as F

    from flashtune.kernels import find_kernel, load_kernel
    from flashtune.kernels.launch import forward
    from flashtune.space import parse_config

    torch.manual_seed(0)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[case.dtype]
    q, _ = _poisoned(case, case.H, case.N, dtype, device, fill=True)
    k, _ = _poisoned(case, case.H_kv, case.N_k, dtype, device, fill=True)
    v, _ = _poisoned(case, case.H_kv, case.N_k, dtype, device, fill=True)
    _set_values(case.values, q, k)
    o, o_storage = _poisoned(case, case.H, case.N, dtype, device, fill=False)
    lse_storage = torch.full((case.B, case.H, case.N + 40), float("nan"), device=device)
    lse = lse_storage[:, :, : case.N]

    kernel = find_kernel(case.kernel)
    config: Config = parse_config(case.config)
    tensors = (q, k, v, o, lse)
    if case.layout == "three_axes":
        tensors = tuple(t.reshape(-1, *t.shape[2:]) for t in (q, k, v, o))
        flat_lse = torch.full((case.B * case.H, case.N), float("nan"), device=device)
        tensors = (*tensors, flat_lse)
        lse, lse_storage = flat_lse.view(case.B, case.H, case.N), flat_lse
    forward(kernel, load_kernel(kernel).flash_fwd_kernel, *tensors, case.causal, config)

    group = case.H // case.H_kv
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    # On copies: torch 2.11's SDPA itself reads what lies beside rows that are not 16-byte aligned.
    q, k, v = (t.contiguous() for t in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    exact, expected_lse = _explicit(q.float(), k.float(), v.float(), case.causal)
    gap = (o.float() - expected.float()).abs()
    stray = (~o_storage.isnan()).sum() - (~o.isnan()).sum()
    stray += (~lse_storage.isnan()).sum() - (~lse.isnan()).sum()
    return Outcome(
        o_err=_finite(gap.max()),
        o_excess=_finite((gap - tolerance * expected.float().abs()).max()),
        lse_excess=_finite(((lse - expected_lse).abs() - tolerance * expected_lse.abs()).max()),
        mask_err=_finite((expected.float() - exact).abs().max()),
        stray_writes=int(stray),
    )


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L by the definition: query i sees keys 0..i, whatever the two lengths."""
    import torch

    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        rows = torch.arange(q.shape[-2], device=q.device)[:, None]
        keys = torch.arange(k.shape[-2], device=q.device)[None, :]
        scores = scores.masked_fill(keys > rows, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _finite(value: torch.Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None
