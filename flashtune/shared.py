"""Shared memory, buffer by buffer: what a kernel keeps there, when it is live, and where it goes.

A kernel's shared memory is what Triton's allocator makes of its buffers, so this lists the same
buffers in the order in which the compiled loop creates and drops them, and places them by the same
rules. v9 and v10 say themselves what they keep: ping_pong.py. Sources, in Triton's tree:
lib/Analysis/Allocation.cpp (live ranges, places, alignment), AccelerateMatmul.cpp (which tensor
instructions, where warps go), Pipeliner/AssignLatencies.cpp and LowerLoops.cpp (which loads are
copied ahead, how many tiles), lib/Analysis/Utility.cpp (scratch of a row reduction),
Tools/GenericSwizzling.cpp (scratch of a layout conversion). The order of events in the loops was
read off modules that Triton 3.6 to 3.9 had lowered; ``flashtune audit budget`` compares the result
with any installed Triton.

Two small buffers are left out: what turns O and L round for their store. They live when all the
others are gone and are no larger than the Q tile was, so they never decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flashtune import descriptors, ping_pong
from flashtune.allocator import (
    PLAIN_ALIGNMENT,
    SCRATCH_ALIGNMENT,
    Buffer,
    place,
    swizzle_block,
    total,
    up,
)
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel
from flashtune.records import Config, Problem
from flashtune.tensor_cores import MMA_COLUMNS, WARP, Instructions, instructions, is_stacked

CHUNKED_REDUCTIONS = (3, 8)
"""From this Triton on, a row reduction passes its partial results between warps in chunks."""

_BARRIER = 8  # bytes


@dataclass(frozen=True)
class Term:
    """A part of the sum: what is live at the fullest moment, or what reuses that space."""

    name: str
    bytes: int
    why: str
    counted: bool  # False: shares the space of the others


# The buffers of a kernel --------------------------------------------------------------------------
#
# A schedule is a line of events: "K+" K's buffer comes to life, "K-" it dies, "P!" one that lives
# for a single operation. "Q-" in a loop's line holds for the last loop only. A prime marks the
# second buffer of a loop whose first iteration was peeled off.

_MMA_LOOPS = {  # by (K copied ahead, V copied ahead)
    (True, True): "K+ V+ {softmax} Q- V- K-",
    (True, False): "K+ V+ {softmax} V- Q- K-",
    (False, True): "V+ turn! {softmax} Q- V-",
    (False, False): "turn! V+ {softmax} V- Q-",
}
_WGMMA_LOOPS = {
    (True, True): "K+ V+ Q- V- K-",
    (True, False): "K+ V! Q- K-",
    (False, True): "V+ K! Q- V-",
    (False, False): "K+ V+ K- V- Q-",
}
# With tensor memory, the multiplies run asynchronously and barriers say when they are done. From
# two stages on, S of the next tile is multiplied while this one's softmax runs: two rounds of it.
_TCGEN05_LOOPS = {
    (True, True): "bar+ bar'+ K+ V+ {first} {between} {beside} Q- {last} V- K- bar'- bar-",
    (True, False): "bar+ bar'+ K+ V+ {first} V'+ {between} {beside} Q- {last} V- V'- K- bar'- bar-",
    (False, True): "bar+ V+ K+ s+ K- s- {whole} K'+ s'+ K'- s'- {whole} Q- V- bar-",
    (False, False): "bar+ K+ V+ s+ K- s- {whole} V'+ K'+ s'+ K'- s'- {whole} Q- V- V'- bar-",
}
_TCGEN05_ONE_STAGE = "K+ V+ s+ K- s- {single} s'+ V- s'- Q-"
_NO_SCRATCH = dict.fromkeys(("first", "between", "beside", "last", "whole", "single"), "")
_TCGEN05_SCRATCH = {
    # 8 warps on 64 rows: two groups side by side along the keys meet in every row reduction.
    64: {"first": "rows!", "between": "rows!", "beside": "rows!", "last": "rows!",
         "whole": "rows! rows!", "single": "rows! rows!"},
    # 8 warps on 128 rows: the groups share S by rows and O by columns; what rescales O moves.
    128: {"first": "scale!", "between": "", "beside": "scale!", "last": "",
          "whole": "scale!", "single": ""},
}  # fmt: skip
_SCRATCH = frozenset({"turn", "rows", "scale", "move", "map"})

_WHY = {
    "Q": ("Q tile", "q_tile x D, read by every Q K^T"),
    "K": ("K", "k_tile x D"),
    "V": ("V", "k_tile x D"),
    "turn": ("K in another layout", "from the registers that loaded it to those that multiply"),
    "P": ("P round trip", "warps side by side: P V needs the rows that the others computed"),
    "rows": ("row reductions", "warps side by side meet for each row's maximum and sum"),
    "scale": ("row scales", "from the warps that hold S to those that hold O"),
    "move": ("P in another layout", "from the warps that hold S to those that hold O"),
    "bar": ("barriers", "which multiplies are done"),
    "s": ("barriers", "which multiply is done"),
    "T": ("V turned round", "k_tile x D; tensor cores read fp32 along the keys only"),
    "map": ("tensor map", "a descriptor in the making"),
    "full": ("barriers", "which tiles have arrived"),
    "q": ("barriers", "whether the tile has arrived"),
    "k": ("barriers", "whether the tile has arrived"),
    "v": ("barriers", "whether the tile has arrived"),
}


class Plan(NamedTuple):
    """What decides a kernel's buffers, all in bytes but for the counts."""

    instructions: Instructions
    descriptors: bool
    q: int
    kv: int  # one tile of K or V
    k_tiles: int  # tiles that are copied ahead; 0: loaded when it is needed
    v_tiles: int
    stages: int
    turned_alignment: int  # of V turned round, where it came through a descriptor; 0: as it came
    turn: int  # K's scratch between two register layouts
    v_in_lanes: bool  # V needs no buffer at all
    p: int  # P's round trip; 0: warps are stacked
    rows: int  # scratch of one row reduction; 0: no other warp has a part of the row
    p_with_rows: bool  # both at once: fp32 has no narrower P that could come later
    q_in_registers: bool  # Q's buffer is dead before the loops
    loops: int
    alignment: int  # of tiles that the tensor cores read in place
    two_groups: int  # tcgen05: the query rows, 64 or 128, that 8 warps share; 0: they do not
    move: int  # tcgen05: P's scratch between two register layouts


