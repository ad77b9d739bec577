"""v10: v9 with programs that stay: one on each SM, each doing item after item.

An item is one query tile of one head. v9 does each in a program of its own, which starts, makes two
descriptors and loads Q and the first K before its first multiply, and stores O after its last. Here
that happens once a program, or beside the multiplies: the producer's ring runs on over an item's
end, and a warpgroup starts to load its next Q (cp.async, into a second buffer where shared memory
has room) during an item's first scores. Descriptors are of all heads, and so need no remaking.

Tiles of all a program's items are counted on: the count says where in the ring a tile lies, which
round of a barrier it belongs to, and whose turn it is. Items go from the longest to the shortest.
They are dealt out in rounds, to and fro, so that whoever got the longest gets the shortest next.

The launch is v9's. Its grid, heads and query tiles, is taken as the list of items. 128 or 256 rows:
with 64, several of v9's programs share an SM and hide each other's start, and v9 is faster.
"""

import functools
import math
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtune.kernels.tiles import aligned
from flashtune.kernels.tma import refuse_what_tma_cannot_read
from flashtune.kernels.v9_ping_pong import (
    ROWS,
    copy_tile,
    fold,
    phase,
    row_pointers,
    slot,
    softmax,
)

# Their names since Triton 3.9, and before.
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_view = gl.shared_memory_descriptor
reinterpret = getattr(_view, "reinterpret", None) or _view._reinterpret
wait_for_threads = getattr(gl, "barrier", None) or gl.thread_barrier

# In the hash of a kernel, Triton counts the constants of another module's functions only if those
# were hashed before: always, so that a launch finds what was compiled ahead, whatever came first.
_HASHES = [function.cache_key for function in (fold, phase, row_pointers, slot, softmax)]


@gluon.jit
def seat(turn_around):
    """This program's place in a round of dealing."""
    me = gl.program_id(0)
    return gl.where(turn_around % 2 == 0, me, gl.num_programs(0) - 1 - me)


@gluon.jit
def items_of_this_program(n_items):
    """One in each full round, and one in the last where its seat comes before the items end."""
    whole_rounds = n_items // gl.num_programs(0)
    left = n_items - whole_rounds * gl.num_programs(0)
    return whole_rounds + (seat(whole_rounds) < left).to(gl.int32)


@gluon.jit
def find_item(at, sizes, Q_TILE: gl.constexpr):
    """Batch, head and first query row of this program's item ``at``."""
    batch_heads, H, _, N_QUERIES, _ = sizes
    item = at * gl.num_programs(0) + seat(at)
    q_tile = gl.cdiv(N_QUERIES, Q_TILE) - 1 - item // batch_heads
    batch_head = item % batch_heads
    return batch_head // H, batch_head % H, q_tile * Q_TILE


