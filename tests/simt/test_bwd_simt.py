"""The portable backward kernels where their own design could break: tile edges, groups of heads that share one CTA's dk and
dv, rows that belong to no sequence, gradients that are bitwise repeatable, and the sum of a broadcast bias."""

from __future__ import annotations

import pytest
import torch
from problems import packed_problem
from simt.problems import BF16, FP32, KERNELS, problem, rand

import flash_ext
from flash_ext.testing import check, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("path", "dtype", "head_dim"), KERNELS, ids=str)
@pytest.mark.parametrize("seqlens", [(63, 127), (64, 128), (33, 257), (1, 300), (300, 31), (64, 0)], ids=str)
def test_tile_edges(seqlens, path, dtype, head_dim):
    for options in ({}, {"causal": True}, {"window_size": (40, 17)}):
        with poison():
            check(problem(*seqlens, head_dim, dtype=dtype, **options), path)


@pytest.mark.parametrize("path", ["simt", "sm80"])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (5, 5)], ids=str)
def test_groups_of_heads(heads, path):
    check(problem(200, 170, (64, 64), heads, causal=True), path)


@pytest.mark.parametrize(("path", "dtype"), [("simt", FP32), ("simt", BF16), ("sm80", FP32)], ids=str)
def test_packed_with_empty_segments_and_a_tail(path, dtype):
    lengths = [1, 64, 0, 65, 130, 3], [5, 64, 70, 1, 100, 0]
    with poison():
        check(packed_problem(*lengths, 64, dtype, tail=7, causal=True), path)


@pytest.mark.parametrize("path", ["simt", "sm80"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_bitwise_repeatable(head_dim, path):
    q, k, v = (rand(2, 500, h, head_dim).requires_grad_() for h in (4, 2, 2))
    dout = rand(2, 500, 4, head_dim)

    def gradients():
        with flash_ext.use_path(path):
            out = flash_ext.forward(q, k, v, causal=True, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("path", ["simt", "sm80"])
@pytest.mark.parametrize("softcap", [1.0, 15.0])
def test_softcap_where_it_saturates(softcap, path):
    """1 - tanh^2 of a large score has no digits left in fp32 if it is computed like that."""
    p = problem(100, 150, softcap=softcap, softmax_scale=1.0)
    check(p, path)
