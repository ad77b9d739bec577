"""Shape sets: the attention problems of real models, by name, from configs/shapes.toml."""

from __future__ import annotations

from typing import Any

from flashtune.config_files import config_dir, read_toml
from flashtune.errors import FlashtuneError
from flashtune.records import Problem

_FILE = "configs/shapes.toml"
_KEYS = {
    "H": "a whole number from 1",
    "H_kv": "a whole number from 1 that divides H",
    "D": "a multiple of 8 from 8 to 256",
    "N": "a list of whole numbers from 1",
    "causal": "true or false",
}


def shape_sets() -> tuple[str, ...]:
    """The names of the sets, in the file's order. Raises FlashtuneError when it is no TOML."""
    return tuple(_tables())


def load_shapes(name: str, batch: int, dtype: str) -> list[Problem]:
    """The problems of the set ``name``, in the file's order, with this batch and input dtype.

    Raises FlashtuneError for an unknown set, listing those there are, and for a broken file,
    naming the set, the key and what it takes.
    """
    tables = _tables()
    if name not in tables:
        raise FlashtuneError(
            f"--shapes {name!r}: no set of shapes of that name", f"There are {', '.join(tables)}."
        )
    layers = tables[name].get("attention") if isinstance(tables[name], dict) else None
    if not isinstance(layers, list) or not layers:
        raise _broken(f"{name}.attention is {layers!r}", "a list of {H, H_kv, D, N, causal}")
    problems = []
    for index, layer in enumerate(layers):
        _check(layer, f"{name}.attention[{index}]")
        problems += [
            Problem(batch, layer["H"], layer["H_kv"], N, N, layer["D"], layer["causal"], dtype)
            for N in layer["N"]
        ]
    return problems


def _tables() -> dict[str, Any]:
    return read_toml(config_dir() / "shapes.toml")


def _check(layer: Any, where: str) -> None:
    if not isinstance(layer, dict):
        raise _broken(f"{where} is {layer!r}", "{H, H_kv, D, N, causal}")
    for key in layer:
        if key not in _KEYS:
            raise _broken(f"{where}.{key} is unknown", ", ".join(_KEYS))
    for key, takes in _KEYS.items():
        if key not in layer:
            raise _broken(f"{where}.{key} is missing", takes)
        if not _allowed(layer, key):
            raise _broken(f"{where}.{key} is {layer[key]!r}", takes)


def _allowed(layer: dict[str, Any], key: str) -> bool:
    value = layer[key]
    if key == "causal":
        return isinstance(value, bool)
    if key == "N":
        return isinstance(value, list) and bool(value) and all(map(_is_count, value))
    if not _is_count(value):
        return False
    if key == "D":
        return bool(value % 8 == 0 and value <= 256)
    return bool(key != "H_kv" or layer["H"] % value == 0)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _broken(what: str, allowed: str) -> FlashtuneError:
    return FlashtuneError(f"{_FILE}: {what}.", f"Allowed: {allowed}.")
