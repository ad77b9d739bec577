"""Device functions that every kernel of the ladder shares: addresses, loads and the store.

Addresses are plain pointers, so that every Triton from 3.6 on compiles them. A program's base
pointers are 64-bit; offsets within its head are 32-bit wherever they fit. Computing them afresh from
the row numbers in every iteration was faster on an H200 than carrying pointers through the loop (by
5 to 25%), which costs registers.
"""

import triton
import triton.language as tl


@triton.jit
def aligned(stride, STRIDES_OF_8: tl.constexpr):
    # Triton believes an integer divisible only when it is a multiple of 16, which rows of D = 40 or
    # 72 are not: their loads would fall back to two bytes each, without cp.async. The launcher
    # checked that every stride is a multiple of 8; this tells the compiler.
    if STRIDES_OF_8:
        return stride // 8 * 8
    else:
        return stride


@triton.jit
def head_bases(
    batch_head, H, heads_per_kv, Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    stride_ob, stride_oh, stride_lb, stride_lh, STRIDES_OF_8: tl.constexpr,
):  # fmt: skip
    """Pointers to the first row of this program's head in Q, K, V, O and L."""
    batch = (batch_head // H).to(tl.int64)
    head = (batch_head % H).to(tl.int64)
    kv_head = head // heads_per_kv
    Q_base = Q_ptr + batch * aligned(stride_qb, STRIDES_OF_8) + head * aligned(stride_qh, STRIDES_OF_8)
    K_base = K_ptr + batch * aligned(stride_kb, STRIDES_OF_8) + kv_head * aligned(stride_kh, STRIDES_OF_8)
    V_base = V_ptr + batch * aligned(stride_vb, STRIDES_OF_8) + kv_head * aligned(stride_vh, STRIDES_OF_8)
    O_base = O_ptr + batch * aligned(stride_ob, STRIDES_OF_8) + head * aligned(stride_oh, STRIDES_OF_8)
    return Q_base, K_base, V_base, O_base, L_ptr + batch * stride_lb + head * stride_lh


@triton.jit
def tile_offsets(rows, row_stride, PADDED_D: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets of a (rows, PADDED_D) tile. WIDE: some offset does not fit 32 bits."""
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * row_stride + tl.arange(0, PADDED_D)[None, :]


@triton.jit
def load_tile(
    pointers, real_rows, D: tl.constexpr, PADDED_D: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """A (rows, PADDED_D) tile. Columns past D are zero, and rows past the tensor where checked."""
    real_columns = tl.arange(0, PADDED_D)[None, :] < D
    if CHECK_ROWS and PADDED_D != D:
        return tl.load(pointers, mask=real_rows[:, None] & real_columns, other=0.0)
    elif CHECK_ROWS:
        return tl.load(pointers, mask=real_rows[:, None], other=0.0)
    elif PADDED_D != D:
        return tl.load(pointers, mask=real_columns, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(
    O_i, L_i, O_base, L_base, q_rows, stride_oq, N_QUERIES,
    D: tl.constexpr, PADDED_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store O in its own dtype and L (natural-log logsumexp, fp32), without the padded rows."""
    real_rows = q_rows < N_QUERIES
    mask = real_rows[:, None]
    if PADDED_D != D:
        mask = mask & (tl.arange(0, PADDED_D)[None, :] < D)
    O_tile = O_i.to(O_base.dtype.element_ty)
    tl.store(O_base + tile_offsets(q_rows, stride_oq, PADDED_D, WIDE), O_tile, mask=mask)
    tl.store(L_base + q_rows, L_i, mask=real_rows)
