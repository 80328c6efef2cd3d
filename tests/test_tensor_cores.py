"""What the kernels of Ampere and Hopper could both get wrong: tile edges, scores that leave the reference of the first
blocks behind, groups of heads, rows of other segments in a tile, sums that depend on the order."""

from __future__ import annotations

import pytest
import torch
from problems import DTYPES, HEAD_DIMS, SCORES, packed_problem, problem, problem_of_scores, rand

import flash_ext
from flash_ext.testing import Problem, check, poison

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("path", ["sm80", "sm90"])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("seqlens", [(63, 127), (64, 128), (65, 129), (384, 256), (1, 300), (300, 31)], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_tile_edges(swapped, seqlens, head_dim, dtype, path):
    seqlens = seqlens[::-1] if swapped else seqlens
    for options in ({}, {"causal": True}, {"window_size": (40, 17)}):
        with poison():
            check(problem(*seqlens, head_dim, dtype=dtype, **options), path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [(64, 64), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", SCORES)
def test_scores(scores, causal, head_dim, dtype, path):
    check(problem_of_scores(scores, 700, head_dim, dtype=dtype, causal=causal), path, backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 1), (6, 2), (5, 5)], ids=str)
def test_groups_of_heads(heads, head_dim, path):
    check(problem(200, 170, (head_dim, head_dim), heads, causal=True), path)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 5)}], ids=str)
def test_packed(options, head_dim, path):
    """Tiles that reach into the next segment, into NaN behind the last one, and segments without queries or keys."""
    lengths_q, lengths_k = [1, 64, 0, 65, 130, 3, 200], [5, 64, 70, 1, 100, 0, 130]
    with poison():
        check(packed_problem(lengths_q, lengths_k, head_dim, tail=70, **options), path)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (12, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
def test_deterministic(options, heads, head_dim, path):
    q = rand(2, 700, heads[0], head_dim[0]).requires_grad_()
    k, v = (rand(2, 700, heads[1], d).requires_grad_() for d in head_dim)
    dout = rand(2, 700, heads[0], head_dim[1])

    def results():
        with flash_ext.use_path(path):
            out = flash_ext.forward(q, k, v, deterministic=True, **options)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    first = results()
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))
    check(Problem(q.detach(), k.detach(), v.detach(), options | {"deterministic": True}), path)


def test_forward_is_the_same_from_run_to_run(path):
    q, k, v = (rand(2, 2000, 8, 128) for _ in range(3))
    with flash_ext.use_path(path):
        first = flash_ext.forward(q, k, v, causal=True)
        assert all(torch.equal(first, flash_ext.forward(q, k, v, causal=True)) for _ in range(5))