def _plan(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int],
    aligned_q: bool, aligned_k: bool, aligned_v: bool,
) -> Plan | None:  # fmt: skip
    mma = instructions(gpu, config)
    through_tma = kernel.loads == "descriptor"
    emulated = through_tma and not descriptors.has_tma(gpu)
    if mma is None or emulated or not kernel.shared_modelled:
        return None
    D, e = problem.padded_D, problem.element_bytes
    q_tile, k_tile, warps, stages = (
        config.q_tile, config.k_tile, config.num_warps, config.num_stages,
    )  # fmt: skip
    # An asynchronous copy moves at least 4 bytes a thread: one fp32, two 16-bit numbers in a row.
    pairs = e == 4 or k_tile * D >= 2 * WARP * warps
    k_ahead = stages >= 2 and pairs and (aligned_k or e == 4)
    v_ahead = stages >= 2 and pairs and (aligned_v or e == 4)
    # wgmma reads K and V in place, so a tile stays while the next copy already comes in; otherwise
    # it is in registers by then (loadRequiresAdditionalBuffer).
    ahead = stages - 1 if mma is Instructions.MMA else stages
    turn = p = rows = 0
    if mma is Instructions.MMA:
        side_by_side = warps > 1 and not is_stacked(problem, config, mma)
        if side_by_side:
            p, rows = q_tile * k_tile * e, _row_scratch(q_tile, k_tile, warps, triton)
        if not k_ahead:
            # As many keys as the warps multiply at once, or 16 bytes a thread.
            at_once = MMA_COLUMNS * D * 2
            turn = at_once * warps if side_by_side else max(16 * WARP * warps, at_once)
            turn = min(turn, k_tile * D * e)
    # fp32 rows of 16, one element a lane: one warp can turn V round among its own lanes. Lanes hold
    # one element each unless a tile of that shape is aligned (Coalesce.cpp looks at all of them, Q
    # and O among them).
    any_aligned = aligned_k or aligned_v or (aligned_q and q_tile == k_tile)
    v_in_lanes = (
        mma is Instructions.MMA and (warps, D, e, stages) == (1, 16, 4, 1) and not any_aligned
    )
    if v_in_lanes:
        turn = min(64 * WARP, k_tile * D * e)
    two_groups = mma is Instructions.TCGEN05 and warps == 8 and q_tile < 256
    if two_groups:
        rows = _row_scratch(q_tile, 2 * MMA_COLUMNS, 2, triton)
    plan = Plan(
        instructions=mma,
        descriptors=False,
        q=q_tile * D * e,
        kv=k_tile * D * e,
        k_tiles=ahead if k_ahead else 0,
        v_tiles=ahead if v_ahead else 0,
        stages=stages,
        turned_alignment=0,
        turn=turn,
        v_in_lanes=v_in_lanes,
        p=p,
        rows=rows,
        p_with_rows=e == 4,
        q_in_registers=kernel.key_loops == 2 and q_tile * D < WARP * warps,
        loops=kernel.key_loops,
        alignment=PLAIN_ALIGNMENT if mma is Instructions.MMA else swizzle_block(D * e),
        two_groups=q_tile if two_groups else 0,
        move=16 * WARP * warps if two_groups else 0,  # 16 bytes a thread
    )
    return _through_descriptors(plan, problem, config) if through_tma else plan


