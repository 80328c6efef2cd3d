"""Attention as it is written in the papers, in torch operators: the score matrix in full, three passes over it.

Slow, and as large as the matrix, but short: what every kernel is compared with. It computes in the dtype of its inputs
(cast them to float64 for an exact answer, leave them for the rounding of "plain attention in the same dtype") and is
differentiable by autograd in every input.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) with the meaning of ``flash_ext.forward``, or of ``flash_attn_varlen_func`` given ``cu_seqlens``.

    ``rng_state`` (2,) int64 holds seed and offset of the dropout. Rows that no segment owns: out 0, lse -inf.
    """
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window_size = (window_size[0], min(window_size[1], 0) if window_size[1] >= 0 else 0) if causal else window_size
    options = (softmax_scale, window_size, softcap, sinks, dropout_p, rng_state)
    if cu_seqlens_q is None:
        out, lse = _dense(q, k, v, alibi_slopes, attn_bias, *options)
        return out, lse

    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used = None if seqused_k is None else seqused_k.tolist()
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [wide(q).new_zeros(q.shape[1], 0)]
    for b in range(len(starts_q) - 1):
        rows = slice(starts_q[b], starts_q[b + 1])
        length_k = starts_k[b + 1] - starts_k[b]
        keys = slice(starts_k[b], starts_k[b] + (length_k if used is None else max(0, min(length_k, used[b]))))
        slopes = alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        q_b, k_b, v_b = q[None, rows], k[None, keys], v[None, keys]
        bias = _bias_of_segment(attn_bias, b, q_b.shape[1], k_b.shape[1])
        out, lse = _dense(q_b, k_b, v_b, slopes, bias, *options, first_head=b * q.shape[1])
        outs.append(out[0])
        lses.append(lse[0])
    rest = q.shape[0] - starts_q[-1]
    outs.append(outs[0].new_zeros(rest, *outs[0].shape[1:]))
    lses.append(lses[0].new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _dense(
    q, k, v, alibi_slopes, attn_bias, softmax_scale, window_size, softcap, sinks, dropout_p, rng_state, first_head=0
):
    """q (batch, seqlen_q, num_heads, head_dim); k, v (batch, seqlen_k, num_heads_kv, ...)."""
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_k, group = k.shape[1], num_heads // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (batch, heads, seqlen, dim)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    scores = (q * softmax_scale) @ k.transpose(2, 3)  # (batch, num_heads, seqlen_q, seqlen_k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores.dtype).reshape(-1, num_heads, 1, 1) * (i - j).abs()
    if attn_bias is not None:
        scores = scores + attn_bias.to(scores.dtype)
    left, right = window_size
    if left >= 0:
        scores = scores.masked_fill(j < i - left, -math.inf)
    if right >= 0:
        scores = scores.masked_fill(j > i + right, -math.inf)

    if sinks is not None:  # one more column, whose value vector is zero
        column = sinks.to(scores.dtype).reshape(1, num_heads, 1, 1).expand(batch, -1, seqlen_q, 1)
        scores = torch.cat([scores, column], dim=-1)
    sees_nothing = (scores == -math.inf).all(dim=-1, keepdim=True)  # also where there is no key at all
    scores = scores.masked_fill(sees_nothing, 0.0)
    probs = torch.softmax(scores, dim=-1).masked_fill(sees_nothing, 0.0)[..., :seqlen_k]
    lse = torch.logsumexp(wide(scores), dim=-1).masked_fill(sees_nothing[..., 0], -math.inf)
    if dropout_p:
        keep, scale = dropout_mask(dropout_p, rng_state, batch * num_heads, seqlen_q, seqlen_k, first_head)
        probs = probs * keep.view(batch, num_heads, seqlen_q, seqlen_k) * scale
    return (probs @ v).transpose(1, 2).contiguous(), lse


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _bias_of_segment(attn_bias: Tensor | None, b: int, seqlen_q: int, seqlen_k: int) -> Tensor | None:
    if attn_bias is None:
        return None
    bias = attn_bias[(None,) * (4 - attn_bias.dim())]  # (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k | 1)
    bias = bias[b : b + 1] if bias.shape[0] > 1 else bias
    bias = bias[:, :, :seqlen_q] if bias.shape[2] > 1 else bias
    return bias[..., :seqlen_k] if bias.shape[3] > 1 else bias


_DERIVED_BY = [0, 0xC8B2B839, 0xCB4E4786, 0xB965C7AF]  # Dropout::factor


def dropout_mask(
    dropout_p: float, rng_state: Tensor, heads: int, seqlen_q: int, seqlen_k: int, first_head: int = 0
) -> tuple[Tensor, float]:
    """(keep, scale): which of (heads, seqlen_q, seqlen_k) stay, and the factor of those; bits of attn/dropout.h."""
    p = ctypes.c_float(dropout_p).value
    seed, offset = rng_state[0], rng_state[1]
    col = torch.arange(seqlen_k, device=rng_state.device)
    row = torch.arange(seqlen_q, device=rng_state.device)[:, None]
    head = torch.arange(first_head, first_head + heads, device=rng_state.device)[:, None, None]
    calls = (seqlen_k + 63) // 64 * 4  # of Philox, each for sixteen columns of two rows
    words = torch.cat(_philox(seed, row & ~8, torch.arange(calls, device=rng_state.device), head, offset), dim=-1)
    call, word, derived = (col // 64) * 4 + (col // 2) % 4, (col // 8) % 4, (row // 8) % 2 * 2 + (col // 32) % 2
    factor = torch.tensor(_DERIVED_BY, device=rng_state.device)[derived]  # (seqlen_q, seqlen_k)
    added = words.take_along_dim(((word + derived) % 4 * calls + call)[None], dim=-1)  # (heads, seqlen_q, seqlen_k)
    random = (words[..., word * calls + call] * factor + added) >> (16 * (col % 2)) & 0x7FFF
    return random >= int(p * 32768 + 0.5), 1.0 / (1.0 - p)


def _philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> list[Tensor]:
    """Philox4x32-7 in int64: products wrap modulo 2^64, whose bits are those of the unsigned product."""
    low = 0xFFFFFFFF
    k0, k1 = key & low, (key >> 32) & low
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3 & low)
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = ((b >> 32) & low) ^ c1 ^ k0, b & low, ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [c0, c1, c2, c3]
