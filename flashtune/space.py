"""Spaces: a named or a user's TOML file -> the list of configs, in a stable order."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from flashtune.config_files import config_dir, read_toml
from flashtune.errors import FlashtuneError
from flashtune.records import Config

AXES = ("q_tile", "k_tile", "num_warps", "num_stages")
ALLOWED = {
    "q_tile": "powers of two from 16 to 512",
    "k_tile": "powers of two from 16 to 512",
    "num_warps": "powers of two from 1 to 32",
    "num_stages": "whole numbers from 1 to 10",
}
_POWERS = {"q_tile": (16, 512), "k_tile": (16, 512), "num_warps": (1, 32)}


def parse_config(text: str) -> Config:
    """``64x32x4x3`` -> Config. Raises FlashtuneError naming the axis and its allowed values."""
    parts = re.split("x", text.strip().lower())
    if len(parts) != 4 or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise FlashtuneError(
            f"config {text!r}: not of the form q_tile x k_tile x warps x stages",
            "Write four whole numbers with an x between, as 64x32x4x3.",
        )
    values = [int(part) for part in parts]
    for axis, value in zip(AXES, values, strict=True):
        if not allowed(axis, value):
            raise FlashtuneError(
                f"config {text!r}: {axis} is {value}", f"{axis} takes {ALLOWED[axis]}."
            )
    return Config(*values)


def allowed(axis: str, value: object) -> bool:
    """Whether ``value`` is one that the kernels take on this axis."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    if axis == "num_stages":
        return 1 <= value <= 10
    low, high = _POWERS[axis]
    return low <= value <= high and value & (value - 1) == 0


def space_names() -> list[str]:
    """The spaces that come with flashtune."""
    return sorted(path.stem for path in (config_dir() / "spaces").glob("*.toml"))


def load_space(name: str) -> list[Config]:
    """The configs of a named space, or of a TOML file when ``name`` ends in .toml.

    A file lists values for the four axes (their product is the space), or configs one by one, or
    both. The order is the file's, the last axis running fastest; a repeated config counts once.
    Raises FlashtuneError naming the file, the key and the allowed values.
    """
    if name.endswith(".toml"):
        path = Path(name)
    elif name in space_names():
        path = config_dir() / "spaces" / f"{name}.toml"
    else:
        import difflib

        near = difflib.get_close_matches(name, space_names(), n=3, cutoff=0.4) or space_names()
        raise FlashtuneError(
            f"--space {name!r}: no space of that name",
            f"Did you mean {' or '.join(near)}? A file of your own works by its path (FILE.toml).",
        )
    configs = [*_product(path, table := read_toml(path)), *_listed(path, table)]
    for key in table:
        if key not in (*AXES, "configs", "description"):
            import difflib

            near = difflib.get_close_matches(key, [*AXES, "configs"], n=1)
            raise FlashtuneError(
                f"{path}: unknown key {key}" + (f" (did you mean {near[0]}?)" if near else ""),
                f"A space has {', '.join(AXES)}, configs and description.",
            )
    if not configs:
        raise FlashtuneError(
            f"{path}: holds no config",
            f'Give values for {", ".join(AXES)}, or a list configs = ["64x32x4x3", …].',
        )
    return list(dict.fromkeys(configs))


def _product(path: Path, table: dict[str, Any]) -> list[Config]:
    given = [axis for axis in AXES if axis in table]
    if not given:
        return []
    for axis in AXES:
        values = table.get(axis)
        if not isinstance(values, list) or not values:
            state = "is missing" if values is None else f"is {values!r}"
            raise FlashtuneError(f"{path}: {axis} {state}", f"{axis} is a list of {ALLOWED[axis]}.")
        for index, value in enumerate(values):
            if not allowed(axis, value):
                raise FlashtuneError(
                    f"{path}: {axis}[{index}] is {value!r}", f"{axis} takes {ALLOWED[axis]}."
                )
    return [Config(*values) for values in itertools.product(*(table[axis] for axis in AXES))]


def _listed(path: Path, table: dict[str, Any]) -> list[Config]:
    entries = table.get("configs", [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise FlashtuneError(
            f"{path}: configs is {entries!r}", 'configs is a list of texts such as "64x32x4x3".'
        )
    configs = []
    for index, entry in enumerate(entries):
        try:
            configs.append(parse_config(entry))
        except FlashtuneError as error:
            raise FlashtuneError(
                f"{path}: configs[{index}]: {error.message}", error.hint
            ) from error
    return configs
