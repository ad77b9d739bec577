"""The entry point: the commands, and what becomes of their errors."""

from __future__ import annotations

import sys

import typer


def command_line(asked: str | None = None) -> typer.Typer:
    """The command line; only the command called ``asked``, where it is one.

    Loading and preparing the others would take a short command a fifth of its time.
    """
    app = typer.Typer(
        name="flashtune",
        help="Tune Triton FlashAttention-2 kernels: budget, sweep, export, bench.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    adders = {
        "sweep": _add_sweep,
        "budget": _add_budget,
        "export-autotune": _add_export_autotune,
        "bench": _add_bench,
        "env": _add_env,
        "audit": _add_audit,
    }
    for name, add in adders.items():
        if asked not in adders or asked == name:
            add(app)
    return app


def _add_sweep(app: typer.Typer) -> None:
    from flashtune.cli import sweep

    app.command("sweep")(sweep.command)


def _add_budget(app: typer.Typer) -> None:
    from flashtune.cli import budget

    app.command("budget")(budget.command)


def _add_export_autotune(app: typer.Typer) -> None:
    from flashtune.cli import export_autotune

    app.command("export-autotune")(export_autotune.command)


def _add_bench(app: typer.Typer) -> None:
    from flashtune.cli import bench

    app.command("bench")(bench.command)


def _add_env(app: typer.Typer) -> None:
    from flashtune.cli import env

    app.command("env")(env.command)


def _add_audit(app: typer.Typer) -> None:
    from flashtune.cli import audit

    app.add_typer(audit.app, name="audit")


def _version(value: bool) -> None:
    if value:
        from flashtune import __version__

        typer.echo(f"flashtune {__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line on sys.argv."""
    try:
        run = command_line(sys.argv[1] if len(sys.argv) > 1 else None)
    except KeyboardInterrupt:  # while the command was still being loaded
        sys.exit(130)
    run()
