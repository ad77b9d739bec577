"""One launch, and the same launch with nothing behind it, which is how the compiler is asked.

Both go through :func:`arguments`, so that a binary compiled ahead is the one the launch looks up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashtune.kernels import Kernel
from flashtune.records import Config, Problem

if TYPE_CHECKING:
    import torch


class TensorLike(Protocol):
    """What a launch reads of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...
    def stride(self) -> tuple[int, ...]: ...
    def data_ptr(self) -> int: ...


@dataclass(frozen=True)
class AbsentTensor:
    """A contiguous tensor that does not exist: Triton reads its dtype and alignment, no more.

    ``dtype`` is a name such as ``bfloat16``; the base address counts as 16-byte aligned, as every
    fresh torch tensor's is.
    """

    shape: tuple[int, ...]
    dtype: str

    def stride(self) -> tuple[int, ...]:
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return tuple(reversed(strides))

    def data_ptr(self) -> int:
        return 0

    def ptr_range(self) -> int:
        return 0


DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def absent_arguments(problem: Problem) -> dict[str, Any]:
    """What a launch of the problem passes, with Q, K, V, O (its dtype) and L (fp32) absent."""
    dtype = DTYPE_NAMES[problem.dtype]
    q = AbsentTensor((problem.B, problem.H, problem.N, problem.D), dtype)
    kv = AbsentTensor((problem.B, problem.H_kv, problem.N_k, problem.D), dtype)
    lse = AbsentTensor((problem.B, problem.H, problem.N), "float32")
    return arguments(q, kv, kv, q, lse, problem.causal)


def arguments(
    q: TensorLike, k: TensorLike, v: TensorLike, o: TensorLike, lse: TensorLike, causal: bool
) -> dict[str, Any]:
    """The kernel's arguments by name, but for the config. Q and O are (B, H, N, D), K and V
    (B, H_kv, N_k, D), last stride 1; L is (B, H, N) fp32, last stride 1."""
    for name, tensor in (("Q", q), ("K", k), ("V", v), ("O", o), ("L", lse)):
        if tensor.stride()[-1] != 1 and tensor.shape[-1] != 1:
            raise ValueError(f"{name} has last stride {tensor.stride()[-1]}; the kernels need 1")
    (_, H, N, D), (_, H_kv, N_k, _) = q.shape, k.shape
    # An axis of size 1 is never stepped along, and its stride may be anything: it counts as 0.
    strides = {}
    for letter, axes, tensor in (
        ("q", "bhq", q),
        ("k", "bhk", k),
        ("v", "bhk", v),
        ("o", "bhq", o),
    ):
        for axis, size, stride in zip(axes, tensor.shape, tensor.stride(), strict=False):
            strides[f"stride_{letter}{axis}"] = stride if size > 1 else 0
    # Triton finds multiples of 16 by itself; only where that fails does it need to be told.
    multiple_of = {n for n in (8, 16) if all(stride % n == 0 for stride in strides.values())}
    needs_hint = multiple_of == {8}
    last_row = max(N, N_k) + 512  # a tile may reach past the tensor, by less than the largest tile
    wide = max(strides[f"stride_{axis}"] for axis in ("qq", "kk", "vk", "oq")) * last_row >= 2**31
    return {
        "Q_ptr": q, "K_ptr": k, "V_ptr": v, "O_ptr": o, "L_ptr": lse,
        **strides,
        "stride_lb": lse.stride()[0], "stride_lh": lse.stride()[1],
        "H": H, "heads_per_kv": H // H_kv, "N_QUERIES": N, "N_KEYS": N_k,
        "scale": 1.0 / math.sqrt(D),
        "D": D, "PADDED_D": max(16, 1 << (D - 1).bit_length()),
        "STRIDES_OF_8": needs_hint, "WIDE": wide,
        "is_causal": causal,
    }  # fmt: skip


def config_arguments(config: Config) -> dict[str, Any]:
    """What the config sets, of the kernel's parameters and the launch's options; and the option
    that every launch has: Triton 3.10 turns fused multiply-adds off by default.

    An axis that is left open is not passed at all, so that such a launch keeps its cache key.
    """
    further = {"maxnreg": config.maxnreg, "WARP_SPECIALIZE": config.warp_specialize}
    return {
        "Q_TILE_SIZE": config.q_tile,
        "K_TILE_SIZE": config.k_tile,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
        **{name: value for name, value in further.items() if value is not None},
    }


def grid(kernel: Kernel, B: int, H: int, N: int, q_tile: int) -> tuple[int, int]:
    """Programs on the two grid axes."""
    tiles = -(-N // q_tile)
    return (B * H, tiles) if kernel.heads_first else (tiles, B * H)


def forward(
    kernel: Kernel,
    jit_function: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    config: Config,
) -> None:
    """Launch once: fills ``o`` (like ``q``) and ``lse`` (fp32, ``q`` without its last axis).

    Tensors are (B, H, N, D), or (B*H, N, D) as in the articles. Raises what Triton raises.
    """
    if q.ndim == 3:
        q, k, v, o, lse = (t.unsqueeze(0) for t in (q, k, v, o, lse))
    B, H, N, _ = q.shape
    jit_function[grid(kernel, B, H, N, config.q_tile)](
        **arguments(q, k, v, o, lse, causal), **config_arguments(config)
    )
