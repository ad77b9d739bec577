"""``flashtune export-autotune``: sweeps -> a Python file for @triton.autotune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashtune.cli.guard import guarded
from flashtune.errors import FlashtuneError

if TYPE_CHECKING:
    from flashtune.results import SweepFile


@guarded
def command(
    target: Annotated[Path, typer.Argument(help="The Python file to write: configs.py.")],
    sources: Annotated[
        list[Path] | None, typer.Option("--from", help="Results file or folder; several are fine.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU's sweeps.")] = None,
    kernel: Annotated[str | None, typer.Option("--kernel", help="Only this kernel's.")] = None,
    max_configs: Annotated[
        int, typer.Option("--max-configs", help="The longest list worth tuning over.")
    ] = 5,
    regret: Annotated[
        float, typer.Option("--regret", help="Loss that is small enough: 0.01 is 1%.")
    ] = 0.01,
    param_names: Annotated[
        str,
        typer.Option("--param-names", help="Your kernel's names: Q_TILE_SIZE=BLOCK_M,D=HEAD_DIM."),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace a target that exists.")] = False,
) -> None:
    """Write the shortest list of configs that serves every swept shape.

    The file needs only triton: @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY).

    Examples:

      flashtune export-autotune configs.py

      flashtune export-autotune configs.py --from sweeps --param-names Q_TILE_SIZE=BLOCK_M
    """
    from flashtune import export
    from flashtune.cli.render import warn
    from flashtune.shortlist import recommend_for
    from flashtune.store import find, read

    names = export.parse_param_names(param_names)
    if target.exists() and not force:
        export.write_new(target, "", force=False)  # refuse before the work
    paths = [path for source in sources or [Path("sweeps")] for path in find(source)]
    if not paths:
        where = ", ".join(map(str, sources or [Path("sweeps")]))
        raise FlashtuneError(f"{where}: no sweep is there", "Run flashtune sweep first, or --from.")
    files = _chosen([read(path) for path in paths], gpu, kernel)
    recommendation = recommend_for(files, max_configs, regret)
    text = export.python_module(
        recommendation,
        provenance=files[0].provenance,
        runs=[run for file in files for run in file.runs],
        param_names=names,
    )
    export.write_new(target, text, force)
    if not recommendation.measured:
        warn("Nothing was measured: the list is in the order of promise.")
    warn(f"{len(recommendation.configs)} configs for {recommendation.gpu} written to {target}.")


def _chosen(files: list[SweepFile], gpu: str | None, kernel: str | None) -> list[SweepFile]:
    """The files of one GPU and kernel; measured ones where there are any."""
    for option, wanted in (("gpu", gpu), ("kernel", kernel)):
        there = sorted({getattr(file.provenance, option) for file in files})
        if wanted is not None:
            files = [file for file in files if getattr(file.provenance, option) == wanted]
        if not files:
            raise FlashtuneError(
                f"--{option} {wanted}: no sweep of it there", f"There are {', '.join(there)}."
            )
    return [file for file in files if file.provenance.measured] or files