@gluon.jit
def key_tiles(q_start, N_KEYS, Q_TILE: gl.constexpr, K_TILE: gl.constexpr, is_causal: gl.constexpr):
    """An item's key tiles, and how many of them, from the last, are masked."""
    # Keys before those of the masked tiles are seen by every row, in whole key tiles.
    stop = N_KEYS
    n_unmasked = N_KEYS // K_TILE
    if is_causal:
        stop = gl.minimum(q_start + Q_TILE, N_KEYS)
        n_unmasked = gl.minimum(q_start // K_TILE, n_unmasked)
    n_tiles = gl.cdiv(stop, K_TILE)
    return n_tiles, n_tiles - n_unmasked


@gluon.jit
def heads_descriptor(
    base, sizes, strides, D: gl.constexpr, PADDED_D: gl.constexpr, TILE: gl.constexpr
):
    """A descriptor of all heads; a tile is (TILE, PADDED_D) of one, zeros beyond (rows, D)."""
    batch_heads, H, heads_per_kv, _, rows = sizes
    stride_b, stride_h, stride_row = strides
    # TMA need not accept strides of 0: those of an axis of size 1, which the launcher passes, and
    # of an expanded one, which counts as of size 1 (``along``). Nothing steps along either.
    batches = gl.where(stride_b == 0, 1, batch_heads // H)
    heads = gl.where(stride_h == 0, 1, H // heads_per_kv)
    stride_b = gl.where(stride_b == 0, D, stride_b).to(gl.int64)
    stride_h = gl.where(stride_h == 0, D, stride_h).to(gl.int64)
    stride_row = gl.where(rows == 1, D, stride_row).to(gl.int64)
    dtype: gl.constexpr = base.dtype.element_ty
    block: gl.constexpr = [1, 1, TILE, PADDED_D]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return tma.make_tensor_descriptor(
        base, [batches, heads, rows, D], [stride_b, stride_h, stride_row, 1], block, layout
    )


@gluon.jit
def along(index, stride):
    """An axis' coordinate for the descriptor."""
    return gl.where(stride == 0, 0, index)


@gluon.jit
def load_when_free(desc, tile, batch, head, k_start, strides, which: gl.constexpr, state):
    _, ring, full, free, _ = state
    STAGES: gl.constexpr = ring.shape[0] // 2
    stride_b, stride_h, _ = strides
    at = slot(tile, which, STAGES)
    # In memory a tile of the descriptor, (1, 1, rows, columns), is what a tile of the ring is.
    target = reinterpret(ring.index(at), desc.dtype, desc.block_type.shape, desc.layout)
    mbarrier.wait(free.index(at), phase(tile, STAGES) ^ 1)
    mbarrier.expect(full.index(at), desc.block_type.nbytes)
    copy_tile(
        desc, [along(batch, stride_b), along(head, stride_h), k_start, 0], full.index(at), target
    )


@gluon.jit
def produce(state, sizes, K_ptr, V_ptr, k_strides, v_strides, D: gl.constexpr,
            is_causal: gl.constexpr):  # fmt: skip
    """The producer: K and V of item after item; V's descriptor is made while the first K is on its
    way."""
    ring = state[1]
    batch_heads, heads_per_kv, N_QUERIES, N_KEYS = sizes[0], sizes[2], sizes[3], sizes[4]
    Q_TILE: gl.constexpr = state[0].shape[1]
    K_TILE: gl.constexpr = ring.shape[1]
    PADDED_D: gl.constexpr = ring.shape[2]
    # The launcher starts no program without an item.
    batch, head, q_start = find_item(0, sizes, Q_TILE)
    n_tiles, _ = key_tiles(q_start, N_KEYS, Q_TILE, K_TILE, is_causal)
    K_desc = heads_descriptor(K_ptr, sizes, k_strides, D, PADDED_D, K_TILE)
    load_when_free(
        K_desc, 0, batch, head // heads_per_kv, (n_tiles - 1) * K_TILE, k_strides, 0, state
    )
    V_desc = heads_descriptor(V_ptr, sizes, v_strides, D, PADDED_D, K_TILE)

    done = 0  # tiles, of the items before
    n_items = gl.cdiv(N_QUERIES, Q_TILE) * batch_heads
    for at in range(items_of_this_program(n_items)):
        batch, head, q_start = find_item(at, sizes, Q_TILE)
        kv_head = head // heads_per_kv
        n_tiles, _ = key_tiles(q_start, N_KEYS, Q_TILE, K_TILE, is_causal)
        done += n_tiles
        for tile in range(done - n_tiles, done):
            k_start = (done - 1 - tile) * K_TILE
            if tile > 0:
                load_when_free(K_desc, tile, batch, kv_head, k_start, k_strides, 0, state)
            load_when_free(V_desc, tile, batch, kv_head, k_start, v_strides, 1, state)


@gluon.jit
def q_buffer(Q_s, at):
    """Where item ``at`` has its Q: each warpgroup's 64 rows by themselves."""
    BUFFERS: gl.constexpr = Q_s.shape[0]
    GROUPS: gl.constexpr = Q_s.shape[1] // ROWS
    whole = Q_s.index(at % BUFFERS)
    return reinterpret(whole, Q_s.dtype, [GROUPS, ROWS, Q_s.shape[2]], Q_s.layout)


@gluon.jit
def start_loading_q(Q_i, at, n_mine, group: gl.constexpr, sizes, Q_ptr, q_strides,
                    D: gl.constexpr, Q_TILE: gl.constexpr, STRIDES_OF_8: gl.constexpr,
                    WIDE: gl.constexpr):  # fmt: skip
    """A warpgroup's rows of item ``at``; zeros, without a look at memory, beyond the last item."""
    batch, head, q_start = find_item(at, sizes, Q_TILE)
    stride_b, stride_h, stride_row = q_strides
    base = Q_ptr + batch.to(gl.int64) * aligned(stride_b, STRIDES_OF_8)
    base += head.to(gl.int64) * aligned(stride_h, STRIDES_OF_8)
    rows_start, stride_row = q_start + group * ROWS, aligned(stride_row, STRIDES_OF_8)
    pointers, real = row_pointers(base, rows_start, stride_row, sizes[3], D, Q_i.shape[1], WIDE)
    load_async(Q_i, pointers, mask=real & (at < n_mine))
    async_copy.commit_group()


@gluon.jit
def consume(group: gl.constexpr, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides,
            qk_scale, D: gl.constexpr, STRIDES_OF_8: gl.constexpr, WIDE: gl.constexpr,
            is_causal: gl.constexpr):  # fmt: skip
    """One warpgroup: its 64 rows of O and L in each item.

    A warpgroup takes a turn for each tile t but the first of all, t = 0: it waits for its barrier's
    round t - 1, which the one before it ends with its own tile t, and the last one, for the first
    warpgroup, with tile t - 1. The round that tile 0 would end there the first ends itself. So no
    barrier is ever more than one round ahead of who waits for it.

    Q's buffers are this warpgroup's own: program order, and a barrier of its threads, are all that
    keeps their uses apart.
    """
    Q_s, ring, full, free, turn = state
    batch_heads, N_QUERIES, N_KEYS = sizes[0], sizes[3], sizes[4]
    BUFFERS: gl.constexpr = Q_s.shape[0]
    Q_TILE: gl.constexpr = Q_s.shape[1]
    GROUPS: gl.constexpr = Q_TILE // ROWS
    STAGES: gl.constexpr = ring.shape[0] // 2
    K_TILE: gl.constexpr = ring.shape[1]
    PADDED_D: gl.constexpr = ring.shape[2]
    S_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K_TILE, 16])
    O_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, S_layout)

    n_mine = items_of_this_program(gl.cdiv(N_QUERIES, Q_TILE) * batch_heads)
    if BUFFERS == 2:
        start_loading_q(q_buffer(Q_s, 0).index(group), 0, n_mine, group, sizes, Q_ptr, q_strides,
                        D, Q_TILE, STRIDES_OF_8, WIDE)  # fmt: skip
    if group == 0:
        mbarrier.arrive(turn.index(0), count=1)
    done = 0  # tiles, of the items before
    for at in range(n_mine):
        batch, head, q_start = find_item(at, sizes, Q_TILE)
        n_tiles, n_masked = key_tiles(q_start, N_KEYS, Q_TILE, K_TILE, is_causal)
        end = done + n_tiles
        Q_item = q_buffer(Q_s, at)
        Q_i = Q_item.index(group)
        if BUFFERS == 1:
            start_loading_q(Q_i, at, n_mine, group, sizes, Q_ptr, q_strides,
                            D, Q_TILE, STRIDES_OF_8, WIDE)  # fmt: skip
        async_copy.wait_group(0)
        fence_async_shared()
        wait_for_threads()  # Q is whole, and the last item's O has left the other buffer

        rows_start = q_start + group * ROWS
        q_rows = rows_start + gl.arange(0, ROWS, layout=rows_layout)
        l_acc = gl.zeros([ROWS], gl.float32, rows_layout)
        m_acc = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
        O_acc = gl.zeros([ROWS, PADDED_D], gl.float32, O_layout)

        # The first tile has nothing before it to add to O.
        k_at = slot(done, 0, STAGES)
        mbarrier.wait(full.index(k_at), phase(done, STAGES))
        mbarrier.wait(turn.index(group), (done - 1) & 1, pred=done > 0)
        S = gl.zeros([ROWS, K_TILE], gl.float32, S_layout)
        K_t = ring.index(k_at).permute((1, 0))
        S = warpgroup_mma(Q_i, K_t, S, use_acc=False, is_async=True)
        mbarrier.arrive(turn.index((group + 1) % GROUPS), count=1, pred=done > 0)
        if BUFFERS == 2:
            start_loading_q(q_buffer(Q_s, at + 1).index(group), at + 1, n_mine, group, sizes,
                            Q_ptr, q_strides, D, Q_TILE, STRIDES_OF_8, WIDE)  # fmt: skip
        S = warpgroup_mma_wait(0, deps=[S])
        mbarrier.arrive(free.index(k_at), count=1)
        P, _, l_acc, m_acc = softmax(
            S, l_acc, m_acc, q_rows, (n_tiles - 1) * K_TILE, N_KEYS, qk_scale, True, is_causal
        )
        P = gl.convert_layout(P.to(ring.dtype), gl.DotOperandLayout(0, O_layout, 2))

        # What v9 calls the number of tiles is where the count stands after the last.
        item = (Q_item, ring, full, free, turn, q_start, end)
        if is_causal and Q_TILE > K_TILE:  # else only the first tile is masked
            for tile in range(done + 1, done + n_masked):
                O_acc, P, l_acc, m_acc = fold(
                    O_acc, P, l_acc, m_acc, tile, group, item, q_rows, N_KEYS, qk_scale,
                    True, is_causal,
                )  # fmt: skip
        for tile in range(done + gl.maximum(n_masked, 1), end):
            O_acc, P, l_acc, m_acc = fold(
                O_acc, P, l_acc, m_acc, tile, group, item, q_rows, N_KEYS, qk_scale,
                False, is_causal,
            )  # fmt: skip
        v_at = slot(end - 1, 1, STAGES)
        mbarrier.wait(full.index(v_at), phase(end - 1, STAGES))
        O_acc = warpgroup_mma(P, ring.index(v_at), O_acc, is_async=True)
        O_acc = warpgroup_mma_wait(0, deps=[O_acc])
        mbarrier.arrive(free.index(v_at), count=1)
        done = end

        # O goes out by way of shared memory, where this warpgroup's Q was.
        inverse = gl.convert_layout(1.0 / l_acc, gl.SliceLayout(1, O_layout))
        Q_i.store((O_acc * gl.expand_dims(inverse, 1)).to(ring.dtype))
        stride_b, stride_h, stride_row = o_strides
        base = O_ptr + batch.to(gl.int64) * aligned(stride_b, STRIDES_OF_8)
        base += head.to(gl.int64) * aligned(stride_h, STRIDES_OF_8)
        pointers, real = row_pointers(
            base, rows_start, aligned(stride_row, STRIDES_OF_8), N_QUERIES, D, PADDED_D, WIDE
        )
        gl.store(pointers, Q_i.load(pointers.type.layout), mask=real)
        L_i = (m_acc + gl.log2(l_acc)) * 0.6931471805599453  # ln(2): back to natural log
        base = L_ptr + batch.to(gl.int64) * l_strides[0] + head.to(gl.int64) * l_strides[1]
        gl.store(base + q_rows, L_i, mask=q_rows < N_QUERIES)
    async_copy.wait_group(0)  # for the zeros of the item beyond the last


