"""The yardstick of the race, frozen: what the articles did by hand.

    python benchmarks/yardstick.py [--N 512,1024,2048,4096] [--mask both] [--out FILE.json]

Compiles everything of the article space that can be launched, in parallel and into an empty cache,
then takes triton.testing.do_bench(warmup=25, rep=100) of each config, one after the other. Prints
the seconds of both, from the start of this process, and writes every median.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--N", default="512,1024,2048,4096")
    parser.add_argument("--D", type=int, default=64)
    parser.add_argument("--mask", choices=["full", "causal", "both"], default="both")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lengths = [int(n) for n in asked.N.split(",")]
    masks = {"full": [False], "causal": [True], "both": [False, True]}[asked.mask]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        result = measured(lengths, masks, asked.D)
    for shape in result["shapes"]:
        print(f"{shape['problem']}: {len(shape['ms'])} configs in {shape['seconds']:.1f} s")
    print(f"compiling {result['compile_s']:.1f} s, all {result['seconds']:.1f} s")
    if asked.out is not None:
        asked.out.write_text(json.dumps(result))


def measured(lengths: list[int], masks: list[bool], D: int) -> dict:
    import torch
    import triton

    from flashtune.check import random_inputs
    from flashtune.compiler import CompileJob, specialisation
    from flashtune.fan_out import compile_all, default_jobs
    from flashtune.gpu import target_gpu
    from flashtune.kernels import DEFAULT_KERNEL, KERNELS, load_kernel
    from flashtune.kernels.launch import forward
    from flashtune.plan import plan_problem
    from flashtune.records import Problem
    from flashtune.space import load_space

    kernel, gpu = KERNELS[DEFAULT_KERNEL], target_gpu("auto")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    configs = load_space("article")
    problems = [Problem(4, 8, 8, N, N, D, causal, "bf16") for causal in masks for N in lengths]
    tried = {
        p: plan_problem(p, configs, gpu, kernel, version, exhaustive=True, top=None).tried
        for p in problems
    }
    jobs = {
        (specialisation(p), config): CompileJob(kernel, p, config, gpu.cc_number)
        for p in problems
        for config in tried[p]
    }
    launchable = {
        (specialisation(job.problem), job.config)
        for job, compiled in compile_all(list(jobs.values()), default_jobs())
        if compiled.failure is None and (compiled.shared or 0) <= gpu.shared_per_block
    }
    compile_s = time.perf_counter() - STARTED
    function, shapes = load_kernel(kernel).flash_fwd_kernel, []
    for problem in problems:
        start = time.perf_counter()
        inputs = random_inputs(problem, "cuda")
        o, lse = torch.empty_like(inputs.q), torch.empty(inputs.q.shape[:3], device="cuda")
        ms = {}
        for config in tried[problem]:
            if (specialisation(problem), config) not in launchable:
                continue

            def launch(config=config):
                forward(kernel, function, inputs.q, inputs.k, inputs.v, o, lse,  # noqa: B023
                        problem.causal, config)  # fmt: skip  # noqa: B023

            ms[str(config)] = triton.testing.do_bench(
                launch, warmup=25, rep=100, return_mode="median"
            )
        shapes.append({"problem": str(problem), "N": problem.N, "causal": problem.causal,
                       "ms": ms, "seconds": time.perf_counter() - start})  # fmt: skip
    return {"compile_s": compile_s, "shapes": shapes, "seconds": time.perf_counter() - STARTED}


if __name__ == "__main__":
    main()
