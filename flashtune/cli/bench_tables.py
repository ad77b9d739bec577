"""A bench and its roofline as tables: for the terminal, and in Markdown for a README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape
from rich.table import Table

from flashtune.cli.render import stdout_console

if TYPE_CHECKING:
    from flashtune.bench import Bench, Line, Spread
    from flashtune.gpu import GpuSpec
    from flashtune.records import Problem
    from flashtune.roofline import Roofline, Roofs

_BACKENDS = {"flash": "flash", "cudnn": "cuDNN", "efficient": "efficient"}
_TEXTS = frozenset({"mask", "kernel", "config", "longest"})  # columns that are not numbers


class Page(NamedTuple):
    """A caption, a table and what must be said below it."""

    caption: str
    header: list[str]
    rows: list[list[str]]
    below: list[str]


def bench_page(bench: Bench) -> Page:
    """The table of a bench: a row for each kernel and SDPA backend of each problem."""
    from flashtune.bench import lines

    problems = [shape.problem for shape in bench.shapes]
    axes = _axes(problems)
    header = [*axes, "mask", "kernel", "config", "ms", "±", "TFLOP/s",
              *(f"% of SDPA {name}" for name in _BACKENDS.values()), "% of matmul",
              "% of copy"]  # fmt: skip
    found = [line for shape in bench.shapes for line in lines(shape, bench.ceilings)]
    rows = [[*_problem_cells(line.problem, axes), *_figures(line)] for line in found]
    return Page(
        _caption(bench, axes), header, rows,
        [*_remarks(found), *_explained(bench), *bench.notes],
    )  # fmt: skip


def _caption(bench: Bench, axes: Sequence[str]) -> str:
    p, first = bench.provenance, bench.shapes[0].problem
    grouped = any(shape.problem.H != shape.problem.H_kv for shape in bench.shapes)
    names = ("B", "H", "H_kv", "D") if grouped else ("B", "H", "D")
    same = [name for name in names if name not in axes]
    shape = ", ".join([first.dtype, *(f"{axis}={getattr(first, axis)}" for axis in same)])
    versions = [f"driver {p.driver}", f"torch {p.torch}", f"Triton {p.triton}"]
    if bench.cudnn is not None:
        versions.append(f"cuDNN {bench.cudnn}")
    backends = ", ".join(_BACKENDS.values())
    return (
        f"{bench.title} ({', '.join(versions)}), measured on {bench.started:%Y-%m-%d}: {shape}."
        f" SDPA is PyTorch's with each backend forced ({backends}), on the same inputs in the same"
        f" runs."
    )


def _explained(bench: Bench) -> list[str]:
    from flashtune.bench import spread

    runs = "1 run" if bench.runs == 1 else f"{bench.runs} runs"
    said = [
        f"ms: median of {runs}, each the median of launches with a cold L2, all in interleaved"
        " rounds; ±: half the range over the runs. % of SDPA: the median of each run's own ratio,"
        " 100% is equally fast. TFLOP/s counts a causal mask as half."
    ]
    matmul, copy = spread(bench.ceilings.matmul_tflops), spread(bench.ceilings.copy_gb_s)
    if matmul is not None and copy is not None:
        said.append(
            f"Ceilings in the same command: {bench.dtype} matmul of 8192^3"
            f" {matmul.median:.0f} TFLOP/s (±{matmul.half:.1%}), device copy {copy.median:,.0f}"
            f" GB/s (±{copy.half:.1%}){_clock(bench.ceilings.sm_clock_mhz)}. % of copy: the least"
            " DRAM traffic (Q, K, V, O and L once) over the time."
        )
    seen = [shape.sm_clock_mhz for shape in bench.shapes if shape.sm_clock_mhz is not None]
    if seen:
        low, high = min(low for low, _ in seen), max(high for _, high in seen)
        said.append(f"While kernels were timed: SM clock {_range(low, high)} MHz.")
    return said


def _clock(mhz: tuple[int, int] | None) -> str:
    return "" if mhz is None else f", SM clock {_range(*mhz)} MHz"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _remarks(found: Sequence[Line]) -> list[str]:
    """Where configs come from, what was not timed and why; each said once."""
    said: dict[str, None] = {}
    for line in found:
        if line.reason is not None:
            said[f"{_name(line)}, {line.problem}: not timed: {line.reason}"] = None
        elif line.kernel is not None and line.kernel.left_out:
            left = "; ".join(line.kernel.left_out)
            said[f"{_name(line)}, {line.problem}: left out: {left}"] = None
    for line in found:
        if line.kernel is not None and line.kernel.config is not None:
            several = len(line.kernel.entry.configs) > 1
            chosen = ", the fastest of them here" if several else ""
            said[f"{line.name}: config from {line.kernel.entry.source}{chosen}"] = None
    return list(said)


def _figures(line: Line) -> list[str]:
    """The cells from the kernel's name on."""
    kernel = line.kernel
    config = "-" if kernel is None or kernel.config is None else str(kernel.config)
    if line.ms is None:
        why = "refused" if kernel is None else str(kernel.failure)
        return [_name(line), config, why, *["-"] * 7]
    half = "-" if len(line.runs_ms) == 1 else f"{line.ms.half:.1%}"
    own = line.name if line.sdpa else None
    shares = ["-" if name == own else _percent(line.shares.get(name)) for name in _BACKENDS]
    return [
        _name(line), config, f"{line.ms.median:.4f}", half, f"{line.tflops:.1f}", *shares,
        _share(line.of_matmul), _share(line.of_copy),
    ]  # fmt: skip


