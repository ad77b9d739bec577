"""``flashtune bench``: the articles' harness."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtune.cli.guard import INTERRUPTED, NO, guarded
from flashtune.cli.options import (
    AsJson,
    Batch,
    Both,
    Causal,
    Dtype,
    GpuName,
    HeadDim,
    Heads,
    KeyLength,
    KvHeads,
    Lengths,
    problems,
    shape_problems,
    triton_version,
)
from flashtune.errors import FlashtuneError
from flashtune.records import Problem, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flashtune.bench import Bench, Line, ShapeRuns, Spread
    from flashtune.entries import Entry
    from flashtune.gpu import GpuSpec
    from flashtune.roofline import Roofline, Roofs

    Plan = Sequence[tuple[Problem, Sequence[Entry]]]

_OF_THE_SHAPE = {
    "n": "--N", "n_k": "--N-k", "h": "--H", "h_kv": "--H-kv", "d": "--D", "causal": "--causal",
    "both": "--both",
}  # fmt: skip


@guarded
def command(
    context: typer.Context,
    n: Lengths = "512,1024,2048,4096",
    causal: Causal = False,
    both: Both = False,
    b: Batch = 4,
    h: Heads = 8,
    h_kv: KvHeads = None,
    n_k: KeyLength = None,
    d: HeadDim = 64,
    dtype: Dtype = "bf16",
    shapes: Annotated[
        str | None,
        typer.Option(
            "--shapes",
            help="A real model's shapes: llama-3-8b, whisper, …",
            rich_help_panel="Problem",
        ),
    ] = None,
    kernels: Annotated[
        str | None, typer.Option("--kernels", help="v0_baseline,v6_heads_first; the whole ladder.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", help="How often to run the harness.")] = 5,
    sweeps: Annotated[
        Path | None,
        typer.Option("--sweeps", help="Folder of recorded sweeps, for the configs; sweeps."),
    ] = None,
    roofline: Annotated[
        bool, typer.Option("--roofline", help="Also the roofline's arithmetic. Needs no GPU.")
    ] = False,
    gpu: GpuName = "auto",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown instead of a table.")
    ] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option("--out", help="A file for the JSON, too.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out's file.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress.")] = False,
) -> None:
    """Time the ladder's kernels and SDPA's backends in interleaved runs.

    With no GPU only --roofline has something to say.

    Examples:

      flashtune bench --N 512,1024,2048,4096 --both

      flashtune bench --shapes llama-3-8b --kernels v6_heads_first --markdown

      flashtune bench --N 4096 --roofline --gpu rtx-4070-super
    """  # fmt: skip
    from flashtune.gpu import target_gpu

    _check_options(context, runs, shapes, markdown, as_json, out, force)
    asked = (
        shape_problems(shapes, b, dtype)
        if shapes is not None
        else problems(n, n_k, b, h, h_kv, d, dtype, causal, both)
    )
    card = target_gpu(gpu)
    if not card.present and not roofline:
        raise _no_gpu(card, gpu)
    plan = _plan(asked, kernels, card, sweeps)
    result = _measured(plan, card, runs, quiet) if card.present else None
    roofs, found = _rooflines(plan, card, result) if roofline else (None, [])
    document = as_document(result, found, roofs, card)
    if as_json:
        from flashtune.cli.render import write_json

        write_json(document)
    else:
        _print(result, found, roofs, card, markdown)
    if out is not None:
        _write(out, document, force)
    if result is not None:
        _exit_code(result)


def _check_options(
    context: typer.Context,
    runs: int,
    shapes: str | None,
    markdown: bool,
    as_json: bool,
    out: Path | None,
    force: bool,
) -> None:
    if runs < 1:
        raise FlashtuneError(f"--runs {runs}: at least one run is needed", "Try --runs 5.")
    if markdown and as_json:
        raise FlashtuneError(
            "--markdown and --json: stdout takes one of them", "--out FILE writes the JSON, too."
        )
    for name, option in _OF_THE_SHAPE.items() if shapes is not None else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise FlashtuneError(
                f"--shapes {shapes} and {option}: the set says it already", f"Leave out {option}."
            )
    if out is None:
        return
    if out.exists() and not force:  # said before the work, and not only after it
        raise FlashtuneError(f"{out} exists.", "Choose another name, or replace it with --force.")
    if not out.absolute().parent.is_dir():
        raise FlashtuneError(f"{out}: its folder does not exist.", "Create the folder first.")


def _no_gpu(card: GpuSpec, asked: str) -> FlashtuneError:
    from flashtune.gpu import present_gpu

    here = present_gpu()
    what = (
        "no NVIDIA GPU is present (no driver, or CUDA_VISIBLE_DEVICES hides it)"
        if here is None
        else f"--gpu {asked}: the card here is {here.title}, not {card.title}"
    )
    return FlashtuneError(
        f"Nothing can be timed: {what}.",
        "Run it where there is one; without, --roofline counts, and 'flashtune budget' predicts.",
    )


def _plan(asked: list[Problem], kernels: str | None, card: GpuSpec, sweeps: Path | None) -> Plan:
    from flashtune.entries import entries, entry_names

    if sweeps is not None and not sweeps.is_dir():
        raise FlashtuneError(f"--sweeps {sweeps}: there is no such folder", "Leave out --sweeps.")
    names, triton = entry_names(kernels), triton_version()
    folder = sweeps or Path("sweeps")
    return [(problem, entries(names, problem, card, folder, triton)) for problem in asked]


def _measured(plan: Plan, card: GpuSpec, runs: int, quiet: bool) -> Bench:
    import shlex

    from flashtune.bench_on_gpu import run
    from flashtune.cli.render import counting, warn

    def silent(what: str, total: int) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)

    line = shlex.join(["flashtune", *sys.argv[1:]])
    try:
        return run(plan, card, runs, line, silent if quiet else counting)
    except KeyboardInterrupt:
        warn("Interrupted.\nNothing is kept of a bench that did not end.")
        raise typer.Exit(INTERRUPTED) from None


def _rooflines(plan: Plan, card: GpuSpec, result: Bench | None) -> tuple[Roofs, list[Roofline]]:
    """For each problem and kernel, with the config that ran or would be tried first."""
    from flashtune.roofline import measured_roofs, published_roofs, roofline

    roofs = published_roofs(card, plan[0][0].dtype)
    chosen = [(p, e.kernel, e.configs[0]) for p, entries in plan for e in entries if e.configs]
    if result is not None:
        from flashtune.stats import median

        ceilings = result.ceilings
        roofs = measured_roofs(roofs, median(ceilings.matmul_tflops), median(ceilings.copy_gb_s))
        chosen = [
            (shape.problem, kernel.entry.kernel, kernel.config)
            for shape in result.shapes
            for kernel in shape.kernels
            if kernel.config is not None
        ]
    return roofs, [roofline(p, kernel, config, card, roofs) for p, kernel, config in chosen]


def _print(
    result: Bench | None,
    found: list[Roofline],
    roofs: Roofs | None,
    card: GpuSpec,
    as_markdown: bool,
) -> None:
    from flashtune.cli.bench_tables import bench_page, markdown, print_page, roofline_page

    pages = [] if result is None else [bench_page(result)]
    if roofs is not None and found:
        pages.append(roofline_page(found, roofs, card))
    if as_markdown:
        sys.stdout.write("\n".join(map(markdown, pages)))
        return
    for page in pages:
        print_page(page)


def _write(out: Path, document: dict[str, Any], force: bool) -> None:
    from flashtune.cli.render import json_text
    from flashtune.export import write_new

    write_new(out, json_text(document), force)


def _exit_code(result: Bench) -> None:
    """1 where a kernel failed in a way nobody has classified, or no kernel was timed."""
    kernels = [kernel for shape in result.shapes for kernel in shape.kernels]
    crashed = any(kernel.failure is Status.CRASHED for kernel in kernels)
    if crashed or not any(kernel.ms for kernel in kernels):
        raise typer.Exit(NO)


# -- JSON


def as_document(
    result: Bench | None, found: list[Roofline], roofs: Roofs | None, card: GpuSpec
) -> dict[str, Any]:
    """The JSON document. ``measured`` is false, and what is measured null, with no GPU."""
    rooflines = None if roofs is None else {
        "roofs": asdict(roofs),
        "shapes": [_roofline_as_json(r) for r in found],
    }  # fmt: skip
    if result is None:
        return {
            "schema_version": 1, "measured": False, "gpu": card.name, "shapes": None,
            "ceilings": None, "roofline": rooflines,
        }  # fmt: skip
    from flashtune.bench import spread

    ceilings = result.ceilings
    return {
        "schema_version": 1,
        "measured": True,
        "gpu": card.name,
        "title": result.title,
        "started": result.started.isoformat(),
        "command": result.command,
        "provenance": asdict(result.provenance),
        "cudnn": result.cudnn,
        "runs": result.runs,
        "dtype": result.dtype,
        "notes": result.notes,
        "ceilings": {
            "matmul_tflops": _spread(spread(ceilings.matmul_tflops)),
            "copy_gb_s": _spread(spread(ceilings.copy_gb_s)),
            "sm_clock_mhz": ceilings.sm_clock_mhz,
        },
        "shapes": [_shape_as_json(shape, result) for shape in result.shapes],
        "roofline": rooflines,
    }


def _shape_as_json(shape: ShapeRuns, result: Bench) -> dict[str, Any]:
    from flashtune.bench import lines

    found = lines(shape, result.ceilings)
    return {
        "problem": asdict(shape.problem),
        "sm_clock_mhz": shape.sm_clock_mhz,
        "throttle": shape.throttle,
        "kernels": [_kernel_as_json(line) for line in found if not line.sdpa],
        "sdpa": [
            {"backend": line.name, "reason": line.reason, **_times(line)}
            for line in found
            if line.sdpa
        ],
    }


def _kernel_as_json(line: Line) -> dict[str, Any]:
    kernel = line.kernel
    assert kernel is not None  # it is no SDPA backend
    return {
        "name": line.name,
        "kernel": kernel.entry.kernel.name,
        "config": None if kernel.config is None else str(kernel.config),
        "configs": [str(config) for config in kernel.entry.configs],
        "source": kernel.entry.source,
        "status": str(kernel.failure or Status.TIMED),
        "reason": kernel.reason,
        "left_out": kernel.left_out,
        "max_abs_err": kernel.max_abs_err,
        **_times(line),
        "of_sdpa": {backend: _spread(share) for backend, share in line.shares.items()},
    }


def _times(line: Line) -> dict[str, Any]:
    return {
        "runs_ms": line.runs_ms,
        "ms": _spread(line.ms),
        "tflops": line.tflops,
        "of_matmul": line.of_matmul,
        "of_copy": line.of_copy,
    }


def _spread(value: Spread | None) -> dict[str, float] | None:
    if value is None:
        return None
    return {"median": value.median, "min": value.low, "max": value.high}


def _roofline_as_json(r: Roofline) -> dict[str, Any]:
    derived = {"dram_intensity": r.dram_intensity, "l2_intensity": r.l2_intensity}
    return {**asdict(r), "config": str(r.config), **derived, "longest": r.bound}
