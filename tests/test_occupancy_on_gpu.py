"""Blocks per SM as the budget counts them, against what the CUDA driver itself answers."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from flashtune.budget import BudgetLine, assess
from flashtune.compiler import CompileJob
from flashtune.fan_out import compile_all, default_jobs
from flashtune.gpu import present_gpu
from flashtune.kernels import DEFAULT_KERNEL, KERNELS, load_kernel
from flashtune.kernels.launch import absent_arguments, config_arguments
from flashtune.records import KEEP, Compiled, Problem
from flashtune.space import load_space
from flashtune.versions import usable_triton

pytestmark = pytest.mark.gpu

THREADS = 32  # a warp


def driver_blocks(function: int, threads: int, shared: int) -> int:
    """cuOccupancyMaxActiveBlocksPerMultiprocessor; raises when the driver refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")
    blocks = ctypes.c_int()
    code = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(blocks), ctypes.c_void_p(function), threads, ctypes.c_size_t(shared)
    )
    assert code == 0, f"the driver answered {code}"
    return blocks.value


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_blocks_per_sm_are_the_driver_s(causal: bool) -> None:
    import torch

    torch.cuda.init()
    gpu = present_gpu()
    assert gpu is not None
    kernel = KERNELS[DEFAULT_KERNEL]
    problem = Problem(4, 8, 8, 4096, 4096, 64, causal, "bf16")
    triton = (int(usable_triton().split(".")[0]), int(usable_triton().split(".")[1]))
    budgets = {c: assess(problem, c, gpu, kernel, triton) for c in load_space("article")}
    fitting = [c for c, b in budgets.items() if b.blocks_by_shared and b.accumulators <= 512]
    jobs = [CompileJob(kernel, problem, config, gpu.cc_number) for config in fitting]
    compiled = {
        job.config: facts for job, facts in compile_all(jobs, default_jobs()) if not facts.failure
    }
    assert len(compiled) >= 500
    jit_function = load_kernel(kernel).flash_fwd_kernel
    wrong = {}
    for config, facts in compiled.items():
        ours = BudgetLine(budgets[config], KEEP, facts, ()).blocks_per_sm(gpu)
        theirs = loaded_blocks(jit_function, problem, facts)
        if ours != theirs:
            wrong[str(config)] = (ours, theirs)
    assert wrong == {}


def loaded_blocks(jit_function: Any, problem: Problem, facts: Compiled) -> int:
    """Load the binary that compile_all left in the cache and ask the driver about it."""
    binary = jit_function.warmup(
        **absent_arguments(problem), **config_arguments(facts.config), grid=(1,)
    )
    binary._init_handles()
    threads = THREADS * facts.config.num_warps
    assert facts.shared is not None
    return driver_blocks(binary.function, threads, facts.shared)
