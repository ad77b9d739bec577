"""The entry point: the commands, and what becomes of their errors."""

from __future__ import annotations

import typer

from flashtune.cli import audit, budget, env, export_autotune, sweep

app = typer.Typer(
    name="flashtune",
    help="Tune Triton FlashAttention-2 kernels: budget, sweep, export.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("sweep")(sweep.command)
app.command("budget")(budget.command)
app.command("export-autotune")(export_autotune.command)
app.command("env")(env.command)
app.add_typer(audit.app, name="audit")


def _version(value: bool) -> None:
    if value:
        from flashtune import __version__

        typer.echo(f"flashtune {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line on sys.argv."""
    app()