def _through_descriptors(plan: Plan, problem: Problem, config: Config) -> Plan:
    """The same kernel with its tiles copied by TMA."""
    e = problem.element_bytes
    turned = e == 4 and plan.instructions is not Instructions.MMA
    k_tiles, v_tiles = descriptors.tiles_ahead(plan.instructions, plan.stages, turned)
    return plan._replace(
        descriptors=True,
        k_tiles=k_tiles if plan.stages >= 2 else 0,
        v_tiles=v_tiles if plan.stages >= 2 else 0,
        alignment=swizzle_block(problem.padded_D * e),
        turned_alignment=swizzle_block(config.k_tile * e) if turned else 0,
    )


def _row_scratch(q_tile: int, k_tile: int, warps: int, triton: tuple[int, int]) -> int:
    """Bytes that a row reduction needs: an fp32 for each row and slice of keys."""
    slices = min(warps, k_tile // MMA_COLUMNS)
    if slices <= 1:
        return 0
    if triton >= CHUNKED_REDUCTIONS:
        return min(q_tile * slices * 4, max(128 * slices, 512))
    return q_tile * slices * 4


def _schedule(plan: Plan) -> str:
    """The kernel as a line of events."""
    ahead = (plan.k_tiles > 0, plan.v_tiles > 0)
    scratch = _scratch(plan)
    # O is rescaled a last time behind the loops.
    after = " scale!" if plan.two_groups == 128 else ""
    if plan.descriptors:
        kind, turned = plan.instructions, plan.turned_alignment > 0
        return descriptors.schedule(kind, all(ahead), turned, plan.loops, scratch) + after
    if plan.instructions is Instructions.MMA:
        loop = "turn! Q-" if plan.v_in_lanes else _MMA_LOOPS[ahead]
    elif plan.instructions is Instructions.WGMMA:
        loop = _WGMMA_LOOPS[ahead]
    else:
        loop = _TCGEN05_ONE_STAGE if plan.stages == 1 else _TCGEN05_LOOPS[ahead]
    loop = loop.format_map(scratch)
    if plan.q_in_registers:
        return "Q! " + " ".join([loop.replace(" Q-", "")] * plan.loops) + after
    first = [loop.replace(" Q-", "")] * (plan.loops - 1)
    return " ".join(["Q+", *first, loop]) + after


def _scratch(plan: Plan) -> dict[str, str]:
    """What the operations of a loop need for themselves, by their place in it."""
    scratch = dict(_TCGEN05_SCRATCH.get(plan.two_groups, _NO_SCRATCH))
    if plan.two_groups == 128:
        scratch["single"] = "move! scale!" if plan.p_with_rows else "scale! move!"
    return {**scratch, "softmax": _softmax(plan)}


def _softmax(plan: Plan) -> str:
    if not plan.p:
        return ""
    rows = "rows!" if plan.rows else ""
    return f"{rows} P+ {rows} P-" if plan.p_with_rows else f"{rows} {rows} P!"


@lru_cache(maxsize=512)
def _lives(schedule: str) -> tuple[tuple[str, int, int], ...]:
    """(slot, start, end) of each buffer, in Triton's order: the tiles, then operations' scratch."""
    tiles: list[tuple[str, int, int]] = []
    scratch: list[tuple[str, int, int]] = []
    born: dict[str, tuple[int, list[tuple[str, int, int]], int]] = {}
    time = 0
    for event in schedule.split():
        slot, kind = event[:-1], event[-1]
        into = scratch if slot in _SCRATCH else tiles
        if kind == "-":
            start, where, index = born.pop(slot)
            where[index] = (slot, start, time)
        else:
            into.append((slot, time, time + 1))
            if kind == "+":
                born[slot] = (time, into, len(into) - 1)
            else:
                time += 1
        time += 1
    return (*tiles, *scratch)


def _size(plan: Plan, slot: str) -> tuple[int, int]:
    """Bytes and alignment of a slot's buffer."""
    kind = slot.rstrip("'")
    if kind == "K":
        return max(1, plan.k_tiles) * plan.kv, plan.alignment
    if kind == "V":
        return max(1, plan.v_tiles) * plan.kv, plan.alignment
    if kind == "Q":
        return plan.q, plan.alignment
    if kind == "P":
        return plan.p, PLAIN_ALIGNMENT
    if kind == "bar":
        return 2 * _BARRIER, PLAIN_ALIGNMENT
    if kind == "T":
        return plan.kv, plan.turned_alignment
    if kind == "full":
        return (plan.k_tiles if slot == kind else plan.v_tiles) * _BARRIER, PLAIN_ALIGNMENT
    if kind == "map":
        return descriptors.MAP_BYTES, SCRATCH_ALIGNMENT
    if kind in ("s", "q", "k", "v"):
        return _BARRIER, PLAIN_ALIGNMENT
    if kind == "turn":
        return plan.turn, SCRATCH_ALIGNMENT
    if kind == "move":
        return plan.move, SCRATCH_ALIGNMENT
    if kind == "scale":
        return 128 * 4, SCRATCH_ALIGNMENT
    return plan.rows, SCRATCH_ALIGNMENT


# Answers ------------------------------------------------------------------------------------------


def buffers(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int],
    *, aligned_q: bool = True, aligned_k: bool = True, aligned_v: bool = True,
) -> tuple[Buffer, ...] | None:  # fmt: skip
    """The kernel's buffers, placed; None: not modelled, the compiler has to be asked.

    ``triton`` is the version that will compile it, as (3, 6). ``aligned_k`` and ``aligned_v`` say
    that base address and strides are multiples of 16 bytes, as in every fresh torch tensor;
    ``aligned_q`` says it of Q or O, which hardly ever matters.
    """
    if kernel.gluon:
        return _ping_pong(problem, config, gpu, kernel)
    plan = _plan(problem, config, gpu, kernel, triton, aligned_q, aligned_k, aligned_v)
    return None if plan is None else place(_buffers(plan))


