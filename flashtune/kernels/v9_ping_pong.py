"""v9: warp specialisation by hand, in Gluon: one warp loads, warpgroups take turns on the tensor cores.

A program is a producer warp and a warpgroup (four warps) for each 64 of its query rows. The producer
keeps a ring of K and V tiles full through TMA; barriers say which tiles have arrived and which may
be overwritten. Each warpgroup loads its own Q by pointers, while the producer makes the first
descriptor: that takes most of a microsecond. A warpgroup starts the scores of tile i, then adds tile i - 1 to O, and computes the
softmax of tile i while the tensor cores still work on that. Warpgroups pass a turn around, so that
one's softmax falls into the other's matmuls (FlashAttention-3's ping-pong). Registers move from the
producer to the warpgroups.

Tiles are taken from the last to the first, so that the masked ones come first. num_stages is the
number of K tiles, and of V tiles, in the ring. Hopper only: it is written in that card's instructions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtune.kernels.tiles import aligned
from flashtune.kernels.tma import refuse_what_tma_cannot_read

ROWS = gl.constexpr(64)  # of Q, that one warpgroup owns
# Its name since Triton 3.9, and before.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def slot(i, which: gl.constexpr, STAGES: gl.constexpr):
    """Where tile i's K (which = 0) or V (1) lies in the ring."""
    return 2 * (i % STAGES) + which


@gluon.jit
def phase(i, STAGES: gl.constexpr):
    """The parity of the round of the ring that tile i belongs to."""
    return (i // STAGES) & 1


@gluon.jit
def load_when_free(desc, i, k_start, which: gl.constexpr, ring, full, free):
    STAGES: gl.constexpr = ring.shape[0] // 2
    at = slot(i, which, STAGES)
    mbarrier.wait(free.index(at), phase(i, STAGES) ^ 1)
    mbarrier.expect(full.index(at), desc.block_type.nbytes)
    copy_tile(desc, [k_start, 0], full.index(at), ring.index(at))


@gluon.jit
def head_descriptor(
    base, rows, row_stride, D: gl.constexpr, PADDED_D: gl.constexpr, TILE: gl.constexpr
):
    """A descriptor of one head, whose tiles are (TILE, PADDED_D): zeros beyond (rows, D)."""
    dtype: gl.constexpr = base.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, PADDED_D], dtype)
    # A single row is never stepped from, and the launcher passes 0: TMA need not accept that.
    row_stride = gl.where(rows == 1, D, row_stride).to(gl.int64)
    return tma.make_tensor_descriptor(base, [rows, D], [row_stride, 1], [TILE, PADDED_D], layout)


@gluon.jit
def produce(state, K_base, V_base, stride_kk, stride_vk, N_KEYS, D: gl.constexpr):
    """The producer; V's descriptor is made while the first K is on its way."""
    _, ring, full, free, _, _, n_tiles = state
    K_TILE: gl.constexpr = ring.shape[1]
    PADDED_D: gl.constexpr = ring.shape[2]
    k_start = (n_tiles - 1) * K_TILE
    K_desc = head_descriptor(K_base, N_KEYS, stride_kk, D, PADDED_D, K_TILE)
    load_when_free(K_desc, 0, k_start, 0, ring, full, free)
    V_desc = head_descriptor(V_base, N_KEYS, stride_vk, D, PADDED_D, K_TILE)
    load_when_free(V_desc, 0, k_start, 1, ring, full, free)
    for i in range(1, n_tiles):
        k_start = (n_tiles - 1 - i) * K_TILE
        load_when_free(K_desc, i, k_start, 0, ring, full, free)
        load_when_free(V_desc, i, k_start, 1, ring, full, free)


@gluon.jit
def row_pointers(base, rows_start, row_stride, N_QUERIES, D: gl.constexpr, PADDED_D: gl.constexpr,
                 WIDE: gl.constexpr):  # fmt: skip
    """Pointers to a warpgroup's rows, 16 bytes a thread, and which are real."""
    ACROSS: gl.constexpr = min(32, PADDED_D // 8)  # threads along a row
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    rows = rows_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, PADDED_D, layout=gl.SliceLayout(0, layout))
    real = gl.expand_dims(rows < N_QUERIES, 1) & gl.expand_dims(columns < D, 0)
    steps = rows.to(gl.int64) if WIDE else rows
    return base + gl.expand_dims(steps, 1) * row_stride + gl.expand_dims(columns, 0), real


