"""A recommended list as a Python file that needs only triton, or as JSON."""

from __future__ import annotations

import contextlib
import keyword
import os
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from flashtune.errors import FlashtuneError
from flashtune.records import FURTHER_AXES, Config, Problem
from flashtune.results import Provenance, Recommendation, Recommended, RunInfo

SCHEMA_VERSION = 1
"""Of ``as_json``: raised when a field is renamed, removed or changes its meaning."""

TILE_PARAMS = ("Q_TILE_SIZE", "K_TILE_SIZE")
"""The tile parameters that every exported config sets."""

KEY_PARAMS = ("N_QUERIES", "N_KEYS", "D", "is_causal")
"""The arguments whose change makes Triton tune again."""

AXIS_PARAMS = {"warp_specialize": "WARP_SPECIALIZE"}
"""The parameters behind a config's further axes: set only where the config sets the axis."""

_PARAMS = (*TILE_PARAMS, *KEY_PARAMS, *AXIS_PARAMS.values())
_LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg"})
_WIDTH = 88  # the default line length of ruff and black


def parse_param_names(text: str) -> dict[str, str]:
    """Parses ``"Q_TILE_SIZE=BLOCK_M,is_causal="`` into the argument that the export takes.

    An empty text gives no renaming, an empty right-hand side drops a name of the key. Raises
    FlashtuneError for an entry without ``=``, a repeated name, or names that
    ``python_module`` refuses.
    """
    names: dict[str, str] = {}
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        ours, equals, theirs = (part.strip() for part in entry.partition("="))
        if not equals:
            raise _bad_names(f"'{entry}' is not of the form NAME=YOURS")
        if ours in names:
            raise _bad_names(f"'{ours}' is given twice")
        names[ours] = theirs
    _renamed(names)
    return names


def python_module(
    rec: Recommendation,
    *,
    provenance: Provenance,
    runs: Sequence[RunInfo],
    param_names: Mapping[str, str],
) -> str:
    """The text of a Python file with ``AUTOTUNE_CONFIGS`` and ``AUTOTUNE_KEY``.

    ``param_names`` maps any of ``TILE_PARAMS``, ``KEY_PARAMS`` and ``AXIS_PARAMS`` to the names of
    the user's kernel; an empty name drops an argument from the key. Times are in ms, shares in
    percent of each shape's best. Equal input gives equal text.

    Raises FlashtuneError for names that are unknown, no Python identifiers, used twice, or
    that drop a tile's or an axis's parameter.
    """
    names = _renamed(param_names)
    sections = [
        _origin(rec, provenance, runs),
        _shapes(rec),
        _summary(rec),
        _usage(rec, names),
    ]
    kernel = _plain(rec.kernel)
    lines = ['"""Configs for triton.autotune, chosen by flashtune."""', ""]
    if not rec.measured:
        lines += [
            "# NOTHING WAS MEASURED: no GPU ran these configs. They compiled, and their order",
            "# is a prediction or a rule, not a result.",
            "#",
        ]
    lines += _comment(f"Made for the kernel {kernel}.")
    for section in sections:
        if section:
            lines += ["#", *section]
    lines += ["", "import triton", "", "AUTOTUNE_CONFIGS = ["]
    for item in rec.configs:
        lines += _config_lines(item, rec, names)
    key = [names[name] for name in KEY_PARAMS if names[name]]
    lines += ["]", *_key_lines(key), ""]
    return "\n".join(lines)


def as_json(rec: Recommendation, provenance: Provenance) -> dict[str, object]:
    """The list as plain values for ``json.dumps``: times in ms, shares and losses from 0 to 1."""
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": rec.gpu,
        "cc": rec.cc,
        "kernel": rec.kernel,
        "measured": rec.measured,
        "provenance": asdict(provenance),
        "configs": [
            {
                "config": str(item.config),
                **asdict(item.config),
                "kept_for": item.kept_for,
                "share_of_best": [
                    {"problem": asdict(problem), "share": share}
                    for problem, share in item.share_of_best
                ],
            }
            for item in rec.configs
        ],
        "undecided": [
            {"problem": asdict(problem), "configs": [str(c) for c in configs], "within": within}
            for problem, configs, within in rec.undecided
        ],
        "winners": [
            {"problem": asdict(problem), "config": str(config), "ms": ms}
            for problem, config, ms in rec.winners
        ],
        "worst_loss": rec.worst_loss,
        "serves": [{"dtype": dtype, "D": D} for dtype, D in rec.serves],
        "unserved": [{"dtype": dtype, "D": D} for dtype, D in rec.unserved],
        "barred": [{"config": str(config), "reason": why} for config, why in rec.barred],
    }


