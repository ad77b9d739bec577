"""Tables, progress and JSON: the only place that knows rich."""

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
    from flashtune.audit_budget import Report
    from flashtune.audit_model import ModelAudit, RuleScore, ShapeScore
    from flashtune.audit_registers import RegisterScore
    from flashtune.explain import Explanation
    from flashtune.gpu import GpuSpec
    from flashtune.plan import ProblemPlan
    from flashtune.sweep import Event, SweepResult


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the guard's to answer; rich would exit with 1, which is a "no"


def _out() -> Console:
    # Into a pipe or a file there is no width to keep to, and a cut table is a lost result.
    console = _Console(highlight=False)
    return console if console.is_terminal else _Console(highlight=False, width=200)


def _err() -> Console:
    return _Console(stderr=True, highlight=False)


def write_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout; a number that is not finite becomes null."""
    sys.stdout.write(json.dumps(_finite(document), indent=2, default=str) + "\n")


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
        _out().print(escape(f"{name:<{width}}  {'-' if value is None else value}"), soft_wrap=True)


# -- budget


def print_budgets(title: str, gpu: GpuSpec, explained: Sequence[Explanation]) -> None:
    """Several configs as a table, and why not for each that is left out."""
    out = _out()
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
            _text(blocks),
            ", ".join(line.binds(gpu)).replace(" memory", "") if blocks else "-",
            "-" if waves is None else f"{waves:.2f}",
            "-" if e.cost is None else f"{e.cost.predicted_ms:.4g}",
        ]
        if measured:
            c = line.compiled
            cells += [_text(c and c.shared), _text(c and c.regs), _text(c and c.spills)]
        table.add_row(*map(escape, cells), escape(verdict_word(line)))
    out.print(table)
    out.print(
        "shared, compiled: bytes a block. accum.: registers a thread for S and O, of the cap."
        " spills?: how likely, predicted.",
        soft_wrap=True,
    )
    for e in explained:
        if not e.line.verdict.kept:
            near = "" if e.nearest is None else f". Nearest to run: {e.nearest.budget.config}"
            reason = f"{e.line.budget.config}: {e.line.verdict.reason}{near}"
            out.print(escape(reason), soft_wrap=True)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


# -- audit


def print_model_audit(result: ModelAudit) -> None:
    """A table of the shapes with the shipped constants, and one for each held-out half."""
    out = _out()
    out.print("[bold]With the shipped constants[/bold]")
    _print_scores(out, result.shapes)
    for half in result.held_out:
        kernels, Ds, lengths = (
            ", ".join(dict.fromkeys(f"{getattr(name, axis)}" for name in half.calibrated_on))
            for axis in ("kernel", "D", "N")
        )
        out.print(f"\n[bold]Constants fitted to {kernels}, D = {Ds}, N = {lengths}[/bold]")
        _print_scores(out, half.shapes)
        values = ", ".join(f"{name} {value:.4g}" for name, value in half.calibrated.items())
        out.print(values, soft_wrap=True)
    out.print("\n[bold]What the budget's rules leave out[/bold]")
    _print_rules(out, result.rules)
    for reason in result.skipped:
        warn(f"not scored: {reason}")


def _print_rules(out: Console, scores: tuple[RuleScore, ...]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rule", no_wrap=True)
    for name in ("left out of each shape", "fastest left out, of the best"):
        table.add_column(name, justify="right", no_wrap=True)
    for rule in sorted({score.rule for score in scores}, key=lambda rule: (rule == "all", rule)):
        mine = [score for score in scores if score.rule == rule]
        counts = sorted(score.left_out for score in mine)
        shares = sorted(score.best_share for score in mine if score.best_share is not None)
        of = mine[0].configs
        table.add_row(
            rule,
            f"{counts[0]} to {counts[-1]} of {of}",
            f"{shares[0]:.0%} to {shares[-1]:.0%}" if shares else "none was timed",
        )
    out.print(table)


def _print_scores(out: Console, shapes: tuple[ShapeScore, ...]) -> None:
    from flashtune.audit_model import summary

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape", no_wrap=True)
    for name in ("best", "ms", "its place", "first choice", "predicted", "first 8", "first",
                 "rank corr.", "of kept"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for s in shapes:
        cells = [
            f"{s.kernel} {s.gpu} {s.problem}", str(s.best), f"{s.best_ms:.4g}", str(s.best_place),
            str(s.first), f"{s.first_predicted_ms:.4g}", f"{s.first8_share:.1%}",
            f"{s.first_share:.1%}", f"{s.rank_correlation:.2f}", f"{s.kept_correlation:.2f}",
        ]  # fmt: skip
        table.add_row(*map(escape, cells))
    out.print(table)
    totals = summary(shapes)
    out.print(
        f"of the best: first 8 worst {totals['first8_worst']:.1%}, mean"
        f" {totals['first8_mean']:.1%}; first choice worst {totals['first_worst']:.1%}, mean"
        f" {totals['first_mean']:.1%}",
        soft_wrap=True,
    )


# -- audit budget


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


def print_budget_audit(report: Report, triton: str, seed: int) -> None:
    """How the cases ended on each target, and each one that was not exact."""
    out = _out()
    kinds = ("exact", "not modelled", "wrong", "refused")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cc", "dtype", *kinds):
        table.add_column(name, justify="left" if name == "dtype" else "right", no_wrap=True)
    for (cc, dtype), counts in report.by_target().items():
        table.add_row(cc, dtype, *(str(counts[kind]) for kind in kinds))
    out.print(table)
    for kind in kinds[2:]:
        for f in report.of_kind(kind):
            said = f"predicted {_text(f.predicted)}, Triton says {_text(f.compiled)}"
            said = str(f.reason) if kind == "refused" else said
            out.print(escape(f"{kind}: {f.case}: {said}"), soft_wrap=True)
    out.print(
        f"Triton {triton}, seed {seed}: of {len(report.findings):,},"
        + ",".join(f" {report.count(kind):,} {kind}" for kind in kinds)
    )


def print_register_audit(scores: Mapping[str, RegisterScore], triton: str, seed: int) -> None:
    """One line for each compute capability, and one for all."""
    out = _out()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cc", "compiled", "registers in range", "spilled", "recall", "false alarms",
                 "refused", "predicted"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for cc, s in scores.items():
        table.add_row(
            cc, str(s.total), f"{s.in_range} of {s.free}", str(s.spilled), _percent(s.recall),
            _percent(s.false_alarm_rate), str(s.refused), str(s.refusals_predicted),
        )  # fmt: skip
    out.print(table)
    out.print(
        "registers in range: of the configs whose registers no cap decided. refused: by ptxas for"
        f" want of registers. Refusals predicted that compiled: {scores['all'].wrong_refusals}.",
        soft_wrap=True,
    )
    out.print(f"Triton {triton}, seed {seed}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


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
    out = _out()
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
    out = _out()
    provenance = result.file.provenance
    versions = f"Triton {provenance.triton}, torch {provenance.torch}"
    out.print(escape(f"{provenance.kernel} on {provenance.gpu}, {versions}"), soft_wrap=True)
    if provenance.measured:
        out.print(_winners_table(result))
        out.print("flash, cuDNN: our speed as a share of SDPA's with that backend, same run.")
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
    names = ("N", "mask", "best config", "ms", "95%", "TFLOP/s", "flash", "cuDNN",
             "regs", "spills")  # fmt: skip
    for name in names:
        left = name in ("mask", "best config")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for problem in result.problems:
        row = winner(result, problem)
        length = f"{problem.N}" if problem.N == problem.N_k else f"{problem.N}x{problem.N_k}"
        mask = "causal" if problem.causal else "full"
        if row is None or row.ms is None or row.tflops is None:
            table.add_row(length, mask, "nothing valid", *["-"] * 7)
            continue
        half = (
            None if row.ms_lo is None or row.ms_hi is None else (row.ms_hi - row.ms_lo) / 2 / row.ms
        )
        interval = "-" if half is None else f"±{half:.1%}"
        shares = sdpa_shares(result, row)
        table.add_row(
            length, mask, str(row.config), f"{row.ms:.4f}", interval, f"{row.tflops:.1f}",
            shares["flash"], shares["cudnn"], _text(row.regs), _text(row.spills),
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
            str(place), str(row.config), _text(row.shared), _text(row.regs), _text(row.spills),
            _text(row.blocks_per_sm), waves, str(row.status),
        )  # fmt: skip
    return table


def winner(result: SweepResult, problem: Problem) -> Row | None:
    """The timed row with the smallest median; a row that carries another's result only if alone."""
    timed = [r for r in result.rows() if r.problem == problem and r.status is Status.TIMED]
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
