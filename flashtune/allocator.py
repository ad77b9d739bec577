"""Triton's allocator of shared memory, replayed: buffers with lives in, offsets out.

The algorithm is lib/Analysis/Allocation.cpp's in Triton's tree, which follows Fabri's "Algorithms
for compile-time memory optimization": first fit by size, then colouring of what still collides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PLAIN_ALIGNMENT = 16  # bytes; of a buffer whose layout asks for no more
SCRATCH_ALIGNMENT = 128  # of what lives for one operation


@dataclass(frozen=True)
class Buffer:
    """One buffer and its life. ``start`` and ``end`` count events of the kernel, end excluded."""

    name: str
    bytes: int
    start: int
    end: int
    offset: int | None  # None: not placed yet
    why: str
    alignment: int = PLAIN_ALIGNMENT


_Range = tuple[int, int]
_FOREVER = 1 << 62


def _meet(a: _Range, b: _Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def up(offset: int, alignment: int) -> int:
    """The next multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def swizzle_block(row_bytes: int) -> int:
    """Bytes after which the swizzle of a tile with such rows repeats; such tiles are aligned so."""
    return 8 * min(128, row_bytes)


def place(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The buffers with the offsets that Triton's allocator gives them.

    Large ones go first, each into the lowest slot that is free for a part of its life; a buffer
    that then collides with another is moved above it, and again until nothing collides.
    """
    if not buffers:
        return ()
    order = sorted(buffers, key=lambda b: -b.bytes)  # stable: equal sizes keep their order
    sizes = [b.bytes for b in order]
    lives = [(b.start, b.end) for b in order]
    aligned = [b.alignment for b in order]
    offsets = _first_fit(sizes, lives, aligned)
    collisions = _collisions(sizes, lives, offsets)
    while True:
        colours: list[int | None] = [0] + [None] * (len(order) - 1)
        for i in range(len(order)):
            taken = {colours[j] for j in collisions[i]}
            colours[i] = next(c for c in range(len(order) + 1) if c not in taken)
        for i in range(len(order)):
            above = max((offsets[j] + sizes[j] for j in collisions[i]), default=0)
            if colours[i]:
                offsets[i] = up(above, aligned[i])
        collisions = _collisions(sizes, lives, offsets)
        if not any(collisions):
            break
    found = {id(b): offset for b, offset in zip(order, offsets, strict=True)}
    return tuple(replace(b, offset=found[id(b)]) for b in buffers)


def _first_fit(sizes: list[int], lives: list[_Range], aligned: list[int]) -> list[int]:
    offsets = [0] * len(sizes)
    slots: list[tuple[int, _Range]] = [(0, (0, _FOREVER))]  # lowest first, older before newer
    waiting = list(range(len(sizes)))

    def free(offset: int, during: _Range) -> None:
        at = next((n for n, slot in enumerate(slots) if slot[0] > offset), len(slots))
        slots.insert(at, (offset, during))

    while waiting:
        offset, during = slots.pop(0)
        for i in waiting:
            live = lives[i]
            if _meet(live, during) and not any(_meet(live, slot[1]) for slot in slots):
                offsets[i] = up(offset, aligned[i])
                free(offsets[i] + sizes[i], (max(during[0], live[0]), min(during[1], live[1])))
                if during[0] < live[0]:
                    free(offset, (during[0], live[1]))
                if live[1] < during[1]:
                    free(offset, (live[0], during[1]))
                waiting.remove(i)
                break
    return offsets


def _collisions(sizes: list[int], lives: list[_Range], offsets: list[int]) -> list[list[int]]:
    spaces = [(o, o + s) for o, s in zip(offsets, sizes, strict=True)]
    return [
        [
            j
            for j in range(len(sizes))
            if i != j and _meet(lives[i], lives[j]) and _meet(spaces[i], spaces[j])
        ]
        for i in range(len(sizes))
    ]


def total(placed: Sequence[Buffer]) -> int:
    """Bytes up to the end of the last buffer."""
    return max(((b.offset or 0) + b.bytes for b in placed), default=0)
