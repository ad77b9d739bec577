"""Launches as a launch would, on real CPU tensors, with a driver that stops short of the GPU.

``launch_script.py CC < problems.json``: a list of [kernel, problem's fields, config, layout];
prints for each whether Triton's cache already held the binary.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashtune.kernels import find_kernel, load_kernel
from flashtune.kernels.launch import forward
from flashtune.space import parse_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Driver:
    """Not the package's: it must not be the reason that the keys agree."""

    def __init__(self, cc: int) -> None:
        self.target = GPUTarget("cuda", cc, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class StopsShort:
    """A JIT function whose ``fn[grid](…)`` compiles, or finds, and does not launch."""

    def __init__(self, jit_function: Any) -> None:
        self.jit_function = jit_function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.jit_function.warmup(**arguments, grid=grid)


def main(cc: int) -> None:
    driver.set_active(Driver(cc))
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(bool(event["cache_hit"]))
    for name, fields, config, layout in json.load(sys.stdin):
        B, H, H_kv, N, N_k, D, causal, dtype = (
            fields[key] for key in ("B", "H", "H_kv", "N", "N_k", "D", "causal", "dtype")
        )
        q, o = (torch.empty(B, H, N, D, dtype=DTYPES[dtype]) for _ in range(2))
        k, v = (torch.empty(B, H_kv, N_k, D, dtype=DTYPES[dtype]) for _ in range(2))
        lse = torch.empty(B, H, N)
        tensors = [q, k, v, o, lse]
        if layout == "three_axes":
            tensors = [t.flatten(0, 1) for t in tensors]
        kernel = find_kernel(name)
        jit_function = StopsShort(load_kernel(kernel).flash_fwd_kernel)
        forward(kernel, jit_function, *tensors, causal, parse_config(config))
    print(json.dumps(hits))


if __name__ == "__main__":
    main(int(sys.argv[1]))