def _ping_pong(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel
) -> tuple[Buffer, ...] | None:
    if not kernel.shared_modelled or kernel.misfit(problem, config, gpu.cc_number) is not None:
        return None
    return ping_pong.placed(problem, config, kernel.persistent)


def _buffers(plan: Plan) -> list[Buffer]:
    found = []
    for slot, start, end in _lives(_schedule(plan)):
        size, alignment = _size(plan, slot)
        name, why = _WHY[slot.rstrip("'")]
        if slot[0] in "KV":
            tiles = plan.k_tiles if slot[0] == "K" else plan.v_tiles
            name += " ring" if tiles else " tile"
            why = f"{tiles} x {why}, copied ahead" if tiles else f"{why}, not copied ahead"
        found.append(Buffer(name, size, start, end, None, why, alignment))
    return found


def shared_bytes(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int],
    *, aligned_q: bool = True, aligned_k: bool = True, aligned_v: bool = True,
) -> int | None:  # fmt: skip
    """Shared memory a block, in bytes; None: not modelled, the compiler has to be asked."""
    if kernel.gluon:
        placed = _ping_pong(problem, config, gpu, kernel)
        return None if placed is None else total(placed)
    plan = _plan(problem, config, gpu, kernel, triton, aligned_q, aligned_k, aligned_v)
    if plan is None:
        return None
    if plan.descriptors:
        return _placed_bytes(plan)
    if plan.instructions is not Instructions.TCGEN05:
        return _peak(plan)
    closed = _tcgen05_closed(plan)
    return _placed_bytes(plan) if closed is None else closed


