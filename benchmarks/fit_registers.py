"""How the weights of flashtune/registers.py came about, and how well they do on unseen targets.

    python benchmarks/fit_registers.py COMPILED.jsonl [--compile 1400] [--jobs N]

COMPILED.jsonl holds compiled configs, one a line; ``--compile`` draws and compiles until there are
so many (about a second each). The recorded sweeps count too, at a quarter of the weight, since they
are of one target. Prints the weights, and scores of weights that never saw some of the targets.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashtune.audit_budget import STAGES, TILES, WARPS  # noqa: E402
from flashtune.budget import assess, register_cap  # noqa: E402
from flashtune.compiler import CompileJob  # noqa: E402
from flashtune.fan_out import compile_all, default_jobs  # noqa: E402
from flashtune.gpu import find_gpu  # noqa: E402
from flashtune.kernels import KERNELS  # noqa: E402
from flashtune.records import Config, Problem  # noqa: E402
from flashtune.registers import Weights, needs  # noqa: E402
from flashtune.store import find, read  # noqa: E402
from flashtune.tensor_cores import Instructions, instructions  # noqa: E402
from flashtune.versions import usable_triton  # noqa: E402

Vector = npt.NDArray[np.float64]
CARDS = {
    80: "a100", 86: "rtx-3090", 89: "rtx-4090", 90: "h200", 100: "b200", 120: "rtx-5090",
}  # fmt: skip
RECORDED_WEIGHT = 0.25
OUTLIER = 15.0  # registers: residuals beyond it count by their size and not by its square


class Seen(NamedTuple):
    """One compiled config."""

    kind: Instructions
    needs: tuple[float, ...]
    cap: int
    regs: int
    spilled: bool
    cc: int
    D: int
    weight: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("compiled", type=Path)
    parser.add_argument("--compile", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    args = parser.parse_args()
    if args.compile:
        compile_more(args.compiled, args.compile, args.jobs)
    seen = [*from_file(args.compiled), *recorded()]
    for kind in Instructions:
        of_kind = [s for s in seen if s.kind is kind]
        registers, spread, inside = fit_registers(of_kind)
        spills, threshold = fit_spills(of_kind)
        print(f"{kind}: {len(of_kind)} configs")
        print(f"  registers {rounded(registers)}, spread {spread:.0f} (holds {inside:.0%})")
        print(f"  spills {rounded(spills)}, threshold {threshold:.1f}")
        print(f"  on what it was fitted to: {score(of_kind, spills, threshold)}")
    held_out("mma", [s for s in seen if s.kind is Instructions.MMA], lambda s: s.cc in (80, 89, 90))
    held_out("wgmma", [s for s in seen if s.kind is Instructions.WGMMA], lambda s: s.D == 64)


def held_out(name: str, seen: Sequence[Seen], known) -> None:  # type: ignore[no-untyped-def]
    """Fit to the known ones, and score on the others."""
    fitted = [s for s in seen if known(s)]
    others = [s for s in seen if not known(s)]
    registers, spread, _ = fit_registers(fitted)
    spills, threshold = fit_spills(fitted)
    free = [s for s in others if not s.spilled and s.regs < s.cap]
    inside = [abs(s.regs - np.dot(s.needs, registers)) <= spread for s in free]
    print(f"{name}, held out: fitted to {len(fitted)}, scored on {len(others)}:")
    print(f"  {score(others, spills, threshold)}; {np.mean(inside):.0%} of registers in range")


def score(seen: Sequence[Seen], spills: Weights, threshold: float) -> str:
    p = np.array([probability(s, spills, threshold) for s in seen])
    spilled = np.array([s.spilled for s in seen])
    called = p >= 0.5
    certain = p >= 0.98
    return (
        f"{spilled.sum()} spill, recall {(called & spilled).sum() / spilled.sum():.0%},"
        f" false alarms {(called & ~spilled).sum() / (~spilled).sum():.1%}; of the"
        f" {certain.sum()} that it is sure of, {spilled[certain].mean():.1%} spill"
    )


def probability(s: Seen, spills: Weights, threshold: float) -> float:
    return float(1 / (1 + np.exp(-np.clip(np.dot(s.needs, spills) / s.cap - threshold, -30, 30))))


def fit_registers(seen: Sequence[Seen]) -> tuple[Weights, float, float]:
    """Least squares on configs that no cap touched; half the width that holds 9 of 10."""
    free = [s for s in seen if not s.spilled and s.regs < s.cap - 3]
    A, y = np.array([s.needs for s in free]), np.array([float(s.regs) for s in free])
    weight = np.array([s.weight for s in free])
    # A little ridge, relative to each need's own size, for needs that hardly vary.
    ridge = np.diag(np.sqrt(1e-3 * (A**2 * weight[:, None]).sum(axis=0)))
    w = np.zeros(A.shape[1])
    soft = np.ones(len(y))
    for _ in range(20):
        scale = np.sqrt(weight * soft)[:, None]
        stacked = np.concatenate([A * scale, ridge])
        target = np.concatenate([y * scale[:, 0], np.zeros(len(w))])
        w = np.linalg.lstsq(stacked, target, rcond=None)[0]
        soft = 1 / np.sqrt(1 + ((y - A @ w) / OUTLIER) ** 2)
    off = np.abs(y - A @ w)
    spread = float(np.ceil(np.quantile(off, 0.9)))
    return Weights(*w.tolist()), spread, float((off <= spread).mean())


def fit_spills(seen: Sequence[Seen]) -> tuple[Weights, float]:
    """Logistic regression on each need's share of the cap. No need may make spilling less likely:
    one that would is left out, and the others are fitted again."""
    A = np.array([[*(n / s.cap for n in s.needs), -1.0] for s in seen])
    y, weight = np.array([float(s.spilled) for s in seen]), np.array([s.weight for s in seen])
    used = np.ones(A.shape[1])
    while True:
        w = logistic(A * used, y, weight) * used
        negative = [i for i in range(1, len(w) - 1) if w[i] < 0]
        if not negative:
            return Weights(*w[:-1].tolist()), float(w[-1])
        used[min(negative, key=lambda i: w[i])] = 0


def logistic(A: Vector, y: Vector, weight: Vector) -> Vector:
    """Weighted logistic regression with a little ridge, by Newton's method."""
    size = np.sqrt((A**2).mean(axis=0)) + 1e-12  # so that the ridge treats all needs alike
    A = A / size
    w = np.zeros(A.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(A @ w, -30, 30)))
        slope = A.T @ (weight * (p - y)) + 0.1 * w
        curve = (A * (weight * p * (1 - p))[:, None]).T @ A + 0.1 * np.eye(len(w))
        w -= np.clip(np.linalg.solve(curve, slope), -3, 3)
    return np.asarray(w / size)


