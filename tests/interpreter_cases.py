"""Runs attention cases in Triton's interpreter: ``interpreter_cases.py SHARE OF``, a line a case.

Share 0 of 2 runs every other case. Each line is JSON: the case's name and its outcome. The tests
start it as a process of its own because TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from dataclasses import asdict

from attention_cases import LAYOUTS, VALUES, Case, run_case

from flashtune.kernels import KERNELS

# Triton interprets no Gluon. Of the others it takes any tile and dtype, be they none that a kernel
# is launched with on the card it is written for: the arithmetic is the same.
INTERPRETED = tuple(name for name, kernel in KERNELS.items() if not kernel.gluon)
DTYPES = ("fp16", "fp32")  # the interpreter's bf16 is garbage up to 3.9
TOLERANCES = {"fp16": 1e-2, "fp32": 1e-4}  # fp32 has no TF32 rounding here

# The articles' shapes, (heads, N, N_k, D). The second has 2 heads there: the interpreter runs one
# program after another, and one head has every tile that two have.
SHAPES = (
    (4, 128, 128, 64),
    (1, 1024, 1024, 64),
    (2, 100, 100, 64),
    (1, 37, 53, 32),
    (1, 200, 96, 128),
)
# Square, wide and tall tiles; warps and stages mean nothing to the interpreter. NumPy multiplies
# fp16 slowly, so it gets one less.
CONFIGS = {"fp16": ("64x32x4x3", "32x128x4x2"), "fp32": ("64x32x4x3", "32x128x4x2", "128x16x4x1")}


def cases() -> list[Case]:
    return [
        *_article(),
        *_head_dimensions(),
        *_layouts(),
        *_edges(),
        *_values(),
        *_launch_options(),
    ]


def _article() -> list[Case]:
    found = []
    for kernel, (heads, n, n_k, d), causal, dtype in itertools.product(
        INTERPRETED, SHAPES, (False, True), DTYPES
    ):
        for config in CONFIGS[dtype] if n < 1024 else ("128x128x8x3",):
            found.append(Case(kernel, 1, heads, heads, n, n_k, d, causal, dtype, config))
    return found


def _head_dimensions() -> list[Case]:
    return [
        Case(kernel, 1, 1, 1, 70, 45, d, True, dtype, "32x16x4x2")
        for kernel in INTERPRETED
        for d in (8, 16, 24, 40, 72, 80, 96, 136, 192, 248, 256)
        for dtype in DTYPES
    ]


def _layouts() -> list[Case]:
    plain = [
        Case(kernel, 2, 2, 2, 20, 40, d, causal, "fp32", "16x32x4x2", layout)
        for kernel in INTERPRETED
        for layout in LAYOUTS
        if layout != "guarded"  # what every other case has
        for d, causal in ((40, True), (64, False))
        # TMA reads no such rows: a test says that they are refused.
        if layout != "odd_rows" or KERNELS[kernel].loads == "pointer"
    ]
    grouped = [
        Case(kernel, 2, 4, 2, 20, 40, 40, True, "fp32", "16x32x4x2", layout)
        for kernel in INTERPRETED
        for layout in ("transposed", "packed")
    ]
    return plain + grouped


def _edges() -> list[Case]:
    lengths = [(1, 1), (1, 33), (33, 1), (16, 16), (17, 16), (16, 17), (64, 16), (15, 64)]
    return [
        Case(kernel, 1, 2, 1, n, n_k, 16, causal, "fp32", config)
        for kernel in INTERPRETED
        for n, n_k in lengths
        for causal in (False, True)
        for config in ("16x16x1x1", "16x64x1x1", "64x16x1x1")
    ]


def _values() -> list[Case]:
    return [
        Case(kernel, 1, 2, 2, 40, 72, 32, causal, dtype, "16x32x4x2", values=values)
        for kernel in INTERPRETED
        for causal in (False, True)
        for dtype in DTYPES
        for values in VALUES[1:]
    ]


def _launch_options() -> list[Case]:
    """What only the compiler heeds must not break the interpreter."""
    capped = [
        Case(kernel, 1, 2, 2, 40, 72, 32, True, "fp32", "16x32x4x2:maxnreg=64")
        for kernel in INTERPRETED
    ]
    specialised = [
        Case("v8_warp_specialised", 1, 2, 1, 140, 72, 32, True, "fp16", f"{config}:{axis}")
        for config in ("64x32x4x3", "128x64x4x2")
        for axis in ("warp_specialize=on", "warp_specialize=off", "maxnreg=168,warp_specialize=on")
    ]
    return capped + specialised


def main(share: int, of: int) -> None:
    import torch

    torch.set_num_threads(1)
    mixed = cases()
    random.Random(0).shuffle(mixed)  # slow ones lie side by side
    for case in mixed[share::of]:
        start = time.perf_counter()
        outcome = run_case(case, "cpu", TOLERANCES[case.dtype])
        seconds = round(time.perf_counter() - start, 3)
        print(json.dumps({"case": str(case), **asdict(outcome), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
