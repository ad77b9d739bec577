"""v3: causal tiles above the diagonal are never visited, the softmax still uses exp.

The key loop is split in two. Key tiles that every row sees whole go through a loop without masks
or row checks; only the tiles on the diagonal, and a ragged last one, go through the masked loop.
Grid = (query tiles, B * H).
"""

import triton
import triton.language as tl

from flashtune.kernels.tiles import aligned, head_bases, load_tile, store_tile, tile_offsets


@triton.jit
def attend_key_tiles(
    O_acc, l_acc, m_acc, Q_i, q_rows, K_base, V_base, stride_kk, stride_vk,
    start, stop, N_KEYS, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, WIDE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    MASKED: tl.constexpr, is_causal: tl.constexpr,
):  # fmt: skip
    """Fold the keys [start, stop) into the running softmax."""
    for k_start in range(start, stop, K_TILE_SIZE):
        k_rows = k_start + tl.arange(0, K_TILE_SIZE)
        real_keys = k_rows < N_KEYS
        K_j = load_tile(K_base + tile_offsets(k_rows, stride_kk, PADDED_D, WIDE),
                        real_keys, D, PADDED_D, CHECK_ROWS=MASKED)  # fmt: skip
        V_j = load_tile(V_base + tile_offsets(k_rows, stride_vk, PADDED_D, WIDE),
                        real_keys, D, PADDED_D, CHECK_ROWS=MASKED)  # fmt: skip

        S_ij = tl.dot(Q_i, tl.trans(K_j)) * scale
        if MASKED:
            visible = real_keys[None, :]
            if is_causal:
                visible = visible & (k_rows[None, :] <= q_rows[:, None])
            # Every row sees key 0, in the first tile, so m is finite before a row of -inf can come.
            S_ij = tl.where(visible, S_ij, float("-inf"))

        m_new = tl.maximum(m_acc, tl.max(S_ij, axis=1))
        P_ij = tl.exp(S_ij - m_new[:, None])
        alpha = tl.exp(m_acc - m_new)
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
    q_start = tl.program_id(0) * Q_TILE_SIZE
    Q_base, K_base, V_base, O_base, L_base = head_bases(
        tl.program_id(1), H, heads_per_kv, Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
        stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
        stride_ob, stride_oh, stride_lb, stride_lh, STRIDES_OF_8,
    )  # fmt: skip
    stride_qq, stride_kk = aligned(stride_qq, STRIDES_OF_8), aligned(stride_kk, STRIDES_OF_8)
    stride_vk, stride_oq = aligned(stride_vk, STRIDES_OF_8), aligned(stride_oq, STRIDES_OF_8)

    q_rows = q_start + tl.arange(0, Q_TILE_SIZE)
    Q_i = load_tile(Q_base + tile_offsets(q_rows, stride_qq, PADDED_D, WIDE),
                    q_rows < N_QUERIES, D, PADDED_D, CHECK_ROWS=True)  # fmt: skip

    O_acc = tl.zeros((Q_TILE_SIZE, PADDED_D), dtype=tl.float32)
    l_acc = tl.zeros((Q_TILE_SIZE,), dtype=tl.float32)
    m_acc = tl.full((Q_TILE_SIZE,), float("-inf"), dtype=tl.float32)

    # Keys before unmasked_stop are seen by every row of this tile, in whole key tiles.
    unmasked_stop = N_KEYS // K_TILE_SIZE * K_TILE_SIZE
    masked_stop = N_KEYS
    if is_causal:
        unmasked_stop = tl.minimum(q_start // K_TILE_SIZE * K_TILE_SIZE, unmasked_stop)
        masked_stop = tl.minimum(q_start + Q_TILE_SIZE, N_KEYS)
    O_acc, l_acc, m_acc = attend_key_tiles(
        O_acc, l_acc, m_acc, Q_i, q_rows, K_base, V_base, stride_kk, stride_vk,
        0, unmasked_stop, N_KEYS, scale, D, PADDED_D, WIDE, K_TILE_SIZE, False, is_causal,
    )  # fmt: skip
    O_acc, l_acc, m_acc = attend_key_tiles(
        O_acc, l_acc, m_acc, Q_i, q_rows, K_base, V_base, stride_kk, stride_vk,
        unmasked_stop, masked_stop, N_KEYS, scale, D, PADDED_D, WIDE, K_TILE_SIZE, True, is_causal,
    )  # fmt: skip

    store_tile(O_acc / l_acc[:, None], m_acc + tl.log(l_acc), O_base, L_base, q_rows, stride_oq,
               N_QUERIES, D, PADDED_D, WIDE)  # fmt: skip
