"""``flashtune audit``: how far the budget, the model and the race can be trusted."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtune.cli.guard import NO, guarded
from flashtune.cli.options import AsJson, triton_version
from flashtune.errors import FlashtuneError

if TYPE_CHECKING:
    from flashtune.audit_budget import Report
    from flashtune.audit_model import ModelAudit, ShapeScore
    from flashtune.gpu import GpuSpec
    from flashtune.results import SweepFile

app = typer.Typer(
    help="How far the budget, the register estimate, the cost model and the race can be trusted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command("search")
@guarded
def search(
    sources: Annotated[
        list[Path] | None, typer.Option("--from", help="Results file or folder; several are fine.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Compile processes to simulate.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the samples that are drawn.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Replay the race on recorded exhaustive sweeps, without a GPU.

    For each shape: what the race would have chosen, how far it is behind the true best (regret),
    and how long it would have taken beside compiling and timing everything.

    Examples:

      flashtune audit search

      flashtune audit search --from sweeps --jobs 4 --json
    """
    from flashtune.audit_search import audit
    from flashtune.cli.audit_tables import print_search_audit
    from flashtune.cli.render import write_json

    if jobs < 1:
        raise FlashtuneError(f"--jobs {jobs}: too few", "--jobs takes 1 or more.")
    result = audit(_recorded(sources), jobs, seed)
    if as_json:
        shapes = [
            {**asdict(s), "best": str(s.best), "chosen": str(s.chosen)} for s in result.shapes
        ]
        write_json(
            {
                "schema_version": 1,
                "jobs": jobs,
                "seed": seed,
                "shapes": shapes,
                "race_s": result.race_s,
                "exhaustive_s": result.exhaustive_s,
                "speedup": result.speedup,
                "worst_regret": result.worst_regret,
                "mean_regret": result.mean_regret,
                "skipped": result.skipped,
            }
        )
    else:
        print_search_audit(result)


def _recorded(sources: list[Path] | None) -> list[SweepFile]:
    """The results files, and tables like them, at ``sources``; by default the sweeps folder."""
    from flashtune.kernels import DEFAULT_KERNEL
    from flashtune.recorded import read_any
    from flashtune.store import find

    paths = [path for source in sources or [Path("sweeps")] for path in find(source)]
    if not paths:
        where = ", ".join(map(str, sources or [Path("sweeps")]))
        raise FlashtuneError(f"{where}: no sweep is there", "Name a file or folder with --from.")
    return [read_any(path, DEFAULT_KERNEL) for path in paths]


Samples = Annotated[int, typer.Option("--samples", help="Random cases to compare.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Of the sample; a fresh one, printed, by default.")
]
Targets = Annotated[
    str, typer.Option("--gpu", help="all, auto (the card that is present), or a name.")
]
Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Compile processes; the CPUs you may use.")
]


