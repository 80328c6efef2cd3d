"""The sm_80 backward kernels where their own design could break: tile edges, groups of heads, dq's sums, determinism."""

from __future__ import annotations

import pytest
import torch
from problems import DTYPES, HEAD_DIMS, packed_problem, problem, rand

import flash_ext
from flash_ext.testing import Problem, check, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("seqlens", [(63, 127), (64, 128), (65, 129), (384, 256), (1, 300), (300, 31)], ids=str)
def test_tile_edges(seqlens, head_dim, dtype):
    for options in ({}, {"causal": True}, {"window_size": (40, 17)}):
        with poison():
            check(problem(*seqlens, head_dim, dtype=dtype, **options), "sm80")


@pytest.mark.parametrize("head_dim", [20, 37, 72, 104])
def test_head_dims_between(head_dim):
    check(problem(100, 150, (head_dim, head_dim), causal=True), "sm80")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (5, 5)], ids=str)
def test_blocks_share_a_group_of_heads(heads, head_dim):
    check(problem(200, 170, (head_dim, head_dim), heads, causal=True), "sm80")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_block_takes_a_group_of_heads(head_dim):
    """Where there are tiles of keys enough."""
    check(problem(70, 8000, (head_dim, head_dim), (16, 8)), "sm80")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed(head_dim):
    """Short sequences, whose tiles of dq lie beside each other in the workspace."""
    lengths_q, lengths_k = [1, 64, 0, 65, 130, 3], [5, 64, 70, 1, 100, 0]
    with poison():
        check(packed_problem(lengths_q, lengths_k, head_dim, causal=True), "sm80")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 2), (12, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
def test_deterministic(options, heads, head_dim):
    q, k, v = (rand(2, 700, h, head_dim).requires_grad_() for h in (heads[0], heads[1], heads[1]))
    dout = rand(2, 700, heads[0], head_dim)

    def gradients():
        with flash_ext.use_path("sm80"):
            out = flash_ext.forward(q, k, v, deterministic=True, **options)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = gradients()
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))
    check(Problem(q.detach(), k.detach(), v.detach(), options | {"deterministic": True}), "sm80")
