"""Autotuning and sweeps for Triton FlashAttention-2 kernels."""

__version__ = "0.1.0"
