"""Standard attention: the whole score matrix in memory. In fp64 it is the reference, in 16 bit the measure of error."""

from __future__ import annotations

import torch


def standard_attention(
    q,
    k,
    v,
    *,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    attn_bias=None,
    sinks=None,
    keep=None,
):
    """q, k, v (batch, seqlen, heads, dim); k and v may have fewer heads -> (batch, seqlen_q, num_heads, head_dim_v).

    keep: what dropout multiplies the probabilities by, (batch, num_heads, seqlen_q, seqlen_k)
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, dim)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5  # (batch, num_heads, seqlen_q, seqlen_k)
    seqlen_q, seqlen_k = scores.shape[2:]

    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window_size[0], 0 if causal else window_size[1]
    if alibi_slopes is not None or left >= 0 or right >= 0:
        diagonal = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        offset = torch.arange(seqlen_k, device=q.device) - diagonal  # (seqlen_q, seqlen_k), 0 on the diagonal
    if alibi_slopes is not None:
        scores = scores - (alibi_slopes[:, None, None] * offset.abs()).to(scores.dtype)
    if attn_bias is not None:
        scores = scores + attn_bias.to(scores.dtype)
    if left >= 0:
        scores = scores.masked_fill(offset < -left, -torch.inf)
    if right >= 0:
        scores = scores.masked_fill(offset > right, -torch.inf)

    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    if keep is not None:
        probabilities = probabilities * keep.to(probabilities.dtype)
    return (probabilities @ v).transpose(1, 2)
