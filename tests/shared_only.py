"""Shared bytes as Triton's allocator lays them out, a fifth of a full compile: no LLVM, no ptxas.

``shared_only.py < jobs.json`` reads a list of [kernel, problem's fields, config, cc] and prints the
list of shared bytes. A process of its own because it makes Triton believe in a GPU that is not
there and stops its compiler half-way.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import triton
from triton._C.libtriton import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from flashtune.kernels import find_kernel, load_kernel
from flashtune.kernels.launch import absent_arguments, config_arguments
from flashtune.records import Problem
from flashtune.space import parse_config


class Enough(Exception):
    """The allocation is done."""


class Target:
    def __init__(self, cc: int) -> None:
        self.cc = cc

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cc, 32)

    def get_current_device(self) -> int:
        return self.cc  # a JIT function keeps one target a device

    def get_current_stream(self, device: int) -> int:
        return 0


MODULES: list[Any] = []  # the one that is being lowered

_make_llir = CUDABackend.make_llir
_allocate = nvidia.passes.ttgpuir.add_allocate_shared_memory_nv


def make_llir(self: CUDABackend, src: Any, *args: Any) -> Any:
    MODULES[:] = [src]
    return _make_llir(self, src, *args)


def allocate_and_stop(pm: Any, *args: Any) -> None:
    _allocate(pm, *args)
    pm.run(MODULES[0], "shared_only")
    raise Enough


def main() -> None:
    CUDABackend.make_llir = make_llir
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv = allocate_and_stop
    triton.knobs.compilation.always_compile = True
    answers = []
    for name, fields, config, cc in json.load(sys.stdin):
        driver.set_active(Target(cc))
        values = absent_arguments(Problem(**fields))
        jit_function = load_kernel(find_kernel(name)).flash_fwd_kernel
        with contextlib.suppress(Enough):
            jit_function.warmup(**values, **config_arguments(parse_config(config)), grid=(1,))
        answers.append(MODULES.pop().get_int_attr("ttg.shared"))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
