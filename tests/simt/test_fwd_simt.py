"""The portable forward kernels where their own design could break: tile edges, the running maximum, long sums on tensor
cores, dropout. (Rows that are not aligned, or not to be read: tests/test_rows.py.)"""

from __future__ import annotations

import math

import pytest
import torch
from simt.problems import KERNELS, problem, rand

import flash_ext
from flash_ext.testing import check, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("path", "dtype", "head_dim"), KERNELS, ids=str)
@pytest.mark.parametrize("seqlens", [(127, 63), (128, 64), (257, 33), (1, 300), (300, 31), (64, 0)], ids=str)
def test_tile_edges(seqlens, path, dtype, head_dim):
    for options in ({}, {"causal": True}, {"window_size": (40, 17)}):
        with poison():
            check(problem(*seqlens, head_dim, dtype=dtype, **options), path, backward=False)


@pytest.mark.parametrize("path", ["simt", "sm80"])
@pytest.mark.parametrize("head_dim", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_running_maximum(slope, head_dim, path):
    """Scores that grow from block to block, so that every block rescales what came before, or fall. They stay below 22:
    the rounding of a larger score alone would change exp(score) by more than 1e-6."""
    p = problem(200, 700, head_dim)
    p.q[..., 0] = 1  # adds k[0] * scale to every score of the key
    p.k[..., 0] = (slope * torch.arange(700, device="cuda") * math.sqrt(head_dim[0]) / 32)[None, :, None]
    check(p, path, backward=False)


@pytest.mark.parametrize("path", ["simt", "sm80"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sums_keep_the_accuracy_of_fp32(head_dim, path):
    """All values have one sign, so that the error of a sum that truncates would grow with every key."""
    q, k, v = (rand(1, n, 1, head_dim) for n in (64, 16384, 16384))
    v = v.abs() + 1
    with flash_ext.use_path(path):
        out = flash_ext.forward(q, k, v)
    exact = flash_ext.reference.attention(q.double(), k.double(), v.double())[0]
    assert (out - exact).norm() <= 2e-6 * exact.norm()


@pytest.mark.parametrize("path", ["simt", "sm80"])
def test_paths_drop_the_same_entries(path):
    """out of v = identity shows the probabilities: those that dropout took are exactly 0 on every path."""
    q, k = rand(1, 100, 2, 64), rand(1, 128, 2, 64)
    v = torch.eye(128, device="cuda")[None, :, None].expand(1, 128, 2, 128)

    def probabilities(name):
        torch.manual_seed(5)
        with flash_ext.use_path(name):
            return flash_ext.forward(q, k, v, dropout_p=0.3)

    got, plain = probabilities(path), probabilities("reference")
    assert torch.equal(got == 0, plain == 0)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-6)
