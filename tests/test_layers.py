"""The arrows of DESIGN.md, read from the imports of every module."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import subprocess_env

import flashtune

PACKAGE = Path(flashtune.__file__).resolve().parent


@dataclass(frozen=True)
class Room:
    """What a module may import: of the house, and from outside the standard library."""

    house: str = ""
    third: str = ""  # anywhere in the module
    third_inside: str = ""  # only inside functions and under TYPE_CHECKING


EVERYTHING = "*"

# `kernels` is the table of kernels, which imports neither torch nor triton.
ROOMS = {
    "__init__": Room("functional"),
    "__main__": Room("cli.app"),
    "records": Room(),
    "results": Room("records"),
    "versions": Room("errors"),
    "errors": Room(),
    "config_files": Room("errors"),
    "driver": Room("errors", third_inside="pynvml"),
    "gpu": Room("config_files driver errors records"),
    "provenance": Room("gpu results versions"),
    "space": Room("config_files errors records"),
    "shapes": Room("config_files errors records"),
    "allocator": Room(),
    "tensor_cores": Room("gpu records"),
    "descriptors": Room("gpu tensor_cores"),
    "ping_pong": Room("allocator descriptors records"),
    "shared": Room("allocator descriptors gpu kernels ping_pong records tensor_cores"),
    "registers": Room("kernels records tensor_cores"),
    "ladder": Room("records"),
    "tuned": Room("config_files errors records results space"),
    "choose": Room("budget errors gpu kernels ladder plan records space tuned"),
    "budget": Room("descriptors gpu kernels kernels.launch records registers shared tensor_cores"),
    "machine": Room("gpu"),
    "operations": Room("gpu kernels records tensor_cores"),
    "cost": Room("budget gpu kernels machine operations records tensor_cores"),
    "explain": Room("budget cost gpu kernels records shared"),
    "functional": Room(
        "choose descriptors errors gpu kernels kernels.launch ladder records space versions",
        third="torch",
        third_inside="triton",
    ),
    "reference": Room(third="torch"),
    "plan": Room("budget cost gpu kernels records"),
    "calibrate": Room("budget cost gpu kernels machine records", third_inside="numpy"),
    "audit_model": Room("budget calibrate cost errors kernels machine recorded records results"),
    "kernels": Room("errors ladder records", third_inside="torch triton"),
    "kernels.launch": Room("kernels records", third_inside="torch"),
    "kernels.tiles": Room(third="triton"),
    "kernels.v0_baseline": Room("kernels.tiles", third="triton"),
    "kernels.v3_causal_skip": Room("kernels.tiles", third="triton"),
    "kernels.v4_exp2": Room("kernels.tiles", third="triton"),
    "kernels.v6_heads_first": Room("kernels.tiles", third="triton"),
    "kernels.tma": Room("descriptors", third="triton"),
    "kernels.v7_descriptor": Room("kernels.tiles kernels.tma", third="triton"),
    "kernels.v8_warp_specialised": Room("kernels.tiles kernels.tma", third="triton"),
    "kernels.v9_ping_pong": Room("kernels.tiles kernels.tma", third="triton"),
    "kernels.v10_persistent": Room(
        "kernels.tiles kernels.tma kernels.v9_ping_pong", third="triton", third_inside="torch"
    ),
    "cubin": Room(),
    "doubts": Room("results"),
    "children": Room(third_inside="joblib"),
    "compiler": Room("cubin kernels kernels.launch records", third_inside="triton"),
    "fan_out": Room("children compiler records", third_inside="joblib"),
    "audit_budget": Room(
        "compiler descriptors errors fan_out gpu kernels kernels.launch records shared",
        third_inside="triton",
    ),
    "recorded": Room("errors gpu kernels parquet records results store", third_inside="pyarrow"),
    "race": Room("records stats"),
    "hope": Room("records"),
    "audit_search": Room("errors hope plan race recorded records results"),
    "audit_registers": Room("audit_budget budget compiler cost fan_out gpu records"),
    "interpreter": Room("check kernels kernels.launch records results"),
    "check": Room("kernels kernels.launch records results", third="torch"),
    "stats": Room("records", third="numpy"),
    "timing": Room("check errors records results stats", third="torch"),
    "worker": Room(
        "check driver errors kernels kernels.launch records results timing", third="torch triton"
    ),
    "worker_main": Room("kernels worker"),
    "gpu_process": Room("children errors kernels records results worker_main"),
    "rows": Room("budget gpu plan records results"),
    "measure": Room("errors gpu_process hope plan race records results stats"),
    "parquet": Room("errors records results", third_inside="pandas pyarrow"),
    "store": Room("errors parquet records results", third_inside="pandas pyarrow"),
    "cover": Room("records"),
    "recommend": Room("cover errors records results stats", third_inside="pandas"),
    "export": Room("errors records results"),
    "shortlist": Room("budget cost errors export gpu kernels recommend records results store"),
    "sweep": Room(
        "budget check compiler cost doubts driver errors export fan_out gpu gpu_process hope"
        " interpreter kernels measure plan provenance recommend records results rows shortlist"
        " space stats store"
    ),
    "entries": Room("choose errors gpu kernels ladder recommend records results store"),
    "roofline": Room("gpu kernels machine operations records"),
    "bench": Room("entries operations records results stats"),
    "ceilings": Room("bench check driver timing", third="torch"),
    "bench_on_gpu": Room(
        "bench ceilings check compiler driver entries errors fan_out gpu kernels kernels.launch"
        " provenance records results stats timing worker",
        third="torch",
    ),
    "cli": Room(),
    "cli.render": Room(EVERYTHING, third="rich"),
    "cli.audit_tables": Room(EVERYTHING, third="rich"),
    "cli.bench_tables": Room(EVERYTHING, third="rich"),
}
CLI_ROOM = Room(EVERYTHING, third="typer")  # every other module of cli/

# Loaded by --help, budget or --dry-run: nothing slow at their top.
LIGHT = [
    "__init__", "records", "results", "errors", "config_files", "driver", "gpu", "versions",
    "provenance", "space", "tensor_cores", "allocator", "descriptors", "ping_pong", "shared",
    "registers",
    "budget", "machine", "operations", "cost", "explain", "plan", "ladder", "tuned", "choose",
    "kernels", "kernels.launch", "compiler", "rows", "sweep",
    "parquet", "store", "export", "shapes", "roofline",
]  # fmt: skip
SLOW = {"torch", "triton", "joblib", "pandas", "pyarrow", "numpy"}


@dataclass(frozen=True)
class Import:
    line: int
    house: str | None  # the module's name without "flashtune."
    third: str | None  # the distribution's top package
    at_top: bool  # runs when the module is loaded


def module_files() -> dict[str, Path]:
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        names[".".join(parts)] = path
    return names


FILES = module_files()


def room(name: str) -> Room | None:
    return ROOMS.get(name, CLI_ROOM if name.startswith("cli.") else None)


def imports(source: str, files: dict[str, Path] = FILES, module: str = "") -> list[Import]:
    """Every import of a module, wherever it stands."""
    found: list[Import] = []

    def note(line: int, target: str, at_top: bool) -> None:
        top = target.split(".")[0]
        if top == "flashtune":
            name = target.removeprefix("flashtune").lstrip(".")
            while name not in files and "." in name:  # a name in a module, not a module
                name = name.rpartition(".")[0]
            if name in files:  # else a name of flashtune/__init__, such as __version__
                found.append(Import(line, name, None, at_top))
        elif top not in sys.stdlib_module_names:
            found.append(Import(line, None, top, at_top))

    def visit(node: ast.AST, at_top: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                note(node.lineno, alias.name, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                note(node.lineno, f"{node.module}.{alias.name}", at_top)
        elif isinstance(node, ast.Call):  # importlib.import_module and __import__ hide an arrow
            called = ast.unparse(node.func)
            if called.endswith("import_module") or called == "__import__":
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        note(node.lineno, argument.value, at_top)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, at_top)
            return
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, at_top and not inside)

    visit(ast.parse(source), True)
    return found


def complaints(name: str, source: str) -> list[str]:
    """What a module imports that its row does not allow."""
    allowed = room(name)
    if allowed is None:
        return [f"{name}: has no row in the table"]
    house = allowed.house.split()
    third, inside = allowed.third.split(), allowed.third_inside.split()
    wrong = []
    for found in imports(source, module=name):
        where = f"{name}:{found.line}"
        if found.house is not None and EVERYTHING not in house and found.house not in house:
            wrong.append(f"{where}: imports {found.house}")
        if found.third is not None and found.third not in third:
            if found.third not in inside:
                wrong.append(f"{where}: imports {found.third}")
            elif found.at_top:
                wrong.append(f"{where}: imports {found.third} at the top of the module")
    return wrong


@pytest.mark.parametrize("name", FILES)
def test_a_module_imports_what_its_row_allows(name: str) -> None:
    assert complaints(name, FILES[name].read_text(encoding="utf-8")) == []


def test_every_row_is_a_module() -> None:
    assert sorted(set(ROOMS) - set(FILES)) == []


def test_the_table_has_no_circle() -> None:
    """Each module imports only what stands in a row that could be drawn above it."""
    arrows = {name: set(row.house.split()) - {EVERYTHING} for name, row in ROOMS.items()}
    arrows["__main__"] = set()  # cli is everything's top
    while arrows:
        free = {name for name, needs in arrows.items() if not needs & set(arrows)}
        assert free, f"these import each other in a circle: {sorted(arrows)}"
        arrows = {name: needs for name, needs in arrows.items() if name not in free}


def slow_at_load(name: str, seen: set[str]) -> list[str]:
    """Slow packages that loading this module loads, with the way there."""
    if name in seen:
        return []
    seen.add(name)
    ways = []
    for found in imports(FILES[name].read_text(encoding="utf-8"), module=name):
        if found.at_top and found.third in SLOW:
            ways.append(f"{name} -> {found.third}")
        if found.at_top and found.house is not None:
            ways += [f"{name} -> {way}" for way in slow_at_load(found.house, seen)]
    return ways


@pytest.mark.parametrize("name", [*LIGHT, *(n for n in FILES if n.split(".")[0] == "cli")])
def test_loading_a_light_module_loads_nothing_slow(name: str) -> None:
    assert slow_at_load(name, set()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["sweep", "--help"],
        ["budget", "64x32x4x3", "16x16x4x3", "--gpu", "h200"],
        ["sweep", "--N", "4096", "--causal", "--dry-run", "--gpu", "rtx-4070-super"],
        ["bench", "--help"],
    ],
    ids=" ".join,
)
def test_a_quick_command_never_loads_what_is_slow(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
import json, sys
from flashtune.cli.app import main
sys.argv = ["flashtune", *{arguments!r}]
status = 0
try:
    status = main()
except SystemExit as stop:
    status = stop.code
print()
print(json.dumps([status or 0, sorted(set(sys.modules) & {SLOW!r})]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=subprocess_env(), text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


@pytest.mark.parametrize("name", [n for n in FILES if n.split(".")[0] != "cli"])
def test_nothing_prints_outside_cli(name: str) -> None:
    tree = ast.parse(FILES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "typer.echo", "input"), f"{name}:{node.lineno}"


def test_the_reader_sees_every_kind_of_import() -> None:
    """Each of these is an arrow that the table forbids, written in its own way."""
    ways = [
        "import torch",
        "def f():\n    import torch",
        "from torch import nn",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "import importlib\nimportlib.import_module('torch.nn')",
        "import click",
        "import rich.table",
        "from flashtune import store",
        "from flashtune.store import read",
        "import flashtune.store",
        "class A:\n    from flashtune.kernels.launch import forward",
        "try:\n    import numpy\nexcept ImportError:\n    pass",
    ]
    for source in ways:
        assert complaints("records", source), source
    inside = "def f():\n    import {0}", "async def f():\n    import {0}"
    for source in inside:
        assert complaints("parquet", source.format("pandas")) == []
    for source in "import pandas", "class A:\n    import pandas", "if True:\n    import pandas":
        assert complaints("parquet", source), source
    assert complaints("no_such_room", "") == ["no_such_room: has no row in the table"]
