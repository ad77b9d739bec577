"""One launch against the references: O against SDPA and an fp32 reference, L against logsumexp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from flashtune.records import Problem
from flashtune.results import Check

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE = {"bf16": 2e-2, "fp16": 1e-2, "fp32": 1e-2}
"""Absolute and relative, the articles'. fp32 is loose because tl.dot runs it as TF32."""
LSE_TOLERANCE = 5e-3
"""Absolute. Tighter than the articles', since L is fp32 whatever the inputs are: keys that should
not vote, 3 in 1,000, show in L even where fp32's loose tolerance would let them pass in O."""
SDPA_ERROR_FACTOR = 2.0
"""In 16 bits, our error against the fp32 reference may be at most this many times SDPA's own."""
GUARD_ROWS = 512
"""Rows of NaN behind each head: the largest tile, and a multiple of 16, so that the strides keep
their divisibility and a guarded launch runs the very binary that is timed."""
_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True)
class Inputs:
    """Q (B, H, N, D), K and V (B, H_kv, N_k, D) in the problem's dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class References:
    """What one problem's outputs are compared with; made once for all its configs."""

    problem: Problem
    o_sdpa: torch.Tensor  # (B, H, N, D) in the problem's dtype
    o_fp32: torch.Tensor  # (B, H, N, D) fp32
    lse: torch.Tensor  # (B, H, N) fp32, natural log
    sdpa_abs_err: float  # max |o_sdpa - o_fp32|


def random_inputs(problem: Problem, device: str) -> Inputs:
    """Fresh standard-normal inputs: a new draw at every call, from torch's own seed."""
    dtype = TORCH_DTYPES[problem.dtype]
    q_shape = (problem.B, problem.H, problem.N, problem.D)
    kv_shape = (problem.B, problem.H_kv, problem.N_k, problem.D)
    q, k, v = (
        torch.randn(shape, device=device, dtype=dtype) for shape in (q_shape, kv_shape, kv_shape)
    )
    return Inputs(q, k, v)


@dataclass(frozen=True)
class Outputs:
    """O (B, H, N, D) and L (B, H, N) inside larger tensors, so that stray stores can be seen."""

    o: torch.Tensor
    lse: torch.Tensor
    o_with_guards: torch.Tensor
    lse_with_guards: torch.Tensor

    def poison(self) -> None:
        """Fill with NaN, so that what a kernel does not write cannot pass for an answer."""
        self.o_with_guards.fill_(math.nan)
        self.lse_with_guards.fill_(math.nan)

    def stray_store(self) -> str | None:
        """What was stored past the last row of a head, if anything was."""
        for name, whole, part in (
            ("O", self.o_with_guards, self.o),
            ("L", self.lse_with_guards, self.lse),
        ):
            if not whole[:, :, part.shape[2] :].isnan().all():
                return f"{name} was written past its last row"
        return None


def guarded_outputs(problem: Problem, device: str) -> Outputs:
    """Poisoned outputs with guard rows behind every head."""
    shape = (problem.B, problem.H, problem.N + GUARD_ROWS, problem.D)
    o = torch.empty(shape, device=device, dtype=TORCH_DTYPES[problem.dtype])
    lse = torch.empty(shape[:-1], device=device, dtype=torch.float32)
    outputs = Outputs(o[:, :, : problem.N], lse[:, :, : problem.N], o, lse)
    outputs.poison()
    return outputs


def guarded_inputs(inputs: Inputs) -> Inputs:
    """The same values with rows of NaN behind every head: a load past the end shows in O or L."""

    def guard(tensor: torch.Tensor) -> torch.Tensor:
        B, H, rows, D = tensor.shape
        whole = tensor.new_full((B, H, rows + GUARD_ROWS, D), math.nan)
        whole[:, :, :rows] = tensor
        return whole[:, :, :rows]

    return Inputs(guard(inputs.q), guard(inputs.k), guard(inputs.v))


def checksum(*tensors: torch.Tensor) -> tuple[int, ...]:
    """A sum of each tensor's bits, which a store into it changes; strides do not matter."""
    return tuple(bit_sums(*tensors).tolist())


def bit_sums(*tensors: torch.Tensor) -> torch.Tensor:
    """The checksums of 16 and 32-bit ``tensors``, (how many,) int64, not waited for."""
    whole = {2: torch.int16, 4: torch.int32}
    return torch.stack([t.view(whole[t.element_size()]).sum(dtype=torch.int64) for t in tensors])