@gluon.jit
def softmax(S, l_acc, m_acc, q_rows, k_start, N_KEYS, qk_scale,
            MASKED: gl.constexpr, is_causal: gl.constexpr):  # fmt: skip
    """P, what O shrinks by, and the new l and m (in log2 units of the scaled scores)."""
    if MASKED:
        K_TILE: gl.constexpr = S.shape[1]
        k_rows = k_start + gl.arange(0, K_TILE, layout=gl.SliceLayout(0, S.type.layout))
        visible = gl.expand_dims(k_rows < N_KEYS, 0)
        if is_causal:
            visible = visible & (gl.expand_dims(k_rows, 0) <= gl.expand_dims(q_rows, 1))
        S = gl.where(visible, S, float("-inf"))
    m_new = gl.maximum(m_acc, gl.max(S, axis=1) * qk_scale)
    # The first tiles may hold no key that a row sees: its maximum is still -inf.
    base = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    P = gl.exp2(S * qk_scale - gl.expand_dims(base, 1))
    alpha = gl.exp2(m_acc - base)
    return P, alpha, l_acc * alpha + gl.sum(P, axis=1), m_new


@gluon.jit
def fold(O_acc, P, l_acc, m_acc, i, group: gl.constexpr, state, q_rows, N_KEYS, qk_scale,
         MASKED: gl.constexpr, is_causal: gl.constexpr):  # fmt: skip
    """Scores of tile i beside P V of tile i - 1; then the softmax of tile i."""
    Q_s, ring, full, free, turn, _, n_tiles = state
    GROUPS: gl.constexpr = Q_s.shape[0]
    STAGES: gl.constexpr = ring.shape[0] // 2
    K_TILE: gl.constexpr = ring.shape[1]
    S_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K_TILE, 16])

    k_at, v_at = slot(i, 0, STAGES), slot(i - 1, 1, STAGES)
    mbarrier.wait(full.index(k_at), phase(i, STAGES))
    if GROUPS > 1:
        mbarrier.wait(turn.index(group), (i - 1) & 1)
    S = gl.zeros([ROWS, K_TILE], gl.float32, S_layout)
    K_t = ring.index(k_at).permute((1, 0))
    S = warpgroup_mma(Q_s.index(group), K_t, S, use_acc=False, is_async=True)
    mbarrier.wait(full.index(v_at), phase(i - 1, STAGES))
    O_acc = warpgroup_mma(P, ring.index(v_at), O_acc, is_async=True)
    if GROUPS > 1:
        mbarrier.arrive(turn.index((group + 1) % GROUPS), count=1)

    S = warpgroup_mma_wait(1, deps=[S])
    mbarrier.arrive(free.index(k_at), count=1)
    k_start = (n_tiles - 1 - i) * K_TILE
    P_new, alpha, l_acc, m_acc = softmax(
        S, l_acc, m_acc, q_rows, k_start, N_KEYS, qk_scale, MASKED, is_causal
    )
    O_acc = warpgroup_mma_wait(0, deps=[O_acc])
    mbarrier.arrive(free.index(v_at), count=1)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_acc.type.layout))
    P = gl.convert_layout(P_new.to(ring.dtype), P.type.layout)
    return O_acc * gl.expand_dims(alpha, 1), P, l_acc, m_acc


@gluon.jit
def consume(group: gl.constexpr, state, Q_base, O_base, L_base, stride_qq, stride_oq,
            N_QUERIES, N_KEYS, n_masked, qk_scale,
            D: gl.constexpr, WIDE: gl.constexpr, is_causal: gl.constexpr):  # fmt: skip
    """One warpgroup: its 64 rows of O and L."""
    Q_s, ring, full, free, turn, q_start, n_tiles = state
    GROUPS: gl.constexpr = Q_s.shape[0]
    STAGES: gl.constexpr = ring.shape[0] // 2
    K_TILE: gl.constexpr = ring.shape[1]
    PADDED_D: gl.constexpr = ring.shape[2]
    S_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K_TILE, 16])
    O_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED_D, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(1, S_layout)

    rows_start = q_start + group * ROWS
    Q_i = Q_s.index(group)
    pointers, real = row_pointers(Q_base, rows_start, stride_qq, N_QUERIES, D, PADDED_D, WIDE)
    Q_i.store(gl.load(pointers, mask=real, other=0.0))
    fence_async_shared()

    q_rows = rows_start + gl.arange(0, ROWS, layout=rows_layout)
    l_acc = gl.zeros([ROWS], gl.float32, rows_layout)
    m_acc = gl.full([ROWS], float("-inf"), gl.float32, rows_layout)
    O_acc = gl.zeros([ROWS, PADDED_D], gl.float32, O_layout)

    # The first tile has nothing before it to add to O.
    mbarrier.wait(full.index(0), 0)
    S = gl.zeros([ROWS, K_TILE], gl.float32, S_layout)
    S = warpgroup_mma(Q_i, ring.index(0).permute((1, 0)), S, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, deps=[S])
    mbarrier.arrive(free.index(0), count=1)
    if group == 0:
        mbarrier.arrive(turn.index(0), count=1)
    P, _, l_acc, m_acc = softmax(
        S, l_acc, m_acc, q_rows, (n_tiles - 1) * K_TILE, N_KEYS, qk_scale, True, is_causal
    )
    P = gl.convert_layout(P.to(ring.dtype), gl.DotOperandLayout(0, O_layout, 2))

    if is_causal and GROUPS * ROWS > K_TILE:  # else only the first tile is masked
        for i in range(1, n_masked):
            O_acc, P, l_acc, m_acc = fold(
                O_acc, P, l_acc, m_acc, i, group, state, q_rows, N_KEYS, qk_scale, True, is_causal
            )
    for i in range(gl.maximum(n_masked, 1), n_tiles):
        O_acc, P, l_acc, m_acc = fold(
            O_acc, P, l_acc, m_acc, i, group, state, q_rows, N_KEYS, qk_scale, False, is_causal
        )
    v_at = slot(n_tiles - 1, 1, STAGES)
    mbarrier.wait(full.index(v_at), phase(n_tiles - 1, STAGES))
    O_acc = warpgroup_mma(P, ring.index(v_at), O_acc, is_async=True)
    O_acc = warpgroup_mma_wait(0, deps=[O_acc])

    # O goes out by way of shared memory, where this warpgroup's Q was.
    inverse = gl.convert_layout(1.0 / l_acc, gl.SliceLayout(1, O_layout))
    Q_i.store((O_acc * gl.expand_dims(inverse, 1)).to(ring.dtype))
    pointers, real = row_pointers(O_base, rows_start, stride_oq, N_QUERIES, D, PADDED_D, WIDE)
    gl.store(pointers, Q_i.load(pointers.type.layout), mask=real)
    L_i = (m_acc + gl.log2(l_acc)) * 0.6931471805599453  # ln(2): back to natural log
    gl.store(L_base + q_rows, L_i, mask=q_rows < N_QUERIES)


