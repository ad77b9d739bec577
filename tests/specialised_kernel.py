"""A user's kernel file with the axis warp_specialize: v7, with a loop that takes the parameter."""

from __future__ import annotations

from pathlib import Path

from flashtune.kernels import KERNELS, Kernel, find_kernel

_CHANGES = {
    "is_causal: tl.constexpr,\n": "is_causal: tl.constexpr,\n"
    "    WARP_SPECIALIZE: tl.constexpr = True,\n",
    "range(start, stop, K_TILE_SIZE)": "tl.range(\n"
    "        start, stop, K_TILE_SIZE, warp_specialize=WARP_SPECIALIZE\n    )",
    "False, is_causal,": "False, is_causal, WARP_SPECIALIZE,",
    "True, is_causal,": "True, is_causal, WARP_SPECIALIZE,",
}


def specialised_kernel(folder: Path) -> Kernel:
    """Writes ``specialised.py`` into ``folder``."""
    text = KERNELS["v7_descriptor"].path.read_text()
    for old, new in _CHANGES.items():
        assert old in text, f"v7 has changed: {old!r} is not in it"
        text = text.replace(old, new)
    path = folder / "specialised.py"
    path.write_text(text + '\nBASED_ON = "v7_descriptor"\n')
    return find_kernel(str(path))