_SHARED_OF_A_BLOCK = 227 * 1024
_SMALL_BUFFERS = 1024  # bytes at most: barriers, and what Triton keeps for the warps


def q_buffers(arguments: dict[str, Any]) -> int:
    """Buffers for Q in a launch with these arguments: two, where a block has room for them."""
    row_bytes = 2 * arguments["PADDED_D"]
    ring = 2 * arguments["num_stages"] * arguments["K_TILE_SIZE"] * row_bytes
    two = ring + 2 * arguments["Q_TILE_SIZE"] * row_bytes
    return 2 if two + _SMALL_BUFFERS <= _SHARED_OF_A_BLOCK else 1


@functools.cache
def multiprocessors(device: Any) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class PersistentFunction(GluonJITFunction):
    """A kernel that takes its grid, (heads of all batches, query tiles), for a list of items."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        items = grid(named) if callable(grid) else grid
        programs = math.prod(items)
        if not warmup:
            programs = min(programs, multiprocessors(named["Q_ptr"].device))
        named |= {"BATCH_HEADS": items[0], "Q_BUFFERS": q_buffers(named)}
        return super().run(grid=(programs,), warmup=warmup, **named)


@functools.partial(PersistentFunction, do_not_specialize=["H", "BATCH_HEADS"])
def flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qh, stride_qq,
    stride_kb, stride_kh, stride_kk,
    stride_vb, stride_vh, stride_vk,
    stride_ob, stride_oh, stride_oq,
    stride_lb, stride_lh,
    H, heads_per_kv, N_QUERIES, N_KEYS, scale,
    D: gl.constexpr, PADDED_D: gl.constexpr, STRIDES_OF_8: gl.constexpr, WIDE: gl.constexpr,
    Q_TILE_SIZE: gl.constexpr, K_TILE_SIZE: gl.constexpr, is_causal: gl.constexpr,
    num_stages: gl.constexpr,
    BATCH_HEADS, Q_BUFFERS: gl.constexpr,  # PersistentFunction's
):  # fmt: skip
    GROUPS: gl.constexpr = Q_TILE_SIZE // ROWS
    dtype: gl.constexpr = Q_ptr.dtype.element_ty
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PADDED_D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K_TILE_SIZE, PADDED_D], dtype)
    Q_s = gl.allocate_shared_memory(dtype, [Q_BUFFERS, Q_TILE_SIZE, PADDED_D], q_layout)
    ring = gl.allocate_shared_memory(dtype, [2 * num_stages, K_TILE_SIZE, PADDED_D], kv_layout)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2 * num_stages, 1], barriers)
    free = gl.allocate_shared_memory(gl.int64, [2 * num_stages, 1], barriers)
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], barriers)
    for at in gl.static_range(2 * num_stages):
        mbarrier.init(full.index(at), count=1)
        mbarrier.init(free.index(at), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turn.index(group), count=1)
    fence_async_shared()

    state = (Q_s, ring, full, free, turn)
    sizes = (BATCH_HEADS, H, heads_per_kv, N_QUERIES, N_KEYS)
    q_strides, o_strides = (stride_qb, stride_qh, stride_qq), (stride_ob, stride_oh, stride_oq)
    k_strides, v_strides = (stride_kb, stride_kh, stride_kk), (stride_vb, stride_vh, stride_vk)
    l_strides = (stride_lb, stride_lh)
    qk_scale = scale * 1.4426950408889634  # log2(e)
    # Registers of the workers: the first warpgroup gets what they leave of the SM's.
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides, qk_scale, D, STRIDES_OF_8, WIDE, is_causal)),
            (consume, (1, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides, qk_scale, D, STRIDES_OF_8, WIDE, is_causal)),
            (produce, (state, sizes, K_ptr, V_ptr, k_strides, v_strides, D, is_causal)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.static_assert(GROUPS == 4, "128 or 256 rows")
        gl.warp_specialize([
            (consume, (0, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides, qk_scale, D, STRIDES_OF_8, WIDE, is_causal)),
            (consume, (1, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides, qk_scale, D, STRIDES_OF_8, WIDE, is_causal)),
            (consume, (2, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides, qk_scale, D, STRIDES_OF_8, WIDE, is_causal)),
            (consume, (3, state, sizes, Q_ptr, O_ptr, L_ptr, q_strides, o_strides, l_strides, qk_scale, D, STRIDES_OF_8, WIDE, is_causal)),
            (produce, (state, sizes, K_ptr, V_ptr, k_strides, v_strides, D, is_causal)),
        ], [4, 4, 4, 1], [112, 112, 112, 24])  # fmt: skip


flash_fwd_kernel.add_pre_run_hook(refuse_what_tma_cannot_read)
