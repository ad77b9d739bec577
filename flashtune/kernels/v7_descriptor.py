"""v7: v6 with Q, K and V loaded through tensor descriptors, which Hopper's and Blackwell's TMA serves.

One thread asks for a whole tile; no thread computes addresses or masks rows, and tiles arrive in the
layout that the tensor cores read. What lies past N, or past D where it is padded, comes as zeros.
Each program makes its own three descriptors, in scratch memory (``load_kernel`` says where from).

TMA takes base addresses and strides in multiples of 16 bytes only. With others it does not fail: it
reads something else. So a launch on such tensors is refused before it starts.
"""

import triton
import triton.language as tl

from flashtune.kernels.tiles import aligned, head_bases, store_tile
from flashtune.kernels.tma import head_descriptor, refuse_what_tma_cannot_read


@triton.jit
def attend_key_tiles(
    O_acc, l_acc, m_acc, Q_i, q_rows, K_desc, V_desc, start, stop, N_KEYS, qk_scale,
    K_TILE_SIZE: tl.constexpr, MASKED: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """Fold the keys [start, stop) into the running softmax."""
    for k_start in range(start, stop, K_TILE_SIZE):
        K_j = K_desc.load([k_start, 0])
        V_j = V_desc.load([k_start, 0])  # beside K: one barrier tells of both

        S_ij = tl.dot(Q_i, tl.trans(K_j))
        if MASKED:
            k_rows = k_start + tl.arange(0, K_TILE_SIZE)
            visible = (k_rows < N_KEYS)[None, :]
            if is_causal:
                visible = visible & (k_rows[None, :] <= q_rows[:, None])
            S_ij = tl.where(visible, S_ij, float("-inf"))

        # As in v6: the scale is folded into the maxima and into the way to exp2.
        m_new = tl.maximum(m_acc, tl.max(S_ij, axis=1) * qk_scale)
        P_ij = tl.math.exp2(S_ij * qk_scale - m_new[:, None])
        alpha = tl.math.exp2(m_acc - m_new)
        l_acc = alpha * l_acc + tl.sum(P_ij, axis=1)
        O_acc = tl.dot(P_ij.to(V_j.dtype), V_j, acc=O_acc * alpha[:, None])
        m_acc = m_new
    return O_acc, l_acc, m_acc


@triton.jit(do_not_specialize=["H"])
def flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qh, stride_qq,
    stride_kb, stride_kh, stride_kk,
    stride_vb, stride_vh, stride_vk,
    stride_ob, stride_oh, stride_oq,
    stride_lb, stride_lh,
    H, heads_per_kv, N_QUERIES, N_KEYS, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, STRIDES_OF_8: tl.constexpr, WIDE: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    q_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * Q_TILE_SIZE
    Q_base, K_base, V_base, O_base, L_base = head_bases(
        tl.program_id(0), H, heads_per_kv, Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
        stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
        stride_ob, stride_oh, stride_lb, stride_lh, STRIDES_OF_8,
    )  # fmt: skip
    Q_desc = head_descriptor(Q_base, N_QUERIES, stride_qq, D, PADDED_D, Q_TILE_SIZE)
    K_desc = head_descriptor(K_base, N_KEYS, stride_kk, D, PADDED_D, K_TILE_SIZE)
    V_desc = head_descriptor(V_base, N_KEYS, stride_vk, D, PADDED_D, K_TILE_SIZE)

    q_rows = q_start + tl.arange(0, Q_TILE_SIZE)
    Q_i = Q_desc.load([q_start, 0])

    O_acc = tl.zeros((Q_TILE_SIZE, PADDED_D), dtype=tl.float32)
    l_acc = tl.zeros((Q_TILE_SIZE,), dtype=tl.float32)
    # m is kept in log2 units of the scaled scores.
    m_acc = tl.full((Q_TILE_SIZE,), float("-inf"), dtype=tl.float32)
    qk_scale = scale * 1.4426950408889634  # log2(e)

    # Keys before unmasked_stop are seen by every row of this tile, in whole key tiles.
    unmasked_stop = N_KEYS // K_TILE_SIZE * K_TILE_SIZE
    masked_stop = N_KEYS
    if is_causal:
        unmasked_stop = tl.minimum(q_start // K_TILE_SIZE * K_TILE_SIZE, unmasked_stop)
        masked_stop = tl.minimum(q_start + Q_TILE_SIZE, N_KEYS)
    O_acc, l_acc, m_acc = attend_key_tiles(
        O_acc, l_acc, m_acc, Q_i, q_rows, K_desc, V_desc,
        0, unmasked_stop, N_KEYS, qk_scale, K_TILE_SIZE, False, is_causal,
    )  # fmt: skip
    O_acc, l_acc, m_acc = attend_key_tiles(
        O_acc, l_acc, m_acc, Q_i, q_rows, K_desc, V_desc,
        unmasked_stop, masked_stop, N_KEYS, qk_scale, K_TILE_SIZE, True, is_causal,
    )  # fmt: skip

    L_i = (m_acc + tl.math.log2(l_acc)) * 0.6931471805599453  # ln(2): back to natural log
    stride_oq = aligned(stride_oq, STRIDES_OF_8)
    store_tile(O_acc / l_acc[:, None], L_i, O_base, L_base, q_rows, stride_oq,
               N_QUERIES, D, PADDED_D, WIDE)  # fmt: skip


flash_fwd_kernel.add_pre_run_hook(refuse_what_tma_cannot_read)