@gluon.jit(do_not_specialize=["H"])
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
):  # fmt: skip
    GROUPS: gl.constexpr = Q_TILE_SIZE // ROWS
    dtype: gl.constexpr = Q_ptr.dtype.element_ty
    batch = (gl.program_id(0) // H).to(gl.int64)
    head = (gl.program_id(0) % H).to(gl.int64)
    kv_head = head // heads_per_kv
    Q_base = Q_ptr + batch * aligned(stride_qb, STRIDES_OF_8) + head * aligned(stride_qh, STRIDES_OF_8)
    K_base = K_ptr + batch * aligned(stride_kb, STRIDES_OF_8) + kv_head * aligned(stride_kh, STRIDES_OF_8)
    V_base = V_ptr + batch * aligned(stride_vb, STRIDES_OF_8) + kv_head * aligned(stride_vh, STRIDES_OF_8)
    O_base = O_ptr + batch * aligned(stride_ob, STRIDES_OF_8) + head * aligned(stride_oh, STRIDES_OF_8)
    L_base = L_ptr + batch * stride_lb + head * stride_lh

    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PADDED_D], dtype)
    kv_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K_TILE_SIZE, PADDED_D], dtype)
    Q_s = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, PADDED_D], q_layout)
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

    # Keys before those of the masked tiles are seen by every row, in whole key tiles.
    q_start = (gl.num_programs(1) - 1 - gl.program_id(1)) * Q_TILE_SIZE
    stop = N_KEYS
    n_unmasked = N_KEYS // K_TILE_SIZE
    if is_causal:
        stop = gl.minimum(q_start + Q_TILE_SIZE, N_KEYS)
        n_unmasked = gl.minimum(q_start // K_TILE_SIZE, n_unmasked)
    n_tiles = gl.cdiv(stop, K_TILE_SIZE)
    n_masked = n_tiles - n_unmasked
    qk_scale = scale * 1.4426950408889634  # log2(e)

    state = (Q_s, ring, full, free, turn, q_start, n_tiles)
    q_stride = aligned(stride_qq, STRIDES_OF_8)
    o_stride = aligned(stride_oq, STRIDES_OF_8)
    # Registers of the workers: the first warpgroup gets what they leave of the SM's.
    if GROUPS == 1:
        gl.warp_specialize([
            (consume, (0, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (produce, (state, K_base, V_base, stride_kk, stride_vk, N_KEYS, D)),
        ], [1], [24])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (consume, (0, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (consume, (1, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (produce, (state, K_base, V_base, stride_kk, stride_vk, N_KEYS, D)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.static_assert(GROUPS == 4, "64, 128 or 256 rows")
        gl.warp_specialize([
            (consume, (0, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (consume, (1, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (consume, (2, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (consume, (3, state, Q_base, O_base, L_base, q_stride, o_stride, N_QUERIES, N_KEYS, n_masked, qk_scale, D, WIDE, is_causal)),
            (produce, (state, K_base, V_base, stride_kk, stride_vk, N_KEYS, D)),
        ], [4, 4, 4, 1], [112, 112, 112, 24])  # fmt: skip


flash_fwd_kernel.add_pre_run_hook(refuse_what_tma_cannot_read)
