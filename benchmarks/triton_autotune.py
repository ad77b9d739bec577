"""@triton.autotune on flashtune's kernel: what it chooses and how long it takes.

    python benchmarks/triton_autotune.py (--near RESULTS.parquet | --sample 20) [--N 512,1024]

Either over the configs that a recorded sweep has within 10% of the best on some shape, or over some
drawn at random from those of the article space that launch; the seconds for all of those are then
extrapolated. Prints one JSON line.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashtune.records import Config, Problem  # noqa: E402
from flashtune.store import read  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--near", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--N", default="512,1024,2048,4096")
    parser.add_argument("--mask", choices=["full", "causal", "both"], default="both")
    asked = parser.parse_args()
    import torch
    import triton

    from flashtune.kernels import DEFAULT_KERNEL, KERNELS, load_kernel
    from flashtune.kernels.launch import arguments

    masks = {"full": [False], "causal": [True], "both": [False, True]}[asked.mask]
    drawn, of = near(asked.near) if asked.near is not None else sampled(asked.sample)
    configs = [
        triton.Config(
            {"Q_TILE_SIZE": c.q_tile, "K_TILE_SIZE": c.k_tile},
            num_warps=c.num_warps,
            num_stages=c.num_stages,
        )
        for c in drawn
    ]
    key = ["N_QUERIES", "N_KEYS", "D", "is_causal"]
    tuned = triton.autotune(configs=configs, key=key)(
        load_kernel(KERNELS[DEFAULT_KERNEL]).flash_fwd_kernel
    )
    chosen, ready = {}, time.perf_counter() - STARTED
    for N in (int(n) for n in asked.N.split(",")):
        for causal in masks:
            q, k, v = torch.randn(3, 4, 8, N, 64, device="cuda", dtype=torch.bfloat16)
            o, lse = torch.empty_like(q), torch.empty(4, 8, N, device="cuda")
            start = time.perf_counter()
            tuned[lambda meta, N=N: (32, triton.cdiv(N, meta["Q_TILE_SIZE"]))](
                **arguments(q, k, v, o, lse, causal)
            )
            torch.cuda.synchronize()
            best = tuned.best_config
            text = (f"{best.kwargs['Q_TILE_SIZE']}x{best.kwargs['K_TILE_SIZE']}"
                    f"x{best.num_warps}x{best.num_stages}")  # fmt: skip
            chosen[f"{N} {'causal' if causal else 'full'}"] = text
            took = time.perf_counter() - start
    result = {"configs": len(configs), "chosen": chosen, "ready_s": ready,
              "seconds": time.perf_counter() - STARTED, "last_key_s": took}  # fmt: skip
    if of > len(configs):
        result["extrapolated_s_for_all"] = ready + took * of / len(configs)
    print(json.dumps(result))


def sampled(count: int) -> tuple[list[Config], int]:
    """``count`` configs of those that launch, and how many those are."""
    import triton

    from flashtune.gpu import target_gpu
    from flashtune.kernels import DEFAULT_KERNEL, KERNELS
    from flashtune.plan import plan_problem
    from flashtune.space import load_space

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    plan = plan_problem(
        Problem(4, 8, 8, 4096, 4096, 64, True, "bf16"), load_space("article"), target_gpu("auto"),
        KERNELS[DEFAULT_KERNEL], version, exhaustive=True, top=None,
    )  # fmt: skip
    return random.Random(1).sample(plan.tried, count), len(plan.tried)


def near(path: Path) -> tuple[list[Config], int]:
    """The configs that a recorded sweep has within 10% of the best on some shape."""
    rows = [row for row in read(path).rows if row.ms is not None]
    best = {p: min(row.ms for row in rows if row.problem == p) for p in {r.problem for r in rows}}
    found = {row.config for row in rows if row.ms <= 1.1 * best[row.problem]}
    return sorted(found), len(found)


if __name__ == "__main__":
    main()
