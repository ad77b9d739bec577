"""``flashtune sweep``: the whole job."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtune.cli.guard import NO, guarded
from flashtune.cli.options import (
    AsJson,
    Batch,
    Both,
    Causal,
    Dtype,
    GpuName,
    HeadDim,
    Heads,
    KernelName,
    KeyLength,
    KvHeads,
    Lengths,
    problems,
    triton_version,
)
from flashtune.errors import FlashtuneError
from flashtune.kernels import DEFAULT_KERNEL
from flashtune.records import Status

if TYPE_CHECKING:
    from flashtune.plan import ProblemPlan
    from flashtune.results import RaceVerdict, Recommendation
    from flashtune.sweep import SweepRequest, SweepResult


@guarded
def command(
    n: Lengths = "4096",
    causal: Causal = False,
    both: Both = False,
    b: Batch = 4,
    h: Heads = 8,
    h_kv: KvHeads = None,
    n_k: KeyLength = None,
    d: HeadDim = 64,
    dtype: Dtype = "bf16",
    kernel: KernelName = DEFAULT_KERNEL,
    space: Annotated[
        str, typer.Option("--space", help="A named space (article, quick), or your FILE.toml.")
    ] = "article",
    gpu: GpuName = "auto",
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Compile processes; the CPUs you may use.")
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top", help="Try only the first so many; 40 with no GPU.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("sweeps"),
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Also time what the budget calls hopeless.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be tried, and why not the rest.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; the old file is kept as .old.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try failed configs again.")
    ] = False,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Name each failure.")] = False,
) -> None:
    """Find the fastest configs: prune, compile, check against SDPA, time, recommend.

    With no GPU it does all but time, for a GPU you name.

    Run the same command again to go on with a sweep that was stopped.

    Examples:

      flashtune sweep --N 4096 --causal

      flashtune sweep --N 512,1024,2048,4096 --both --exhaustive

      flashtune sweep --gpu rtx-4090 --D 128 --dry-run
    """
    from flashtune.driver import other_processes
    from flashtune.gpu import target_gpu
    from flashtune.gpu_process import GpuProcess
    from flashtune.kernels import check_axes, find_kernel
    from flashtune.space import load_space

    if jobs is not None and jobs < 1:
        raise FlashtuneError(f"--jobs {jobs}: at least one process is needed", "Try --jobs 2.")
    if top is not None and top < 1:
        raise FlashtuneError(f"--top {top}: at least one config must be tried", "Try --top 40.")
    asked = problems(n, n_k, b, h, h_kv, d, dtype, causal, both)
    configs, chosen, card = load_space(space), find_kernel(kernel), target_gpu(gpu)
    check_axes(chosen, configs)
    timing = card.present and not dry_run
    others = other_processes() if timing else None
    # Before all else: it takes seconds to start, while what follows is loaded and planned.
    gpu_process = GpuProcess(chosen) if timing else None
    from flashtune.cli.render import print_plan, write_json
    from flashtune.plan import TOP_WITHOUT_GPU, plan_problem

    if top is None and not card.present and not exhaustive:
        top = TOP_WITHOUT_GPU
    version = triton_version()
    plans = [
        plan_problem(p, configs, card, chosen, version, exhaustive=exhaustive, top=top)
        for p in asked
    ]
    if dry_run and as_json:
        write_json({"schema_version": 1, "problems": [_plan_as_json(plan) for plan in plans]})
        return
    if dry_run:
        print_plan(plans, len(configs))
        return
    import shlex

    from flashtune.fan_out import default_jobs
    from flashtune.sweep import SweepRequest

    request = SweepRequest(
        plans=tuple(plans),
        kernel=chosen,
        gpu=card,
        out=out,
        n_jobs=jobs or default_jobs(),
        fresh=fresh,
        retry_failed=retry_failed,
        exhaustive=exhaustive,
        gpu_process=gpu_process,
        others=others,
        command=shlex.join(["flashtune", *sys.argv[1:]]),
    )
    _run(request, as_json, quiet, verbose)


def _run(request: SweepRequest, as_json: bool, quiet: bool, verbose: bool) -> None:
    from flashtune import sweep
    from flashtune.cli.render import print_sweep, progress, warn, write_json
    from flashtune.shortlist import write_list

    if not request.gpu.present and not quiet:
        warn(f"Not timing: {request.gpu.title} is not present. Compiling for it only.")
    with progress(quiet) as receive:
        result = sweep.run(request, receive)
    written = write_list(result.path, result.file)
    recommendation, list_path = written or (None, None)
    if as_json:
        write_json(_as_json(result, recommendation, list_path))
    else:
        print_sweep(result, recommendation)
    if not quiet:
        warn(f"Results: {result.path}" + (f"\nList:    {list_path}" if list_path else ""))
    failures = [row for row in result.rows() if row.status in sweep.FAILED]
    for row in failures if verbose else [r for r in failures if r.status is Status.CRASHED]:
        warn(f"{row.config} on {row.problem}: {row.status}: {row.reason}")
    unknown = any(row.status is Status.CRASHED for row in result.rows())
    if recommendation is None:
        warn("No config is valid on every shape, so there is nothing to recommend.")
    if unknown or recommendation is None:
        raise typer.Exit(NO)


def _plan_as_json(plan: ProblemPlan) -> dict[str, Any]:
    return {
        "problem": asdict(plan.problem),
        "tried": [str(config) for config in plan.tried],
        "ranked": [str(config) for config in plan.ranked],
        "pruned": [
            {"config": str(config), **asdict(verdict)} for config, verdict in plan.pruned.items()
        ],
    }


def _as_json(
    result: SweepResult, recommendation: Recommendation | None, list_path: Path | None
) -> dict[str, Any]:
    from flashtune.cli.render import winner
    from flashtune.export import as_json

    provenance = result.file.provenance
    found = []
    for problem in result.problems:
        row = winner(result, problem)
        sdpa = [
            asdict(s.timing)
            for s in result.file.sdpa
            if s.problem == problem and row is not None and s.run_id == row.run_id
        ]
        found.append(
            {
                "problem": asdict(problem),
                "best": None if row is None else {"config": str(row.config), **_figures(row)},
                "verdict": _verdict_as_json(result.verdict(problem)),
                "sdpa": sdpa,
            }
        )
    return {
        "schema_version": 1,
        "measured": provenance.measured,
        "notes": result.file.notes,
        "results": str(result.path),
        "list": None if list_path is None else str(list_path),
        "problems": found,
        "counts": {str(status): count for status, count in result.counts().items()},
        "recommendation": None if recommendation is None else as_json(recommendation, provenance),
    }


def _verdict_as_json(verdict: RaceVerdict | None) -> dict[str, Any] | None:
    """What the race decided; null where nothing was raced."""
    if verdict is None:
        return None
    return {
        "chosen": str(verdict.chosen),
        "leader": str(verdict.leader),
        "ms": verdict.ms,
        "ms_lo": verdict.ms_lo,
        "ms_hi": verdict.ms_hi,
        "rounds": verdict.rounds,
        "ties": [{**asdict(tie), "config": str(tie.config)} for tie in verdict.ties],
    }


def _figures(row: Any) -> dict[str, Any]:
    names = ("ms", "ms_lo", "ms_hi", "tflops", "regs", "spills", "shared", "blocks_per_sm")
    return {name: getattr(row, name) for name in names}
