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
from flashtune.records import Compiled, Config, Problem
from flashtune.versions import usable_triton

if TYPE_CHECKING:
    from flashtune.explain import Explanation, Neighbour
    from flashtune.gpu import GpuSpec


@guarded
def command(
    configs: Annotated[
        list[str],
        typer.Argument(
            help="Configs as q_tile x k_tile x warps x stages: 64x32x4x3, 64x32x4x3:maxnreg=168."
        ),
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
    from flashtune.cli.card import card as explanation_card
    from flashtune.explain import Explainer
    from flashtune.gpu import target_gpu
    from flashtune.kernels import find_kernel
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
    explainer = Explainer(problem, card, chosen, version)
    explained = [explainer.explain(config, compiled.get(config)) for config in parsed]
    if as_json:
        from flashtune.cli.render import write_json

        write_json(_as_json(problem, card, version, explained))
        return
    target = f"{card.title} (sm_{card.cc_number}), Triton {version[0]}.{version[1]}"
    title = f"{chosen.name} on {target}, {problem}"
    if len(explained) == 1:
        typer.echo(f"{title}\n{explanation_card(explained[0], card)}")
    else:
        from flashtune.cli.render import print_budgets

        print_budgets(title, card, explained)


def _compile(
    problem: Problem, configs: list[Config], card: GpuSpec, kernel: Kernel
) -> dict[Config, Compiled]:
    from flashtune.compiler import CompileJob
    from flashtune.fan_out import compile_all, default_jobs

    jobs = [CompileJob(kernel, problem, config, card.cc_number) for config in configs]
    return {job.config: done for job, done in compile_all(jobs, min(len(jobs), default_jobs()))}


def _as_json(
    problem: Problem, card: GpuSpec, triton: tuple[int, int], explained: list[Explanation]
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "gpu": card.name,
        "triton": f"{triton[0]}.{triton[1]}",
        "problem": asdict(problem),
        "budgets": [_one_as_json(e, card) for e in explained],
    }


_NOT_SHOWN = ("config", "registers", "order_blocks_by_shared")  # written otherwise, or no figure


def _one_as_json(explained: Explanation, card: GpuSpec) -> dict[str, Any]:
    """Registers and what follows from them are predicted where ``compiled`` is null."""
    line, cost = explained.line, explained.cost
    blocks = line.blocks_per_sm(card)
    return {
        "config": str(line.budget.config),
        **asdict(line.budget.config),
        **{k: v for k, v in asdict(line.budget).items() if k not in _NOT_SHOWN},
        "registers": line.budget.registers._asdict(),
        "shared_terms": [asdict(term) for term in line.terms],
        "blocks_by_registers": line.blocks_by_registers(card),
        "blocks_per_sm": blocks,
        "waves": line.budget.waves(blocks),
        "last_wave_busy": line.budget.last_wave_busy(blocks) if blocks else None,
        "binds": line.binds(card),
        "predicted_ms": None if cost is None else cost.predicted_ms,
        "predicted_parts": None if cost is None else cost.parts._asdict(),
        "verdict": asdict(line.verdict),
        "compiled": None if line.compiled is None else asdict(line.compiled),
        "other_tritons": dict(line.other_tritons),
        "beside": [_neighbour_as_json(n) for n in explained.beside],
        "nearest_that_runs": (
            None if explained.nearest is None else _neighbour_as_json(explained.nearest)
        ),
    }


def _neighbour_as_json(neighbour: Neighbour) -> dict[str, Any]:
    return {
        "change": neighbour.change,
        "config": str(neighbour.budget.config),
        "shared": neighbour.budget.shared,
        "predicted_ms": None if neighbour.cost is None else neighbour.cost.predicted_ms,
        "verdict": asdict(neighbour.verdict),
    }
