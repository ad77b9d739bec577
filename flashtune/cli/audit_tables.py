"""The audits' tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashtune.cli.render import stdout_console, text, warn

if TYPE_CHECKING:
    from flashtune.audit_budget import Report
    from flashtune.audit_model import ModelAudit, RuleScore, ShapeScore
    from flashtune.audit_registers import RegisterScore
    from flashtune.audit_search import SearchAudit


def print_model_audit(result: ModelAudit) -> None:
    """A table of the shapes with the shipped constants, and one for each held-out half."""
    out = stdout_console()
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


def print_search_audit(result: SearchAudit) -> None:
    """What the race would have chosen on each shape, and what it would have cost."""
    out = stdout_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape", no_wrap=True)
    for name in ("best", "chosen", "regret", "ties", "compiled", "finalists", "launches", "race s",
                 "exhaustive s"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for s in result.shapes:
        cells = [
            f"{s.kernel} {s.gpu} {s.problem}", str(s.best), str(s.chosen), f"{s.regret:.2%}",
            str(s.ties), str(s.compiled), str(s.finalists), f"{s.launches:,}", f"{s.race_s:.2f}",
            f"{s.exhaustive_s:.0f}",
        ]  # fmt: skip
        table.add_row(*map(escape, cells))
    out.print(table)
    out.print(
        f"regret: worst {result.worst_regret:.2%}, mean {result.mean_regret:.3%}. Simulated, with"
        f" {result.jobs} compile processes: {result.race_s:.0f} s, and {result.exhaustive_s:.0f} s"
        f" for compiling and timing everything: {result.speedup:.0f}x.",
        soft_wrap=True,
    )
    for reason in result.skipped:
        warn(f"not replayed: {reason}")


def print_budget_audit(report: Report, triton: str, seed: int) -> None:
    """How the cases ended on each target, and each one that was not exact."""
    out = stdout_console()
    kinds = ("exact", "not modelled", "wrong", "refused")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cc", "dtype", *kinds):
        table.add_column(name, justify="left" if name == "dtype" else "right", no_wrap=True)
    for (cc, dtype), counts in report.by_target().items():
        table.add_row(cc, dtype, *(str(counts[kind]) for kind in kinds))
    out.print(table)
    for kind in kinds[2:]:
        for f in report.of_kind(kind):
            said = f"predicted {text(f.predicted)}, Triton says {text(f.compiled)}"
            said = str(f.reason) if kind == "refused" else said
            out.print(escape(f"{kind}: {f.case}: {said}"), soft_wrap=True)
    out.print(
        f"Triton {triton}, seed {seed}: of {len(report.findings):,},"
        + ",".join(f" {report.count(kind):,} {kind}" for kind in kinds)
    )


def print_register_audit(scores: Mapping[str, RegisterScore], triton: str, seed: int) -> None:
    """One line for each compute capability, and one for all."""
    out = stdout_console()
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
