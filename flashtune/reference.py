"""The forward pass in plain PyTorch, tile by tile: slow, and meant to be read.

FlashAttention-2's algorithm as the kernels run it: a program there is one turn of the outer loop
here. It runs on any device, in any floating dtype.
"""

from __future__ import annotations

import math

import torch


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_tile: int = 16,
    k_tile: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q K^T / sqrt(D)) V and the logsumexp of the scaled scores.

    ``q`` is (..., H, N, D); ``k`` and ``v`` are (..., H_kv, N_k, D), of one floating dtype, H_kv
    dividing H. With ``causal`` query i sees keys 0 to i, whatever the two lengths. Tiles are rows
    of Q and of K; lengths need not be multiples of them.

    Returns O, like ``q``, and L, (..., H, N), natural log, in fp32 (fp64 for fp64 inputs).
    """
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, dim=-3) for x in (k, v))
    N, D = q.shape[-2:]
    N_k = k.shape[-2]
    wide = torch.promote_types(q.dtype, torch.float32)  # of scores and running sums
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)

    for q_start in range(0, N, q_tile):
        q_rows = torch.arange(q_start, min(q_start + q_tile, N), device=q.device)
        Q_i = q[..., q_rows, :].to(wide)
        O_i = torch.zeros_like(Q_i)
        l_i = Q_i.new_zeros(Q_i.shape[:-1])  # the row sum of P so far
        m_i = torch.full_like(l_i, -math.inf)  # the row maximum of S so far

        # No row of this tile sees a key beyond its last row.
        k_stop = min(N_k, q_start + q_tile) if causal else N_k
        for k_start in range(0, k_stop, k_tile):
            k_rows = torch.arange(k_start, min(k_start + k_tile, k_stop), device=q.device)
            K_j, V_j = k[..., k_rows, :].to(wide), v[..., k_rows, :].to(wide)
            S_ij = Q_i @ K_j.transpose(-1, -2) / math.sqrt(D)
            if causal:
                S_ij = S_ij.masked_fill(k_rows[None, :] > q_rows[:, None], -math.inf)

            # Every row sees key 0, so m is finite from the first tile on.
            m_new = torch.maximum(m_i, S_ij.amax(dim=-1))
            P_ij = torch.exp(S_ij - m_new[..., None])
            alpha = torch.exp(m_i - m_new)  # what was summed under the old maximum shrinks
            l_i = alpha * l_i + P_ij.sum(dim=-1)
            O_i = alpha[..., None] * O_i + P_ij @ V_j
            m_i = m_new

        o[..., q_rows, :] = (O_i / l_i[..., None]).to(o.dtype)
        lse[..., q_rows] = m_i + torch.log(l_i)
    return o, lse
