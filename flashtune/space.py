"""Spaces: a named or a user's TOML file -> the list of configs, in a stable order."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

from flashtune.config_files import config_dir, read_toml
from flashtune.errors import FlashtuneError
from flashtune.records import FURTHER_AXES, Config

AXES = ("q_tile", "k_tile", "num_warps", "num_stages")
ALLOWED = {
    "q_tile": "powers of two from 16 to 512",
    "k_tile": "powers of two from 16 to 512",
    "num_warps": "powers of two from 1 to 32",
    "num_stages": "whole numbers from 1 to 10",
    # ptxas raises less than 24 to 24 and ignores more than 255. A thread's registers are handed out
    # in eights, and the instruction that deals them out anew takes nothing else.
    "maxnreg": "multiples of 8 from 24 to 248",
    "warp_specialize": "on or off",
}
OPEN = "auto"
"""A further axis that is left open, in a file's list of its values."""
_FURTHER_IN_A_FILE = {
    "maxnreg": f'"{OPEN}" and {ALLOWED["maxnreg"]}',
    "warp_specialize": f'"{OPEN}", true and false',
}
_POWERS = {"q_tile": (16, 512), "k_tile": (16, 512), "num_warps": (1, 32)}


def parse_config(text: str) -> Config:
    """``64x32x4x3``, or ``64x32x4x3:maxnreg=168,warp_specialize=off`` -> Config.

    Raises FlashtuneError naming the axis and its allowed values.
    """
    plain, colon, rest = text.strip().lower().partition(":")
    parts = plain.split("x")
    if len(parts) != 4 or not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise FlashtuneError(
            f"config {text!r}: not of the form q_tile x k_tile x warps x stages",
            "Write four whole numbers with an x between, as 64x32x4x3; further axes behind a colon,"
            " as 64x32x4x3:maxnreg=168.",
        )
    q_tile, k_tile, num_warps, num_stages = values = [int(part) for part in parts]
    for axis, value in zip(AXES, values, strict=True):
        if not allowed(axis, value):
            raise FlashtuneError(
                f"config {text!r}: {axis} is {value}", f"{axis} takes {ALLOWED[axis]}."
            )
    further = _further(text, rest) if colon else {}
    return Config(q_tile, k_tile, num_warps, num_stages, **further)


def _further(text: str, rest: str) -> dict[str, Any]:
    """The axes behind the colon, each once and in any order."""
    found: dict[str, Any] = {}
    for entry in rest.split(","):
        axis, _, said = (part.strip() for part in entry.partition("="))
        if axis not in FURTHER_AXES or axis in found:
            what = f"{axis} twice" if axis in found else f"no axis {axis!r}"
            raise FlashtuneError(
                f"config {text!r}: {what}",
                f"Behind the colon stand {' and '.join(FURTHER_AXES)}, as in"
                " 64x32x4x3:maxnreg=168,warp_specialize=off.",
            )
        value: object = {"on": True, "off": False}.get(said)
        if axis == "maxnreg" and re.fullmatch(r"[0-9]{1,9}", said):
            value = int(said)
        if not allowed(axis, value):
            raise FlashtuneError(
                f"config {text!r}: {axis} is {said or 'empty'}", f"{axis} takes {ALLOWED[axis]}."
            )
        found[axis] = value
    return found


def allowed(axis: str, value: object) -> bool:
    """Whether ``value`` is one that the kernels take on this axis."""
    if axis == "warp_specialize":
        return isinstance(value, bool)
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    if axis == "num_stages":
        return 1 <= value <= 10
    if axis == "maxnreg":
        return 24 <= value <= 248 and value % 8 == 0
    low, high = _POWERS[axis]
    return low <= value <= high and value & (value - 1) == 0


def space_names() -> list[str]:
    """The spaces that come with flashtune."""
    return sorted(path.stem for path in (config_dir() / "spaces").glob("*.toml"))


def load_space(name: str) -> list[Config]:
    """The configs of a named space, or of a TOML file when ``name`` ends in .toml.

    A file lists values for the four axes and, where it likes, for the further ones (their product
    is the space), or configs one by one, or both. The order is the file's, the last axis running
    fastest; a repeated config counts once.
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
        if key not in (*AXES, *FURTHER_AXES, "configs", "description"):
            import difflib

            near = difflib.get_close_matches(key, [*AXES, *FURTHER_AXES, "configs"], n=1)
            raise FlashtuneError(
                f"{path}: unknown key {key}" + (f" (did you mean {near[0]}?)" if near else ""),
                f"A space has {', '.join((*AXES, *FURTHER_AXES))}, configs and description.",
            )
    if not configs:
        raise FlashtuneError(
            f"{path}: holds no config",
            f'Give values for {", ".join(AXES)}, or a list configs = ["64x32x4x3", …].',
        )
    return list(dict.fromkeys(configs))


def _product(path: Path, table: dict[str, Any]) -> list[Config]:
    given = [axis for axis in (*AXES, *FURTHER_AXES) if axis in table]
    if not given:
        return []
    lists = [_values(path, table, axis, ALLOWED[axis]) for axis in AXES]
    for axis, takes in _FURTHER_IN_A_FILE.items():
        values = _values(path, table, axis, takes) if axis in table else [OPEN]
        lists.append([None if value == OPEN else value for value in values])
    return [Config(*values) for values in itertools.product(*lists)]


def _values(path: Path, table: dict[str, Any], axis: str, takes: str) -> list[Any]:
    """The list that a file gives for an axis."""
    values = table.get(axis)
    if not isinstance(values, list) or not values:
        state = "is missing" if values is None else f"is {values!r}"
        raise FlashtuneError(f"{path}: {axis} {state}", f"{axis} is a list of {takes}.")
    for index, value in enumerate(values):
        if not allowed(axis, value) and not (axis in FURTHER_AXES and value == OPEN):
            raise FlashtuneError(f"{path}: {axis}[{index}] is {value!r}", f"{axis} takes {takes}.")
    return values


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