def rounded(weights: Weights) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in weights) + ")"


def as_seen(kernel: str, problem: Problem, config: Config, cc: int, regs: int, spills: int,
            weight: float) -> Seen | None:  # fmt: skip
    gpu = find_gpu(CARDS[cc])
    kind = instructions(gpu, config)
    if kind is None:
        return None
    need = needs(problem, config, KERNELS[kernel], kind)
    cap = register_cap(gpu, config.num_warps)
    return Seen(kind, need, cap, regs, spills > 0, cc, problem.D, weight)


def from_file(path: Path) -> list[Seen]:
    found = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["regs"] is not None:
            problem, config = Problem(**entry["problem"]), Config(**entry["config"])
            found.append(as_seen(entry["kernel"], problem, config, entry["cc"], entry["regs"],
                                 entry["spills"], 1.0))  # fmt: skip
    return [s for s in found if s is not None]


def recorded() -> list[Seen]:
    """Every binary of the recorded sweeps once: its length does not matter."""
    found = {}
    for path in find(ROOT / "sweeps"):
        for row in read(path).rows:
            if row.regs is not None and row.spills is not None:
                key = (row.kernel, row.D, row.dtype, row.causal, row.config)
                cc = int(row.cc.replace(".", ""))
                found[key] = as_seen(row.kernel, row.problem, row.config, cc, row.regs,
                                     row.spills, RECORDED_WEIGHT)  # fmt: skip
    return [s for s in found.values() if s is not None]


def draw(rng: random.Random, triton: tuple[int, int]) -> CompileJob | None:
    """A random config that fits in shared memory; few of those that are sure to spill."""
    D, cc = rng.choice((64, 64, 128, 128, 32, 256, 96, 16)), rng.choice(list(CARDS))
    dtype = rng.choice(("bf16", "bf16", "fp16", "fp32"))
    problem = Problem(4, 8, 8, 4096, 4096, D, rng.random() < 0.5, dtype)
    config = Config(*(rng.choice(axis) for axis in (TILES, TILES, WARPS, STAGES[:5])))
    kernel, gpu = rng.choice(list(KERNELS.values())), find_gpu(CARDS[cc])
    budget = assess(problem, config, gpu, kernel, triton)
    if budget.lacks_tma or budget.accumulators > 512 or (budget.shared or 0) > budget.shared_limit:
        return None
    if budget.accumulators > 256 and rng.random() < 0.7:
        return None
    return CompileJob(kernel, problem, config, cc)


def compile_more(path: Path, count: int, jobs: int) -> None:
    have = len(path.read_text().splitlines()) if path.exists() else 0
    major, minor = map(int, usable_triton().split(".")[:2])
    rng = random.Random(have + 1)
    wanted: dict[CompileJob, None] = {}
    while len(wanted) < count - have:
        job = draw(rng, (major, minor))
        if job is not None:
            wanted[job] = None
    with path.open("a") as file:
        for job, compiled in compile_all(list(wanted), jobs):
            entry = {
                "kernel": job.kernel.name, "problem": asdict(job.problem), "cc": job.cc,
                "config": asdict(job.config), "regs": compiled.regs, "spills": compiled.spills,
                "triton": usable_triton(), "reason": compiled.reason,
            }  # fmt: skip
            file.write(json.dumps(entry) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