def references(problem: Problem, inputs: Inputs) -> References:
    """SDPA's answer with its default backend, and an fp32 reference of O and L."""
    k, v = (t.repeat_interleave(problem.H // problem.H_kv, dim=1) for t in (inputs.k, inputs.v))
    o_sdpa = F.scaled_dot_product_attention(inputs.q, k, v, is_causal=problem.causal)
    with fp32_matmuls("ieee"):
        o_fp32, lse = _attention_fp32(inputs.q, k, v, problem.causal)
    error = (o_sdpa.float() - o_fp32).abs().max().item()
    return References(problem, o_sdpa, o_fp32, lse, error)


def check(refs: References, outputs: Outputs) -> Check:
    """Whether O and L are right and nothing else was written, with the largest errors."""
    o, lse = outputs.o, outputs.lse
    tolerance = TOLERANCE[refs.problem.dtype]
    max_err, where = _largest((o.float() - refs.o_fp32).abs())
    lse_err, lse_where = _largest((lse - refs.lse).abs())
    sdpa = refs.o_sdpa.float()
    o_excess, o_where = _largest((o.float() - sdpa).abs() - tolerance * (1 + sdpa.abs()))
    allowed = SDPA_ERROR_FACTOR * refs.sdpa_abs_err
    reason: str | None
    if max_err is None:
        reason = f"O is not finite at {where}"
    elif lse_err is None:
        reason = f"L is not finite at {lse_where}"
    elif o_excess is None or o_excess > 0:
        reason = f"O is off SDPA's by more than {tolerance:g} at {o_where}, max error {max_err:.3g}"
    elif refs.problem.dtype != "fp32" and max_err > allowed:
        reason = (
            f"O's error {max_err:.3g} at {where} is over {SDPA_ERROR_FACTOR:g} times SDPA's own"
            f" {refs.sdpa_abs_err:.3g} against an fp32 reference"
        )
    elif lse_err > LSE_TOLERANCE:
        reason = f"L is off logsumexp by {lse_err:.3g} at {lse_where}, over {LSE_TOLERANCE:g}"
    else:
        reason = outputs.stray_store()
    return Check(reason is None, reason, max_err, refs.sdpa_abs_err, lse_err)


def _largest(values: torch.Tensor) -> tuple[float | None, str]:
    """The largest element and its index; None, and the first index, where some are NaN or Inf."""
    finite = torch.isfinite(values)
    if not finite.all():
        flat = int((~finite).flatten().int().argmax())
        return None, _index(flat, values)
    flat = int(values.argmax())
    return float(values.flatten()[flat]), _index(flat, values)


def _index(flat: int, like: torch.Tensor) -> str:
    at = []
    for size in reversed(like.shape):
        at.append(str(flat % size))
        flat //= size
    return "[" + ", ".join(reversed(at)) + "]"


def _attention_fp32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and L in fp32, some heads and rows at a time so that the scores stay under 1 GiB."""
    B, H, N, D = q.shape
    N_k = k.shape[2]
    q, k, v = (t.reshape(B * H, -1, D) for t in (q, k, v))
    o = torch.empty((B * H, N, D), device=q.device, dtype=torch.float32)
    lse = torch.empty((B * H, N), device=q.device, dtype=torch.float32)
    rows = max(1, min(N, _CHUNK_BYTES // (4 * N_k)))
    heads = max(1, min(B * H, _CHUNK_BYTES // (4 * N_k * rows)))
    for h in range(0, B * H, heads):
        keys, values = k[h : h + heads].float(), v[h : h + heads].float()
        for r in range(0, N, rows):
            s = q[h : h + heads, r : r + rows].float() @ keys.transpose(-1, -2) / math.sqrt(D)
            if causal:
                positions = torch.arange(r, r + s.shape[1], device=q.device)
                hidden = torch.arange(N_k, device=q.device)[None, :] > positions[:, None]
                s.masked_fill_(hidden, -math.inf)
            part = torch.logsumexp(s, dim=-1)
            lse[h : h + heads, r : r + rows] = part
            o[h : h + heads, r : r + rows] = s.sub_(part[..., None]).exp_() @ values
    return o.view(B, H, N, D), lse.view(B, H, N)


@contextmanager
def fp32_matmuls(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """Matmuls of fp32 tensors in ``precision``, whatever the user has set, and that again after.

    Each library's own setting: restoring ``set_float32_matmul_precision`` would leave torch in a
    state that it refuses to read once the user has turned ``allow_tf32`` off.
    """
    libraries = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [library.fp32_precision for library in libraries]
    for library in libraries:
        library.fp32_precision = precision
    try:
        yield
    finally:
        for library, own in zip(libraries, before, strict=True):
            library.fp32_precision = own
