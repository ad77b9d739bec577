"""Tables, progress and JSON. With audit_tables.py and bench_tables.py, all that knows rich."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from flashtune.cli.card import verdict_word
from flashtune.records import Problem, Status
from flashtune.results import Recommendation, Row

if TYPE_CHECKING:
    from flashtune.explain import Explanation
    from flashtune.gpu import GpuSpec
    from flashtune.plan import ProblemPlan
    from flashtune.sweep import Event, SweepResult


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the guard's to answer; rich would exit with 1, which is a "no"


def stdout_console() -> Console:
    """Where results go."""
    # Into a pipe or a file there is no width to keep to, and a cut table is a lost result.
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=200)


def _err() -> Console:
    return _Console(stderr=True, highlight=False)


def write_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json_text(document))


def json_text(document: Mapping[str, Any]) -> str:
    """A JSON document; a number that is not finite becomes null."""
    return json.dumps(_finite(document), indent=2, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def warn(text: str) -> None:
    """One line for the user on stderr."""
    _err().print(escape(text), soft_wrap=True)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        stdout_console().print(
            escape(f"{name:<{width}}  {'-' if value is None else value}"), soft_wrap=True
        )


# -- budget


def print_budgets(title: str, gpu: GpuSpec, explained: Sequence[Explanation]) -> None:
    """Several configs as a table, and why not for each that is left out."""
    out = stdout_console()
    out.print(escape(title), soft_wrap=True)
    measured = any(e.line.compiled for e in explained)
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("config", "shared", "accum.", "repeats", "spills?", "blocks", "held by", "waves",
             "predicted ms")  # fmt: skip
    for name in names:
        left = name in ("config", "held by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    if measured:
        for name in ("compiled", "regs", "spills"):
            table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for e in explained:
        line, budget, blocks = e.line, e.line.budget, e.line.blocks_per_sm(gpu)
        waves = budget.waves(blocks)
        cells = [
            str(budget.config),
            "not modelled" if budget.shared is None else f"{budget.shared:,}",
            f"{budget.accumulators:g}/{budget.register_cap}",
            f"{budget.repeats:g}",
            f"{budget.registers.spill_probability:.0%}",
            text(blocks),
            ", ".join(line.binds(gpu)).replace(" memory", "") if blocks else "-",
            "-" if waves is None else f"{waves:.2f}",
            "-" if e.cost is None else f"{e.cost.predicted_ms:.4g}",
        ]
        if measured:
            c = line.compiled
            cells += [text(c and c.shared), text(c and c.regs), text(c and c.spills)]
        table.add_row(*map(escape, cells), escape(verdict_word(line)))
    out.print(table)
    out.print(
        "shared, compiled: bytes a block. accum.: registers a thread for S and O, of the cap."
        " spills?: how likely, predicted.",
        soft_wrap=True,
    )
    if any(e.line.shared is None for e in explained):
        out.print(
            "ask the compiler: nobody has modelled what shared memory these take; --compile asks"
            " the compiler whether they fit.",
            soft_wrap=True,
        )
    for e in explained:
        if not e.line.verdict.kept:
            near = "" if e.nearest is None else f". Nearest to run: {e.nearest.budget.config}"
            reason = f"{e.line.budget.config}: {e.line.verdict.reason}{near}"
            out.print(escape(reason), soft_wrap=True)


def text(value: object) -> str:
    """A cell: a dash where there is nothing, thousands with commas."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A call a finished item: a bar on a terminal, one line elsewhere; on stderr."""
    console = _err()
    if not console.is_terminal:
        console.print(escape(f"{what}: {total}"), soft_wrap=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(escape(what), total=total)
        yield lambda: bars.advance(task)


# -- sweep


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[Event], None]]:
    """A receiver of the sweep's events: bars on a terminal, a line a stage elsewhere."""
    from flashtune.sweep import Advanced, Said, Started

    console = _err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[best]}"),
    )
    bars = Progress(*columns, console=console, disable=quiet or not console.is_terminal)

    def receive(event: Event) -> None:
        if isinstance(event, Started):
            if not console.is_terminal and not quiet:
                console.print(escape(f"{event.stage}: {event.total}"), soft_wrap=True)
            bars.add_task(escape(event.stage), total=event.total, best="")
        elif isinstance(event, Advanced):
            task = bars.tasks[-1].id if bars.tasks else None
            if task is not None:
                best = f"best {event.best[1]} {event.best[2]:.4g} ms" if event.best else ""
                bars.update(task, advance=1, best=best)
        elif isinstance(event, Said) and not quiet:
            console.print(escape(event.text), soft_wrap=True)

    with bars:
        yield receive