def _peak(plan: Plan) -> int:
    """The most that is live at once. Without barriers the allocator wastes nothing, so it is what
    placing the buffers gives (a test compares the two); this takes a hundredth of the time."""
    k_bytes, v_bytes = max(1, plan.k_tiles) * plan.kv, max(1, plan.v_tiles) * plan.kv
    if plan.instructions is Instructions.WGMMA:
        return plan.q + k_bytes + v_bytes
    softmax = plan.p + plan.rows if plan.p_with_rows else max(plan.p, plan.rows)
    if plan.v_in_lanes:
        loop = plan.turn
    elif plan.k_tiles:
        loop = k_bytes + v_bytes + softmax
    elif plan.v_tiles:
        loop = v_bytes + max(plan.turn, softmax)
    else:
        loop = max(plan.turn, v_bytes + softmax)
    return max(plan.q, loop) if plan.q_in_registers else plan.q + loop


def _tcgen05_closed(plan: Plan) -> int | None:
    """What placing the buffers gives for aligned inputs (a test compares the two), where a formula
    is known: the tiles, what lies beside them, and the gap that a tile's alignment opens when Q is
    placed after the K and V of a first loop."""
    tiles = max(1, plan.k_tiles) * plan.kv
    full = plan.q + 2 * tiles
    large_q = plan.q >= tiles
    if plan.stages == 1:
        if plan.two_groups and plan.kv < 2 * plan.move:
            return None
        return full + (_BARRIER if large_q or plan.loops == 1 else plan.alignment)
    if not (plan.k_tiles and plan.v_tiles):
        return None
    barriers = 4 * _BARRIER
    if not plan.two_groups:
        return full + (barriers if large_q or plan.loops == 1 else plan.alignment)
    if large_q or plan.loops == 1:
        return full + 512 + barriers
    if plan.two_groups == 64:
        return full + up(512, plan.alignment) + barriers
    return up(2 * tiles + 512 + barriers, plan.alignment) + plan.q


@lru_cache(maxsize=4096)
def _placed_bytes(plan: Plan) -> int:
    return total(place(_buffers(plan)))


def terms(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int],
    *, aligned_q: bool = True, aligned_k: bool = True, aligned_v: bool = True,
) -> tuple[Term, ...] | None:  # fmt: skip
    """The sum behind ``shared_bytes``: the counted terms add up to it; None: not modelled.

    Counted is what is live at the fullest moment, and what alignment adds to it.
    """
    placed = buffers(
        problem, config, gpu, kernel, triton,
        aligned_q=aligned_q, aligned_k=aligned_k, aligned_v=aligned_v,
    )  # fmt: skip
    if placed is None:
        return None
    moments = [[b for b in placed if b.start <= at.start < b.end] for at in placed]
    fullest = max(moments, key=lambda live: sum(b.bytes for b in live))
    live: dict[tuple[str, str], int] = {}
    for b in sorted(fullest, key=lambda b: (b.name == "barriers", b.start)):
        live[b.name, b.why] = live.get((b.name, b.why), 0) + b.bytes
    found = [Term(name, size, why, counted=True) for (name, why), size in live.items()]
    gaps = total(placed) - sum(b.bytes for b in fullest)
    if gaps:
        found.append(
            Term(
                "alignment",
                gaps,
                "tiles start at whole swizzle blocks, others at multiples of 4 to 128",
                counted=True,
            )
        )
    counted = {b.name for b in fullest}
    others = {b.name: b for b in placed if b.name not in counted}
    found += [Term(b.name, b.bytes, b.why, counted=False) for b in others.values()]
    return tuple(found)