def _name(line: Line) -> str:
    return f"SDPA {_BACKENDS[line.name]}" if line.sdpa else line.name


def _percent(share: Spread | None) -> str:
    return "-" if share is None else _share(share.median)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _axes(problems: Sequence[Problem]) -> list[str]:
    """N, and what else differs between the problems; H_kv and N_k only where they are not H and
    N."""

    def shown(name: str) -> bool:
        if name == "N_k":
            return any(p.N != p.N_k for p in problems)
        if name == "H_kv" and all(p.H == p.H_kv for p in problems):
            return False
        return name == "N" or len({getattr(p, name) for p in problems}) > 1

    return [name for name in ("B", "H", "H_kv", "N", "N_k", "D") if shown(name)]


def _problem_cells(problem: Problem, axes: Sequence[str]) -> list[str]:
    mask = "causal" if problem.causal else "full"
    return [*(str(getattr(problem, axis)) for axis in axes), mask]


# -- roofline


def roofline_page(found: Sequence[Roofline], roofs: Roofs, gpu: GpuSpec) -> Page:
    """The roofline's arithmetic, a row for each kernel of each problem."""
    axes = _axes([r.problem for r in found])
    header = [*axes, "mask", "kernel", "config", "G op needed", "G op run", "DRAM MB", "op/B",
              "L2 MB", "op/B", "tensor ms", "DRAM ms", "L2 ms", "longest"]  # fmt: skip
    rows = [[*_problem_cells(r.problem, axes), *_roofline_cells(r)] for r in found]
    tensor = "unknown" if roofs.tensor_tflops is None else f"{roofs.tensor_tflops:,.1f} TFLOP/s"
    whence = "measured in this run" if roofs.measured else "as published, not measured"
    below = [
        f"Ceilings: tensor cores {tensor} and DRAM {roofs.dram_gb_s:,.0f} GB/s, {whence};"
        f" L2 {roofs.l2_gb_s:,.0f} GB/s, of its architecture, not measured.",
        "Counted, not measured: operations as a profiler counts them (a multiply-add is 2), DRAM"
        " bytes with Q, K, V, O and L moved once, L2 bytes with K and V read again by each query"
        " tile. op/B: needed operations a byte of DRAM, and run operations a byte from L2. Times:"
        " what each ceiling alone would take.",
    ]
    if found and found[0].dram_ridge is not None:
        below.append(
            f"DRAM is the lower ceiling below {found[0].dram_ridge:.0f} operations a byte."
        )
    return Page(f"Roofline of {gpu.title}, {found[0].problem.dtype}", header, rows, below)


def _roofline_cells(r: Roofline) -> list[str]:
    return [
        r.kernel, str(r.config), f"{r.needed / 1e9:.1f}", f"{r.executed / 1e9:.1f}",
        f"{r.dram_bytes / 1e6:.1f}", f"{r.dram_intensity:,.0f}",
        f"{r.l2_bytes / 1e6:,.0f}", f"{r.l2_intensity:,.1f}",
        "-" if r.tensor_ms is None else f"{r.tensor_ms:.4f}",
        f"{r.dram_ms:.4f}", f"{r.l2_ms:.4f}", r.bound,
    ]  # fmt: skip


# -- output


def print_page(page: Page) -> None:
    """The page on the terminal."""
    out = stdout_console()
    out.print(escape(page.caption), soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in page.header:
        left = name in _TEXTS
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in page.rows:
        table.add_row(*map(escape, row))
    out.print(table)
    for text in page.below:
        out.print(escape(text), soft_wrap=True)


def markdown(page: Page) -> str:
    """The page in Markdown: the caption, the table, and what is said below it as a list."""
    align = ["---" if name in _TEXTS else "---:" for name in page.header]
    table = [page.header, align, *page.rows]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    below = [f"- {text}" for text in page.below]
    return "\n".join([page.caption, "", *rows, "", *below]) + "\n"
