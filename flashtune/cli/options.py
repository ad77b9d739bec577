"""What several commands take: the problem's options, and their checks."""

from __future__ import annotations

from typing import Annotated

import typer

from flashtune.errors import FlashtuneError
from flashtune.records import ELEMENT_BYTES, Problem
from flashtune.versions import version

Lengths = Annotated[
    str, typer.Option("--N", help="Query length, or several: 512,1024.", rich_help_panel="Problem")
]
KeyLength = Annotated[
    int | None, typer.Option("--N-k", help="Key length; N by default.", rich_help_panel="Problem")
]
Batch = Annotated[int, typer.Option("--B", help="Batch.", rich_help_panel="Problem")]
Heads = Annotated[int, typer.Option("--H", help="Query heads.", rich_help_panel="Problem")]
KvHeads = Annotated[
    int | None,
    typer.Option("--H-kv", help="Key and value heads; H by default.", rich_help_panel="Problem"),
]
HeadDim = Annotated[
    int,
    typer.Option(
        "--D", help="Head dimension: a multiple of 8 up to 256.", rich_help_panel="Problem"
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="bf16, fp16 or fp32.", rich_help_panel="Problem")
]
Causal = Annotated[
    bool, typer.Option("--causal", help="Mask keys after the query.", rich_help_panel="Problem")
]
Both = Annotated[
    bool, typer.Option("--both", help="With and without the mask.", rich_help_panel="Problem")
]
KernelName = Annotated[
    str, typer.Option("--kernel", help="A kernel of the ladder, or your FILE.py.")
]
GpuName = Annotated[
    str, typer.Option("--gpu", help="auto (the card that is present), or a name such as h200.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

LIMIT = 2**31 - 1


def problems(
    lengths: str,
    key_length: int | None,
    batch: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    dtype: str,
    causal: bool,
    both: bool = False,
) -> list[Problem]:
    """Problems from the options, lengths in the order given and without the mask first.

    Raises FlashtuneError naming the option, its value and what it takes.
    """
    _check_dtype(dtype)
    _whole("--B", batch)
    _whole("--H", heads)
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise FlashtuneError(
            f"--D {head_dim}: the kernels do not take this head dimension",
            "--D takes multiples of 8 from 8 to 256.",
        )
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise FlashtuneError(
            f"--H-kv {kv_heads}: does not divide --H {heads}",
            "Each key head serves the same number of query heads.",
        )
    if key_length is not None:
        _whole("--N-k", key_length)
    return [
        Problem(batch, heads, kv_heads, n, key_length or n, head_dim, mask, dtype)
        for n in _lengths(lengths)
        for mask in ((False, True) if both else (causal,))
    ]


def shape_problems(name: str, batch: int, dtype: str) -> list[Problem]:
    """The problems of a set of configs/shapes.toml.

    Raises FlashtuneError naming the option or the set, and what it takes.
    """
    from flashtune.shapes import load_shapes

    _check_dtype(dtype)
    _whole("--B", batch)
    return load_shapes(name, batch, dtype)


def _lengths(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        try:
            value = int(part)
        except ValueError:
            raise FlashtuneError(
                f"--N {text!r}: {part!r} is not a whole number", "Write --N 4096 or --N 512,1024."
            ) from None
        _whole("--N", value)
        found.append(value)
    return list(dict.fromkeys(found))


def _whole(option: str, value: int) -> None:
    if not 1 <= value <= LIMIT:
        raise FlashtuneError(f"{option} {value}: out of range", f"{option} takes 1 to {LIMIT}.")


def _check_dtype(dtype: str) -> None:
    if dtype not in ELEMENT_BYTES:
        import difflib

        near = difflib.get_close_matches(dtype, ELEMENT_BYTES, n=2, cutoff=0.3)
        names = " or ".join(near) if near else ", ".join(ELEMENT_BYTES)
        hint = f"Did you mean {names}?" if near else f"--dtype takes {names}."
        raise FlashtuneError(f"--dtype {dtype!r}: no such dtype", hint)


def triton_version(asked: str | None = None) -> tuple[int, int]:
    """(major, minor) of ``asked``, of the installed Triton, or of the newest known, 3.9."""
    text = asked or version("triton") or "3.9"
    try:
        major, minor = (int(part) for part in text.split(".")[:2])
    except ValueError:
        raise FlashtuneError(
            f"--triton {text!r}: not a version", "Write it as 3.6 or 3.9.0."
        ) from None
    return major, minor
