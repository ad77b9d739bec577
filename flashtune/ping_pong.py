"""What v9_ping_pong keeps in shared memory: what its source allocates, and what Triton adds.

A Gluon kernel says itself what it keeps, so this is its source read once more: a Q tile for each
warpgroup, a ring in which tiles of K and V take turns, and barriers. All of it lives until the
warps are done. Beside it Triton keeps what giving warps jobs of their own takes
(getScratchValueSize in its lib/Analysis/Allocation.cpp; the sizes of arguments are in
getCaptureSizeAlign of lib/Dialect/TritonGPU/IR/Ops.cpp, later getCaptureSize):

- a byte for each warp that it adds to the first four, which says what to do next;
- the arguments of the added warps' functions, packed, those that several share once. One warpgroup
  is the first four warps, so that only the producer is added, and takes fewer;
- 128 bytes in which the producer puts a descriptor together. The arguments share that space.

Layout conversions and reductions need nothing: a row of S and of O is in the same four lanes.
"""

from __future__ import annotations

from flashtune.allocator import SCRATCH_ALIGNMENT, Buffer, swizzle_block
from flashtune.descriptors import MAP_BYTES
from flashtune.records import Config, Problem

_ROWS = 64  # of Q, that a warpgroup owns
_GROUP_WARPS = 4
_BARRIER = 8  # bytes
_POINTER, _NUMBER = 8, 4  # bytes of an argument
_IN_SHARED, _AN_AXIS = 8, 4  # of one in shared memory: its address, and an offset along each axis
_TILES, _BARRIERS = _IN_SHARED + 3 * _AN_AXIS, _IN_SHARED + 2 * _AN_AXIS

# ring, full, free; n_tiles, N_KEYS, stride_kk, stride_vk; K_base, V_base
_PRODUCER = _TILES + 2 * _BARRIERS + 4 * _NUMBER + 2 * _POINTER
# Q_s, turn; q_start, n_masked, N_QUERIES, qk_scale, q_stride, o_stride; Q_base, O_base, L_base
_CONSUMER = _TILES + _BARRIERS + 6 * _NUMBER + 3 * _POINTER  # beside what the producer takes too
_ARGUMENTS_ALIGNMENT, _WARPS_ALIGNMENT = 8, 4


def is_modelled(problem: Problem) -> bool:
    """Whether the arguments are known. A length of 1 is a constant to Triton, and what becomes
    constant with N_KEYS, and is no argument any more, depends on its version."""
    return problem.N_k > 1


def buffers(problem: Problem, config: Config) -> list[Buffer]:
    """The buffers, not placed yet, in Triton's order: the source's, then what it adds itself."""
    groups, stages = config.q_tile // _ROWS, config.num_stages
    row_bytes = problem.padded_D * problem.element_bytes
    block = swizzle_block(row_bytes)
    # K and V are one allocation; they are whole swizzle blocks, so that it takes what two would.
    ring = stages * config.k_tile * row_bytes
    turns = f"{stages} x k_tile x D, in turns with {{}}'s in one ring"
    which = "which tiles have arrived, which may be overwritten, whose turn it is"
    arguments = _PRODUCER + (_CONSUMER if groups > 1 else 0)
    # Events: K's descriptor, V's, the added warps get their arguments, all warps are done.
    return [
        Buffer("Q tile", config.q_tile * row_bytes, 0, 3, None,
               "q_tile x D, read by every Q K^T", block),
        Buffer("K ring", ring, 0, 3, None, turns.format("V"), block),
        Buffer("V ring", ring, 0, 3, None, turns.format("K"), block),
        Buffer("barriers", 2 * stages * _BARRIER, 0, 3, None, which),
        Buffer("barriers", 2 * stages * _BARRIER, 0, 3, None, which),
        Buffer("barriers", groups * _BARRIER, 0, 3, None, which),
        Buffer("warp states", groups * _GROUP_WARPS, 0, 4, None,
               "a byte for each warp beyond the first four", _WARPS_ALIGNMENT),
        Buffer("warp arguments", arguments, 2, 3, None,
               "what the warps beyond the first four are given", _ARGUMENTS_ALIGNMENT),
        Buffer("tensor map", MAP_BYTES, 0, 1, None, "a descriptor in the making",
               SCRATCH_ALIGNMENT),
        Buffer("tensor map", MAP_BYTES, 1, 2, None, "a descriptor in the making",
               SCRATCH_ALIGNMENT),
    ]  # fmt: skip
