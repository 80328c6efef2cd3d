"""attn/seqlen.h as users see it: a packed call equals one dense call per sequence, and foreign memory stays foreign."""

from __future__ import annotations

import math

import torch
from problems import cumulated

import flash_ext
from flash_ext.testing import poison

LENGTHS_Q, LENGTHS_K = (70, 0, 1, 130, 64), (33, 20, 1, 200, 0)


def test_packed_is_dense_per_sequence(device: str, dtype: torch.dtype, close) -> None:
    tail = 37  # rows that no sequence owns
    q = torch.randn(sum(LENGTHS_Q) + tail, 4, 32, device=device).to(dtype)
    k, v = (torch.randn(sum(LENGTHS_K) + tail, 2, 32, device=device).to(dtype) for _ in range(2))
    q[-tail:], k[-tail:], v[-tail:] = math.nan, math.nan, math.nan
    cu_q, cu_k = cumulated(LENGTHS_Q, device), cumulated(LENGTHS_K, device)
    for causal in (False, True):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with poison():
            out, lse = flash_ext.flash_attn_varlen_func(
                *leaves, cu_q, cu_k, max(LENGTHS_Q), max(LENGTHS_K), causal=causal, return_lse=True
            )
            dout = torch.randn_like(out)
            dout[-tail:] = math.nan
            out.backward(dout)
        for begin_q, end_q, begin_k, end_k in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
            rows_q, rows_k = slice(begin_q, end_q), slice(begin_k, end_k)
            alone = [t[rows].clone()[None].requires_grad_() for t, rows in ((q, rows_q), (k, rows_k), (v, rows_k))]
            want, want_lse = flash_ext.forward(*alone, causal=causal, return_lse=True)
            want.backward(dout[rows_q][None])
            assert close(out[rows_q], want[0])
            assert close(lse[:, rows_q], want_lse[0], lse=True)
            for leaf, rows, reference in zip(leaves, (rows_q, rows_k, rows_k), alone, strict=True):
                assert close(leaf.grad[rows], reference.grad[0])
        assert all((leaf.grad[-tail:] == 0).all() for leaf in leaves)


def test_used_keys(device: str, dtype: torch.dtype, close) -> None:
    """seqused_k shortens a sequence; causal masks align with its shortened end."""
    q = torch.randn(60, 2, 32, device=device).to(dtype)
    k, v = (torch.randn(90, 2, 32, device=device).to(dtype) for _ in range(2))
    k[65:], v[65:] = math.nan, math.nan
    lengths = (cumulated([60], device), cumulated([90], device), 60, 90)
    used = torch.tensor([65], dtype=torch.int32, device=device)
    got = flash_ext.flash_attn_varlen_func(q, k, v, *lengths, causal=True, seqused_k=used)
    want = flash_ext.forward(q[None], k[None, :65], v[None, :65], causal=True)
    assert close(got, want[0])
