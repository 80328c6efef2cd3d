"""The portable forward kernels where their own design could break: tile edges, the running maximum, loads of rows that are
not aligned, options that change from call to call, long sums on tensor cores."""

from __future__ import annotations

import math

import pytest
import torch
from simt.problems import BF16, FP32, KERNELS, problem, rand

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
@pytest.mark.parametrize("head_dim", [20, 37, 64, 72, 128])
def test_unaligned_rows_are_as_good_as_aligned_ones(head_dim, path):
    wide = rand(2, 150, 2, 3 * head_dim + 1)
    slices = [wide[..., 1 + i * head_dim : 1 + (i + 1) * head_dim] for i in range(3)]
    padded = [torch.zeros(2, 150, 2, 128, device="cuda")[..., :head_dim].copy_(x) for x in slices]
    with flash_ext.use_path(path):
        assert torch.equal(flash_ext.forward(*slices, causal=True), flash_ext.forward(*padded, causal=True))


@pytest.mark.parametrize(("path", "dtype"), [("simt", FP32), ("simt", BF16), ("sm80", FP32)], ids=str)
def test_rows_behind_a_sequence_are_not_read(path, dtype):
    cu = torch.tensor([0, 70, 200], dtype=torch.int32, device="cuda")
    q, k, v = (rand(200, 2, 64, dtype=dtype) for _ in range(3))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 130, "max_seqlen_k": 130}
    used = {"seqused_k": torch.tensor([33, 100], dtype=torch.int32, device="cuda")}
    with flash_ext.use_path(path):
        clean = flash_ext.flash_attn_varlen_func(q, k, v, **options, **used)
        for x in (k, v):
            x[33:70], x[170:] = math.nan, math.inf
        assert torch.equal(clean, flash_ext.flash_attn_varlen_func(q, k, v, **options, **used))


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