def write_new(path: Path, text: str, force: bool) -> None:
    """Writes ``text`` as UTF-8 to ``path``, which then is complete or what it was before.

    A link is followed; an existing file is replaced only with ``force`` and keeps its mode.
    Raises FlashtuneError when the target exists, is a directory or has no parent folder, or
    the system refuses the write.
    """
    target = Path(os.path.realpath(path))
    if os.path.isdir(target):  # unlike Path.is_dir, no OSError for a name that is too long
        raise FlashtuneError(f"{path} is a directory.", "Name a file to write.")
    if os.path.lexists(target) and not force:
        raise FlashtuneError(f"{path} exists.", "Choose another name, or replace it with --force.")
    if not os.path.isdir(target.parent):
        raise FlashtuneError(
            f"{path} cannot be written: there is no folder {target.parent}.",
            "Create the folder first, or choose another path.",
        )
    # Beside the target, because a rename is atomic only within one file system.
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", newline="\n")
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        raise FlashtuneError(
            f"{path} cannot be written: {error.strerror or error}.",
            "Check the permissions and the free space, or choose another path.",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


# Names


def _renamed(param_names: Mapping[str, str]) -> dict[str, str]:
    """Every parameter's name in the user's kernel; empty where it is dropped from the key."""
    for ours, theirs in param_names.items():
        if ours not in _PARAMS:
            raise _bad_names(f"'{ours}' is not a parameter of the kernels")
        if not theirs and ours not in KEY_PARAMS:
            raise _bad_names(f"{ours} cannot be dropped: configs set it")
        if theirs and (not theirs.isidentifier() or keyword.iskeyword(theirs)):
            raise _bad_names(f"'{theirs}', given for {ours}, is not a Python identifier")
        if theirs in _LAUNCH_OPTIONS:
            raise _bad_names(f"'{theirs}', given for {ours}, is an option of the launch")
    names = {name: param_names.get(name, name) for name in _PARAMS}
    given = [name for name in names.values() if name]
    for name in given:
        if given.count(name) > 1:
            ours = " and ".join(own for own, theirs in names.items() if theirs == name)
            raise _bad_names(f"{ours} would both be called '{name}'")
    return names


def _bad_names(problem: str) -> FlashtuneError:
    return FlashtuneError(
        f"--param-names: {problem}.",
        f"Allowed on the left are {', '.join(_PARAMS)}, as in "
        "Q_TILE_SIZE=BLOCK_M,K_TILE_SIZE=BLOCK_N; NAME= drops a name from the key.",
    )


# The file's comments


def _plain(text: str) -> str:
    """Text that is safe in a comment: no line breaks and nothing a reader cannot see."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _comment(text: str, indent: str = "", hang: str = "") -> list[str]:
    """``text`` as comment lines; words longer than a line, such as paths, stay whole."""
    start = f"{indent}# "
    return textwrap.wrap(
        text,
        width=_WIDTH,
        initial_indent=start,
        subsequent_indent=start + hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _origin(rec: Recommendation, provenance: Provenance, runs: Sequence[RunInfo]) -> list[str]:
    driver = f", driver {provenance.driver}" if provenance.driver else ""
    software = [f"Triton {provenance.triton}"]
    if provenance.torch:
        software.insert(0, f"torch {provenance.torch}")
    lines = [
        *_comment(_plain(f"GPU: {rec.gpu}, compute capability {rec.cc}{driver}")),
        *_comment(_plain(f"Software: {', '.join(software)}")),
        *_comment(_plain(f"Kernel source: {provenance.kernel_hash}")),
    ]
    if runs:
        days = sorted({f"{run.started:%Y-%m-%d}" for run in runs})
        did = "Measured" if rec.measured else "Compiled"
        period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        lines += _comment(f"{did}: {period}, by")
        for command in dict.fromkeys(_plain(run.command) for run in runs):
            lines += _comment(f"  {command}", hang="    ")
    return lines


def _shapes(rec: Recommendation) -> list[str]:
    """One line a shape: its number, the winner, its ms, and what the list reaches."""
    if not rec.winners:
        return []
    rows = [
        (f"[{n}]", str(problem), str(config), f"{ms:.4g} ms", _percent(_reached(rec, problem)))
        for n, (problem, config, ms) in enumerate(rec.winners, 1)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        *_comment(
            "Shapes, each with its best config (q_tile x k_tile x num_warps x num_stages), "
            "that config's time, and the share of that speed the list reaches. Beside each config "
            "of the list are its own shares:"
        ),
        *("#   " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]


def _summary(rec: Recommendation) -> list[str]:
    lines: list[str] = []
    if rec.worst_loss is not None:
        reached = [_reached(rec, problem) for problem, _, _ in rec.winners]
        missing = [f"[{n}]" for n, share in enumerate(reached, 1) if share is None]
        if missing:
            lines += _comment(f"No config of the list was timed on {', '.join(missing)}.")
        else:
            lines += _comment(f"Worst loss of the list on any shape: {rec.worst_loss:.1%}.")
    number = {problem: n for n, (problem, _, _) in enumerate(rec.winners, 1)}
    for problem, configs, within in rec.undecided:
        names = ", ".join(map(str, configs))
        lines += _comment(
            f"No single winner on [{number[problem]}]: {names} cannot be told apart, within"
            f" {within:.1%}."
        )
    if rec.serves:
        lines += _comment(f"Has a config that fits: {_pairs(rec.serves)}.")
    if rec.unserved:
        lines += _comment(f"Has NO config that fits: {_pairs(rec.unserved)}.")
    if rec.barred:
        lines += _comment(
            "Never listed, because Triton's autotuner checks no answer and survives no crash:"
        )
        for config, why in rec.barred:
            lines += _comment(f"  {config}: {_plain(why)}", hang="    ")
    return lines


def _usage(rec: Recommendation, names: Mapping[str, str]) -> list[str]:
    params = [names[name] for name in TILE_PARAMS]
    options = ["num_warps", "num_stages"]
    used = {axis for item in rec.configs for axis in item.config.further}
    for axis in (axis for axis in FURTHER_AXES if axis in used):
        options.append(names[AXIS_PARAMS[axis]] if axis in AXIS_PARAMS else axis)
    left_out = ", ".join([" and ".join(params), *options[:-1]]) + f" and {options[-1]}"
    return [
        "# Use, above the kernel's @triton.jit:",
        "#     @triton.autotune(configs=AUTOTUNE_CONFIGS, key=AUTOTUNE_KEY)",
        *_comment(
            f"Leave {left_out} out of the call, and let the grid be a "
            "function of the config that is tried."
        ),
    ]


def _pairs(pairs: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{_plain(dtype)} at D={D}" for dtype, D in pairs)


def _percent(share: float | None) -> str:
    return "untimed" if share is None else f"{share:.1%}"


def _reached(rec: Recommendation, problem: Problem) -> float | None:
    """The best share that the list has on a problem; None where none of it was timed."""
    shares = (share for item in rec.configs for p, share in item.share_of_best if p == problem)
    return max(shares, default=None)


# The file's code


def _config_lines(
    item: Recommended, rec: Recommendation, names: Mapping[str, str]
) -> Iterator[str]:
    indent = "    "
    reason = f", {_plain(item.kept_for)}" if item.kept_for else ""
    yield from _comment(f"{item.config}{reason}", indent)
    shares = dict(item.share_of_best)
    if rec.winners:
        cells = [
            f"[{n}]={_percent(shares.get(problem))}"
            for n, (problem, _, _) in enumerate(rec.winners, 1)
        ]
        yield from _comment("  ".join(cells), indent)
    yield from _call_lines(item.config, names, indent)


def _call_lines(config: Config, names: Mapping[str, str], indent: str) -> list[str]:
    """The ``triton.Config``, broken over lines the way ruff and black break it."""
    values = dict(zip(TILE_PARAMS, (config.q_tile, config.k_tile), strict=True))
    values |= {AXIS_PARAMS[axis]: v for axis, v in config.further.items() if axis in AXIS_PARAMS}
    items = [f'"{names[name]}": {value}' for name, value in values.items()]
    kwargs = f"{{{', '.join(items)}}}"
    options = [f"num_warps={config.num_warps}", f"num_stages={config.num_stages}"]
    if config.maxnreg is not None:
        options.append(f"maxnreg={config.maxnreg}")
    arguments = ", ".join([kwargs, *options])
    line = f"{indent}triton.Config({arguments}),"
    if len(line) <= _WIDTH:
        return [line]
    deeper = indent + "    "
    if len(deeper + arguments) <= _WIDTH:
        inside = [deeper + arguments]
    else:
        inside = [f"{deeper}{part}," for part in (kwargs, *options)]
        if len(inside[0]) > _WIDTH:
            inside[:1] = [
                f"{deeper}{{",
                *(f"{deeper}    {item}," for item in items),
                f"{deeper}}},",
            ]
    return [f"{indent}triton.Config(", *inside, f"{indent}),"]


def _key_lines(key: Sequence[str]) -> list[str]:
    quoted = [f'"{name}"' for name in key]
    line = f"AUTOTUNE_KEY = [{', '.join(quoted)}]"
    if len(line) <= _WIDTH:
        return [line]
    return ["AUTOTUNE_KEY = [", *(f"    {name}," for name in quoted), "]"]
