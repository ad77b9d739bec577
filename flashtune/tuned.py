"""The tuned lists that come with flashtune: what a sweep of a kernel found best on a card.

A small TOML file for each card, kernel, dtype and D, under configs/tuned/. Those of recorded sweeps
are written by benchmarks/make_tuned.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtune.config_files import config_dir, read_toml
from flashtune.errors import FlashtuneError
from flashtune.records import Config, Problem
from flashtune.results import Recommendation, SweepFile
from flashtune.space import parse_config

_SIZES = ("B", "H", "H_kv", "N", "N_k")


@dataclass(frozen=True)
class Winner:
    """The best config of one shape, and its median where that was measured with this kernel."""

    problem: Problem
    config: Config
    ms: float | None


@dataclass(frozen=True)
class TunedList:
    """The best configs of one kernel on one card, for one dtype and D."""

    gpu: str  # a row of configs/gpus.toml
    kernel: str
    dtype: str
    D: int
    measured: str  # when and with what
    configs: tuple[Config, ...]  # good on every shape, and short enough to tune over
    winners: tuple[Winner, ...]  # the best of each shape

    @property
    def file_name(self) -> str:
        return _file_name(self.gpu, self.kernel, self.dtype, self.D)


def tuned_list(gpu: str, kernel: str, dtype: str, D: int) -> TunedList | None:
    """The list for that card, kernel, dtype and D; None where there is none.

    Raises FlashtuneError when its file is broken, naming the key.
    """
    path = config_dir() / "tuned" / _file_name(gpu, kernel, dtype, D)
    return _from_toml(path) if path.is_file() else None


def _file_name(gpu: str, kernel: str, dtype: str, D: int) -> str:
    return f"{gpu}_{kernel}_{dtype}_D{D}.toml"


def _from_toml(path: Path) -> TunedList:
    table = read_toml(path)

    def value(key: str, kind: type, row: dict[str, Any] = table) -> Any:
        found = row.get(key)
        if type(found) is not kind:  # not isinstance: true is no whole number
            where = key if row is table else f"{key} in {row}"
            raise FlashtuneError(
                f"{path}: {where} is {found!r}.", f"Its type has to be {kind.__name__}."
            )
        return found

    dtype, D = value("dtype", str), value("D", int)
    winners = []
    for row in value("shapes", list):
        sizes = {size: value(size, int, row) for size in _SIZES}
        problem = Problem(**sizes, D=D, causal=value("causal", bool, row), dtype=dtype)
        ms = value("ms", float, row) if "ms" in row else None
        winners.append(Winner(problem, parse_config(value("config", str, row)), ms))
    return TunedList(
        gpu=value("gpu", str),
        kernel=value("kernel", str),
        dtype=dtype,
        D=D,
        measured=value("measured", str),
        configs=tuple(parse_config(text) for text in value("configs", list)),
        winners=tuple(winners),
    )


def from_sweep(file: SweepFile, recommendation: Recommendation) -> TunedList:
    """The list of one recorded sweep: its recommended configs, and the winner of each shape.

    Raises FlashtuneError when the sweep measured nothing.
    """
    of = file.provenance
    if not recommendation.measured:
        raise FlashtuneError(
            f"The sweep of {of.kernel} on {of.gpu} measured nothing.", "Sweep again on a card."
        )
    first = recommendation.winners[0][0]
    day = max(run.started for run in file.runs)
    return TunedList(
        gpu=of.gpu,
        kernel=of.kernel,
        dtype=first.dtype,
        D=first.D,
        measured=f"{day:%Y-%m-%d} on one card: driver {of.driver}, torch {of.torch}, Triton"
        f" {of.triton}, kernel source {of.kernel_hash}",
        configs=tuple(item.config for item in recommendation.configs),
        winners=tuple(
            Winner(problem, config, round(ms, 5)) for problem, config, ms in recommendation.winners
        ),
    )


def as_toml(tuned: TunedList) -> str:
    """The text of the list's file."""
    quoted = ", ".join(f'"{config}"' for config in tuned.configs)
    lines = [
        *(f'{key} = "{getattr(tuned, key)}"' for key in ("gpu", "kernel", "dtype")),
        f"D = {tuned.D}",
        f'measured = "{tuned.measured}"',
        "# Good on every shape, and short enough to tune over.",
        f"configs = [{quoted}]",
        "# The best of each shape.",
        "shapes = [",
    ]
    for winner in tuned.winners:
        sizes = ", ".join(f"{size} = {getattr(winner.problem, size)}" for size in _SIZES)
        causal = str(winner.problem.causal).lower()
        ms = "" if winner.ms is None else f", ms = {winner.ms!r}"
        lines.append(f'  {{ {sizes}, causal = {causal}, config = "{winner.config}"{ms} }},')
    return "\n".join([*lines, "]", ""])
