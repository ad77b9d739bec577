"""What v9_ping_pong and v10_persistent keep in shared memory: what their sources allocate, and what
Triton adds.

A Gluon kernel says itself what it keeps, so this is its source read once more: a Q tile for each
warpgroup (v10: two, where a block has room for them), a ring in which tiles of K and V take turns,
and barriers. All of it lives until the warps are done. Beside it Triton keeps what giving warps
jobs of their own takes (getScratchValueSize in its lib/Analysis/Allocation.cpp; the sizes of
arguments are in getCaptureSizeAlign of lib/Dialect/TritonGPU/IR/Ops.cpp, later getCaptureSize):

- a byte for each warp that it adds to the first four, which says what to do next;
- the arguments of the added warps' functions, packed, those that several share once. One warpgroup
  is the first four warps, so that only the producer is added, and takes fewer;
- 128 bytes in which the producer puts a descriptor together. The arguments share that space.

Layout conversions and reductions need nothing: a row of S and of O is in the same four lanes.
"""

from __future__ import annotations

from functools import lru_cache

from flashtune.allocator import SCRATCH_ALIGNMENT, Buffer, place, swizzle_block
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
# v10's, all together: Q_s, ring; full, free, turn; BATCH_HEADS, H, heads_per_kv, N_QUERIES, N_KEYS,
# three strides each of Q, K, V and O, two of L, qk_scale; Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr
_PERSISTENT = 2 * _TILES + 3 * _BARRIERS + (5 + 12 + 2 + 1) * _NUMBER + 5 * _POINTER
_ARGUMENTS_ALIGNMENT, _WARPS_ALIGNMENT = 8, 4
_TWO_Q_TILES = 226 * 1024  # bytes of v10's tiles at most, for the second to be there


@lru_cache(maxsize=512)
def placed(problem: Problem, config: Config, persistent: bool) -> tuple[Buffer, ...] | None:
    """The buffers of a config that the kernel takes, placed; None: what its warps are given is not
    known, and the compiler has to be asked."""
    return place(_buffers(problem, config, persistent)) if _is_known(problem, persistent) else None


def _is_known(problem: Problem, persistent: bool) -> bool:
    """Whether the arguments are known. A length of 1 is a constant to Triton, and what becomes
    constant with it, and is no argument any more, depends on its version. v10 is given all strides,
    of which those beyond 32 bits are larger."""
    p = problem
    if not persistent:
        return p.N_k > 1
    return min(p.N, p.N_k) > 1 and max(p.H * p.N, p.H_kv * p.N_k) * p.D < 2**31


def _buffers(problem: Problem, config: Config, persistent: bool) -> list[Buffer]:
    """The buffers, not placed yet, in Triton's order: the source's, then what it adds itself."""
    groups, stages = config.q_tile // _ROWS, config.num_stages
    row_bytes = problem.padded_D * problem.element_bytes
    block = swizzle_block(row_bytes)
    # K and V are one allocation; they are whole swizzle blocks, so that it takes what two would.
    ring = stages * config.k_tile * row_bytes
    q_tile, q_why = config.q_tile * row_bytes, "q_tile x D, read by every Q K^T"
    if persistent and 2 * ring + 2 * q_tile <= _TWO_Q_TILES:
        q_tile, q_why = 2 * q_tile, "2 x q_tile x D: while one is multiplied the next is loaded"
    turns = f"{stages} x k_tile x D, in turns with {{}}'s in one ring"
    which = "which tiles have arrived, which may be overwritten, whose turn it is"
    arguments = _PRODUCER + (_CONSUMER if groups > 1 else 0)
    if persistent:
        arguments = _PERSISTENT - (_NUMBER if problem.H == problem.H_kv else 0)
    # Events: K's descriptor, V's, the added warps get their arguments, all warps are done.
    return [
        Buffer("Q tile", q_tile, 0, 3, None, q_why, block),
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
