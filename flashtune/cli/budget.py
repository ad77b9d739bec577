"""``flashtune budget``: what a config needs, what binds, and whether it can run."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtune.cli.guard import guarded
from flashtune.cli.options import (
    AsJson,
    Batch,
    Causal,
    Dtype,
    GpuName,
    HeadDim,
    Heads,
    KernelName,
    KeyLength,
    Lengths,
    problems,
    triton_version,
)
from flashtune.errors import FlashtuneError
from flashtune.kernels import DEFAULT_KERNEL, Kernel
from flashtune.provenance import usable_triton
from flashtune.records import Compiled, Config, OutClass, Problem

if TYPE_CHECKING:
    from flashtune.budget import BudgetLine
    from flashtune.cost import Cost
    from flashtune.gpu import GpuSpec


@guarded
def command(
    configs: Annotated[
        list[str], typer.Argument(help="Configs as q_tile x k_tile x warps x stages: 64x32x4x3.")
    ],
    gpu: GpuName = "auto",
    n: Lengths = "4096",
    n_k: KeyLength = None,
    b: Batch = 4,
    h: Heads = 8,
    d: HeadDim = 64,
    dtype: Dtype = "bf16",
    causal: Causal = False,
    kernel: KernelName = DEFAULT_KERNEL,
    triton: Annotated[
        str | None, typer.Option("--triton", help="Ask for another Triton than the installed one.")
    ] = None,
    compile_too: Annotated[
        bool, typer.Option("--compile", help="Compile, and show the compiler's figures beside.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what CONFIG needs, what binds, and whether it can run. Needs no GPU.

    Examples:

      flashtune budget 64x32x4x3

      flashtune budget 64x32x4x3 128x128x8x4 --gpu rtx-4090 --compile
    """
    from flashtune import budget as rules
    from flashtune.cli.render import print_budgets, write_json
    from flashtune.cost import predict
    from flashtune.gpu import target_gpu
    from flashtune.kernels import find_kernel
    from flashtune.shared import terms
    from flashtune.space import parse_config

    parsed = list(dict.fromkeys(parse_config(text) for text in configs))
    if "," in n:
        raise FlashtuneError(f"--N {n!r}: a budget is for one length", "Give one, as --N 512.")
    problem = problems(n, n_k, b, h, None, d, dtype, causal)[0]
    card, chosen, version = target_gpu(gpu), find_kernel(kernel), triton_version(triton)
    if compile_too and triton is not None and version != triton_version():
        raise FlashtuneError(
            f"--compile uses the installed Triton, not {triton}", "Leave out --triton."
        )
    if compile_too:
        usable_triton()
    compiled = _compile(problem, parsed, card, chosen) if compile_too else {}
    lines = []
    for config in parsed:
        budget = rules.assess(problem, config, card, chosen, version)
        lines.append(
            rules.BudgetLine(
                budget,
                rules.verdict(budget, card),
                compiled.get(config),
                rules.other_tritons(problem, config, card, chosen, version),
                terms(problem, config, card, chosen, version) or (),
            )
        )
    costs = {
        line.budget.config: predict(problem, line.budget, card, chosen)
        for line in lines
        if line.verdict.out is not OutClass.CANNOT
    }
    if as_json:
        write_json(_as_json(problem, card, version, lines, costs))
    else:
        print_budgets(problem, card, chosen, version, lines, costs)


def _compile(
    problem: Problem, configs: list[Config], card: GpuSpec, kernel: Kernel
) -> dict[Config, Compiled]:
    from flashtune.compiler import CompileJob, compile_all, default_jobs

    jobs = [CompileJob(kernel, problem, config, card.cc_number) for config in configs]
    return {job.config: done for job, done in compile_all(jobs, min(len(jobs), default_jobs()))}


def _as_json(
    problem: Problem,
    card: GpuSpec,
    triton: tuple[int, int],
    lines: list[BudgetLine],
    costs: dict[Config, Cost],
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "gpu": card.name,
        "triton": f"{triton[0]}.{triton[1]}",
        "problem": asdict(problem),
        "budgets": [
            {
                "config": str(line.budget.config),
                **{k: v for k, v in asdict(line.budget).items() if k != "config"},
                "shared_terms": [asdict(term) for term in line.terms],
                "blocks_by_registers": line.blocks_by_registers(card),
                "blocks_per_sm": line.blocks_per_sm(card),
                "waves": line.budget.waves(line.blocks_per_sm(card)),
                "binds": line.binds(card),
                **_predicted(costs.get(line.budget.config)),
                "verdict": asdict(line.verdict),
                "compiled": None if line.compiled is None else asdict(line.compiled),
                "other_tritons": dict(line.other_tritons),
            }
            for line in lines
        ],
    }


def _predicted(cost: Cost | None) -> dict[str, Any]:
    """The model's time and its parts, or nulls for what cannot run."""
    return {
        "predicted_ms": None if cost is None else cost.predicted_ms,
        "predicted_parts": None if cost is None else cost.parts._asdict(),
    }