def print_plan(plans: list[ProblemPlan], total: int) -> None:
    """What a sweep would do: counts with reasons, and what it would try first."""
    out = stdout_console()
    for plan in plans:
        out.print(f"[bold]{escape(str(plan.problem))}[/bold]", soft_wrap=True)
        out.print(f"  {total} configs: {len(plan.tried)} tried, {len(plan.ranked)} ranked too low,"
                  f" {len(plan.pruned)} left out")  # fmt: skip
        for (kind, rule), count in sorted(plan.reasons().items()):
            out.print(f"  {count:>5} {kind}: {rule}")
        first = ", ".join(str(config) for config in plan.tried[:10])
        out.print(f"  first: {first}", soft_wrap=True)
    out.print("Nothing was run.")


def print_sweep(result: SweepResult, recommendation: Recommendation | None) -> None:
    """The winners (or, unmeasured, the first that compiled), and how every config ended."""
    out = stdout_console()
    provenance = result.file.provenance
    versions = f"Triton {provenance.triton}, torch {provenance.torch}"
    out.print(escape(f"{provenance.kernel} on {provenance.gpu}, {versions}"), soft_wrap=True)
    if provenance.measured:
        out.print(_winners_table(result))
        out.print(
            "flash, cuDNN: our speed as a share of SDPA's with that backend, same run. equals:"
            " configs that the race could not tell from the best, and within how much.",
            soft_wrap=True,
        )
    else:
        out.print(
            "[bold]Nothing was measured: there is no GPU here.[/bold] In the order of promise:"
        )
        out.print(_compiled_table(result))
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(result.counts().items()))
    out.print(escape(f"{sum(result.counts().values()):,} rows: {counts}"), soft_wrap=True)
    if recommendation is not None:
        listed = ", ".join(str(item.config) for item in recommendation.configs)
        loss = recommendation.worst_loss
        worth = "" if loss is None else f" (at worst {loss:.1%} behind the best of a shape)"
        word = "Recommended" if recommendation.measured else "Recommended, unmeasured"
        out.print(escape(f"{word}: {listed}{worth}"), soft_wrap=True)


def _winners_table(result: SweepResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = ("N", "mask", "best config", "ms", "95%", "equals", "TFLOP/s", "flash", "cuDNN",
             "regs", "spills")  # fmt: skip
    for name in names:
        left = name in ("mask", "best config")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for problem in result.problems:
        row = winner(result, problem)
        length = f"{problem.N}" if problem.N == problem.N_k else f"{problem.N}x{problem.N_k}"
        mask = "causal" if problem.causal else "full"
        if row is None or row.ms is None or row.tflops is None:
            table.add_row(length, mask, "nothing valid", *["-"] * 8)
            continue
        half = (
            None if row.ms_lo is None or row.ms_hi is None else (row.ms_hi - row.ms_lo) / 2 / row.ms
        )
        interval = "-" if half is None else f"±{half:.1%}"
        shares = sdpa_shares(result, row)
        table.add_row(
            length, mask, str(row.config), f"{row.ms:.4f}", interval, _equals(result, problem),
            f"{row.tflops:.1f}",
            shares["flash"], shares["cudnn"], text(row.regs), text(row.spills),
        )  # fmt: skip
    return table


def _compiled_table(result: SweepResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("place", "config", "shared", "regs", "spills", "blocks/SM", "waves", "status"):
        left = name in ("config", "status")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    shown = result.tried(result.plans[0])[:10]
    for place, row in enumerate(shown, start=1):
        waves = "-" if row.waves is None else f"{row.waves:.2f}"
        table.add_row(
            str(place), str(row.config), text(row.shared), text(row.regs), text(row.spills),
            text(row.blocks_per_sm), waves, str(row.status),
        )  # fmt: skip
    return table


def _equals(result: SweepResult, problem: Problem) -> str:
    """How many configs could not be told from the winner, and within how much."""
    verdict = result.verdict(problem)
    if verdict is None:
        return "-"
    if not verdict.ties:
        return "none"
    return f"{len(verdict.ties)} in {max(tie.at_most for tie in verdict.ties):.1%}"


def winner(result: SweepResult, problem: Problem) -> Row | None:
    """The timed row that the race chose, or else the one with the smallest median; a row that
    carries another's result only if alone."""
    timed = [r for r in result.rows() if r.problem == problem and r.status is Status.TIMED]
    verdict = result.verdict(problem)
    for row in timed:
        if verdict is not None and row.config == verdict.chosen:
            return row
    return min(timed, key=lambda r: (r.ms, r.same_as is not None, r.config), default=None)


def sdpa_shares(result: SweepResult, row: Row) -> dict[str, str]:
    """SDPA's ms over ours, per backend timed in the same run; or why there is none."""
    shares = {"flash": "-", "cudnn": "-"}
    for sdpa in result.file.sdpa:
        if sdpa.problem == row.problem and sdpa.run_id == row.run_id:
            timing = sdpa.timing
            shares[timing.backend] = (
                "refused" if timing.ms is None or row.ms is None else f"{timing.ms / row.ms:.0%}"
            )
    return shares
