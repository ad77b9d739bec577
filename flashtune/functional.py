"""``flashtune.attention``: the kernel and the config that were fastest on the card."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Literal, overload

import torch

from flashtune.choose import choose, fastest_step
from flashtune.descriptors import TMA_ALIGNMENT
from flashtune.errors import FlashtuneError
from flashtune.gpu import DEFAULT_TARGET, GpuSpec, find_gpu, present_gpu
from flashtune.kernels import DEFAULT_KERNEL, KERNELS, Kernel, check_axes, load_kernel
from flashtune.kernels.launch import forward
from flashtune.ladder import LADDER
from flashtune.records import Config, Problem
from flashtune.space import parse_config
from flashtune.versions import usable_triton

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_MAX_D = 256


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = ...,
    *,
    return_lse: Literal[False] = ...,
    config: str | None = ...,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = ...,
    *,
    return_lse: Literal[True],
    config: str | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    return_lse: bool = False,
    config: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q K^T / sqrt(D)) V on an NVIDIA GPU, Ampere or newer. Forward only.

    ``q`` is (B, H, N, D), ``k`` and ``v`` are (B, H_kv, N_k, D) with H_kv dividing H; or they
    are (B*H, N, D) and (B*H_kv, N_k, D). bf16, fp16 or fp32 (which multiplies as TF32), D a
    multiple of 8 up to 256, last stride 1, any other strides. With ``causal`` query i sees keys 0
    to i, whatever the two lengths, as SDPA's ``is_causal`` has it.

    Returns O, of ``q``'s shape and dtype; with ``return_lse`` also L, ``q``'s shape without D, in
    fp32: the natural logsumexp of the scaled scores.

    The kernel and its config are the fastest that were measured for the card, the dtype, D, the
    mask and the nearest length; tensors that TMA cannot read get a kernel without it. On a card
    without measurements the cost model chooses, and a warning says so, once. ``config``
    (``"64x32x4x3"``: q_tile x k_tile x num_warps x num_stages, or with further axes
    ``"64x32x4x3:maxnreg=168"``) overrides it, for the kernel v6_heads_first.

    Raises ValueError for shapes, strides or devices that will not do, TypeError for dtypes,
    RuntimeError where gradients are wanted, and FlashtuneError for a ``config`` that is none or has
    an axis that the kernel lacks, an unusable card or Triton, or sizes for which no config can
    launch.
    """
    problem = _problem(q, k, v, causal)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError(
            "flashtune.attention has no backward pass: call it under torch.no_grad(), or detach"
            " its inputs"
        )
    _gpu(q.device)  # refuses devices that will not do
    if config is None:
        kernel, chosen = _choice(problem, q.device, _tma_reads(q, k, v))
    else:
        kernel, chosen = KERNELS[DEFAULT_KERNEL], parse_config(config)
        check_axes(kernel, (chosen,))
    o = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        forward(kernel, load_kernel(kernel).flash_fwd_kernel, q, k, v, o, lse, causal, chosen)
    return (o, lse) if return_lse else o


def _problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Problem:
    """What the tensors ask for. Raises ValueError and TypeError where they do not fit together."""
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim not in (3, 4) or k.ndim != q.ndim or v.ndim != q.ndim:
        raise ValueError(f"q, k and v must all be (B, H, N, D) or (B*H, N, D): {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape: {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one head dimension: {shapes}")
    if min(*q.shape, *k.shape) == 0:
        raise ValueError(f"no axis may be empty: {shapes}")
    B, H, N, D = q.shape if q.ndim == 4 else (1, *q.shape)
    B_kv, H_kv, N_k, _ = k.shape if k.ndim == 4 else (1, *k.shape)
    if B != B_kv:
        raise ValueError(f"q and k must have one batch size: {shapes}")
    if H % H_kv:
        raise ValueError(f"q's heads must be a multiple of k's: {shapes}")
    if D % 8 or D > _MAX_D:
        raise ValueError(f"D must be a multiple of 8 up to {_MAX_D}: {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise TypeError(
            f"q, k and v must have one dtype, bfloat16, float16 or float32: q is {q.dtype}, k"
            f" {k.dtype}, v {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device: q is on {q.device}, k on {k.device}, v on"
            f" {v.device}"
        )
    return Problem(B, H, H_kv, N, N_k, D, causal, _DTYPES[q.dtype])


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> GpuSpec:
    """The card, or in Triton's interpreter, which runs on the CPU, the default target."""
    if device.type == "cuda":
        gpu = present_gpu(device.index)
        if gpu is None:
            raise FlashtuneError(
                f"{device} is no NVIDIA GPU that the driver knows.",
                "Run 'flashtune env' to see what is there.",
            )
        return gpu
    from triton import knobs

    if device.type == "cpu" and knobs.runtime.interpret:
        return find_gpu(DEFAULT_TARGET)
    raise ValueError(f"q, k and v are on {device}: move them to a CUDA device")


def _tma_reads(*tensors: torch.Tensor) -> bool:
    """Whether TMA can: addresses and strides of whole units of its alignment."""
    return all(
        tensor.data_ptr() % TMA_ALIGNMENT == 0
        and all(
            stride * tensor.element_size() % TMA_ALIGNMENT == 0
            for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if size > 1
        )
        for tensor in tensors
    )


@lru_cache(maxsize=4096)
def _choice(problem: Problem, device: torch.device, tma_reads: bool) -> tuple[Kernel, Config]:
    """The kernel and the config for the problem on the card; warns where they are a guess."""
    gpu = _gpu(device)
    major, minor = (int(part) for part in usable_triton().split(".")[:2])
    default = LADDER[DEFAULT_KERNEL]
    ladder = list(LADDER.values())
    best = ladder[ladder.index(default) :]  # what comes before is there to learn from
    bodies = {step.name: KERNELS[step.body] for step in best}
    steps = [
        step
        for step in best
        if not bodies[step.name].unreliable and (tma_reads or bodies[step.name].loads == "pointer")
    ]
    step = fastest_step(problem, gpu, steps) or default
    choice = choose(step, problem, gpu, (major, minor))
    if choice.predicted:
        _warn_once(gpu.title, problem.dtype, problem.D)
    return KERNELS[step.body], choice.configs[0]


@lru_cache(maxsize=1024)
def _warn_once(title: str, dtype: str, D: int) -> None:
    warnings.warn(
        f"flashtune has measured nothing for {dtype} at D={D} on {title}: the configs are its cost"
        f" model's first choices. 'flashtune sweep --both --dtype {dtype} --D {D} --N ...' finds"
        " the best ones, for attention(..., config=...).",
        stacklevel=4,
    )