@app.command("model")
@guarded
def model(
    sources: Annotated[
        list[Path] | None, typer.Option("--from", help="Results file or folder; several are fine.")
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out/--shipped-only",
            help="Also fit the constants to some shapes only and score them on others.",
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Score the cost model on recorded exhaustive sweeps. Needs no GPU.

    For each shape: the best of the model's first 8 configs and its first choice, as a share of the
    true best, and the rank correlation of predicted with measured times.

    Examples:

      flashtune audit model

      flashtune audit model --from sweeps --json
    """
    from flashtune.audit_model import audit
    from flashtune.cli.audit_tables import print_model_audit
    from flashtune.cli.render import write_json

    result = audit(_recorded(sources), held_out=held_out)
    if as_json:
        write_json(_model_json(result))
    else:
        print_model_audit(result)


def _model_json(result: ModelAudit) -> dict[str, Any]:
    return {
        "schema_version": 1,
        **_scores_json(result.shapes),
        "held_out": [
            {
                "calibrated_on": [name._asdict() for name in half.calibrated_on],
                "constants": half.calibrated,
                **_scores_json(half.shapes),
            }
            for half in result.held_out
        ],
        "rules": [
            {**asdict(score), "best": None if score.best is None else str(score.best)}
            for score in result.rules
        ],
        "skipped": result.skipped,
    }


def _scores_json(shapes: tuple[ShapeScore, ...]) -> dict[str, Any]:
    from flashtune.audit_model import summary

    rows = [
        {**asdict(shape), "best": str(shape.best), "first": str(shape.first)} for shape in shapes
    ]
    return {"shapes": rows, **summary(shapes)}


@app.command("registers")
@guarded
def registers(
    samples: Samples = 100,
    seed: Seed = None,
    gpu: Targets = "all",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Compare predicted registers and spills with the installed Triton's. Needs no GPU.

    Compiles random configs that fit to the end, a second each, and says how many registers were in
    the predicted range, how many spilling configs were predicted to (recall), and how many of the
    others (false alarms).

    Examples:

      flashtune audit registers --gpu h200

      flashtune audit registers --samples 500 --seed 1 --json
    """
    from flashtune.audit_registers import audit, by_target, draw_fitting, score
    from flashtune.cli.audit_tables import print_register_audit
    from flashtune.cli.render import counting, write_json

    found, cards, chosen, n_jobs = _sampling(samples, seed, gpu, jobs)
    cases = draw_fitting(samples, chosen, cards, triton_version())
    with counting("compiling", len(cases)) as done:
        findings = audit(cases, n_jobs, done)
    scores = {**by_target(findings), "all": score(findings)}
    if as_json:
        documents = {
            name: {**asdict(s), "recall": s.recall, "false_alarm_rate": s.false_alarm_rate}
            for name, s in scores.items()
        }
        write_json({"schema_version": 1, "triton": found, "seed": chosen, "scores": documents})
    else:
        print_register_audit(scores, found, chosen)


@app.command("budget")
@guarded
def budget(
    samples: Samples = 200,
    seed: Seed = None,
    gpu: Targets = "all",
    kernel: Annotated[
        str, typer.Option("--kernel", help="all, a name, or your own FILE.py.")
    ] = "all",
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Compare predicted shared memory with the installed Triton's. Needs no GPU.

    Draws kernels, head dimensions, dtypes, masks, tiles, warps, stages and alignments at random and
    compiles each up to the allocation of shared memory. Exit code 1: some prediction was wrong.

    Examples:

      flashtune audit budget

      flashtune audit budget --samples 2000 --gpu h200 --seed 1

      flashtune audit budget --kernel v9_ping_pong --gpu h200
    """
    from flashtune.audit_budget import audit, draw
    from flashtune.cli.audit_tables import print_budget_audit
    from flashtune.cli.render import counting, write_json
    from flashtune.kernels import find_kernel

    kernels = () if kernel == "all" else (find_kernel(kernel),)
    found, cards, chosen, n_jobs = _sampling(samples, seed, gpu, jobs)
    cases = draw(samples, chosen, cards, kernels)
    with counting("compiling", len(cases)) as done:
        report = audit(cases, triton_version(), n_jobs, done)
    if as_json:
        write_json(_budget_json(report, found, chosen))
    else:
        print_budget_audit(report, found, chosen)
    if report.count("wrong"):
        raise typer.Exit(NO)


def _sampling(
    samples: int, seed: int | None, gpu: str, jobs: int | None
) -> tuple[str, list[GpuSpec], int, int]:
    """The installed Triton, the cards, the seed and the compile processes of a random audit."""
    import secrets

    from flashtune.fan_out import default_jobs
    from flashtune.gpu import known_gpus, target_gpu
    from flashtune.versions import usable_triton

    for option, value in (("samples", samples), ("jobs", 1 if jobs is None else jobs)):
        if value < 1:
            raise FlashtuneError(f"--{option} {value}: too few", f"--{option} takes 1 or more.")
    cards = list(known_gpus().values()) if gpu == "all" else [target_gpu(gpu)]
    chosen = secrets.randbelow(2**31) if seed is None else seed
    return usable_triton(), cards, chosen, jobs or default_jobs()


def _budget_json(report: Report, triton: str, seed: int) -> dict[str, Any]:
    """``total`` is all but what the compiler refused: exact + not_modelled + misses."""
    return {
        "schema_version": 1,
        "triton": triton,
        "seed": seed,
        "exact": report.count("exact"),
        "not_modelled": report.count("not modelled"),
        "total": len(report.findings) - report.count("refused"),
        "misses": [
            {
                "kernel": f.case.kernel.name,
                "gpu": f.case.gpu.name,
                "cc": f.case.gpu.cc,
                **asdict(f.case.problem),
                "config": str(f.case.config),
                "odd_address": f.case.odd_address,
                "odd_strides": f.case.odd_strides,
                "predicted": f.predicted,
                "compiled": f.compiled,
            }
            for f in report.of_kind("wrong")
        ],
        "refused": [{"case": str(f.case), "reason": f.reason} for f in report.of_kind("refused")],
    }
