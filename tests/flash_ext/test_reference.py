"""The reference against other ways to the same numbers: torch's own attention, and loops over single entries."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from flash_ext.reference import attention, dropout_mask


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def test_equals_torch():
    q, k, v, bias = rand(2, 9, 4, 16), rand(2, 7, 2, 16), rand(2, 7, 2, 16), rand(9, 7)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=bias, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(attention(q, k, v, attn_bias=bias)[0], expected)
    square = [t[:, :7].transpose(1, 2) for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*square, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(attention(q[:, :7], k, v, causal=True)[0], expected)


def test_equals_a_loop_over_entries():
    q, k, v = rand(1, 4, 2, 3), rand(1, 6, 1, 3), rand(1, 6, 1, 2)
    slopes, sinks, cap, scale, left, right = torch.tensor([0.3, 0.7]), rand(2), 1.5, 0.9, 2, 1
    options = {"alibi_slopes": slopes, "sinks": sinks, "softcap": cap, "softmax_scale": scale}
    out, lse = attention(q, k, v, window_size=(left, right), **options)
    for head in range(2):
        for i in range(4):
            diagonal, total, value = i + 6 - 4, math.exp(sinks[head]), torch.zeros(2, dtype=torch.float64)
            for j in range(6):
                if diagonal - left <= j <= diagonal + right:
                    s = cap * math.tanh(scale * float(q[0, i, head] @ k[0, j, 0]) / cap)
                    weight = math.exp(s - float(slopes[head]) * abs(diagonal - j))
                    total, value = total + weight, value + weight * v[0, j, 0]
            assert torch.allclose(out[0, i, head], value / total)
            assert math.isclose(lse[0, head, i], math.log(total), rel_tol=1e-6)


def philox(key, counter):
    """Philox4x32-7 with Python's integers."""
    low = 2**32 - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key & low, key >> 32
    for _ in range(7):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & low, (a >> 32) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def test_dropout_bits():
    seed, offset, p = 2**61 + 12345, 2**33 + 7, 0.3
    keep, scale = dropout_mask(p, torch.tensor([seed, offset]), 2, 19, 70, first_head=6)
    assert math.isclose(scale, 1 / 0.7, rel_tol=1e-6)
    for head in range(2):
        for row in range(19):
            for col in range(70):
                words = philox(seed, (row & ~8, col // 64 * 4 + col // 2 % 4, head + 6, offset & (2**32 - 1)))
                i, derived = col // 8 % 4, row // 8 % 2 * 2 + col // 32 % 2
                factor = (0, 0xC8B2B839, 0xCB4E4786, 0xB965C7AF)[derived]
                bits = words[i] * factor + words[(i + derived) % 4] >> (16 * (col % 2))
                assert bool(keep[head, row, col]) == (bits & 0x7FFF >= int(p * 32768 + 0.5))
    many, _ = dropout_mask(p, torch.tensor([seed, offset]), 16, 256, 256)
    assert abs(many.double().mean() - 0.7) < 0.002


def test_packed_equals_each_sequence_alone():
    lengths = [(3, 5), (0, 4), (4, 0), (6, 6)]
    q, k, v = rand(15, 4, 8), rand(17, 2, 8), rand(17, 2, 8)  # two rows more than the sequences own
    cu_q = torch.tensor([0, 3, 3, 7, 13], dtype=torch.int32)
    cu_k = torch.tensor([0, 5, 9, 9, 15], dtype=torch.int32)
    used = torch.tensor([4, 4, 0, 5], dtype=torch.int32)
    bias = rand(4, 1, 6, 6)
    options = {"causal": True, "attn_bias": bias, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_k": used}
    out, lse = attention(q, k, v, **options)
    for b, (length_q, _) in enumerate(lengths):
        rows = slice(int(cu_q[b]), int(cu_q[b + 1]))
        keys = slice(int(cu_k[b]), int(cu_k[b]) + int(used[b]))
        part = bias[b : b + 1, :, :length_q, : int(used[b])]
        expected = attention(q[None, rows], k[None, keys], v[None, keys], causal=True, attn_bias=part)
        assert torch.equal(out[rows], expected[0][0]) and torch.equal(lse[:, rows], expected[1][0])
    assert (out[13:] == 0).all() and (lse[:, 13:] == -math.inf).all()
