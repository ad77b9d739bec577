"""Reading what nvdisasm says of a cubin: instructions, and the loops that they stand in."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def disassemble(cubin: Path) -> str:
    """nvdisasm's listing of a cubin, by the nvdisasm that comes with Triton."""
    import triton

    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(listing: str) -> tuple[list[str], dict[str, int]]:
    """Every instruction with its operands, in order, and where each label points in that list."""
    found: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            found.append(instruction[1])
    return found, labels


def loops(listing: str) -> list[list[str]]:
    """The instructions of each loop: from the target of a backward branch to that branch."""
    found, labels = instructions(listing)
    ends = [
        (labels[branch[1]], place)
        for place, text in enumerate(found)
        if (branch := re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", text))
    ]
    return [found[start : end + 1] for start, end in ends if start < end]


def count(code: Sequence[str], *opcodes: str) -> Counter[str]:
    """How many instructions have each opcode, with any modifiers behind it: HMMA counts HMMA.16816,
    and BAR.SYNC counts BAR.SYNC.DEFER_BLOCKING."""
    counts = Counter(dict.fromkeys(opcodes, 0))
    for text in code:
        opcode = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
        counts.update(name for name in opcodes if f"{opcode}.".startswith(f"{name}."))
    return counts
