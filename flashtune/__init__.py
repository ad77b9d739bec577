"""Autotuning and sweeps for Triton FlashAttention-2 kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtune.functional import attention

__version__ = "0.1.0"
__all__ = ["__version__", "attention"]


def __getattr__(name: str) -> object:
    """``flashtune.attention`` loads torch, so it is imported when it is first asked for."""
    if name == "attention":
        from flashtune.functional import attention

        return attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
