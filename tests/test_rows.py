"""Which rows a kernel reads: those that begin anywhere as well as aligned ones, and none behind a sequence."""

from __future__ import annotations

import math

import pytest
import torch
from problems import packed_problem, rand

import flash_ext

pytestmark = pytest.mark.gpu

FP32, BF16 = torch.float32, torch.bfloat16
KERNELS = [("simt", FP32), ("simt", BF16), ("sm80", FP32), ("sm80", BF16)]  # sm90 takes aligned copies
LARGEST = {("sm80", FP32): 128}


@pytest.mark.parametrize(
    ("path", "dtype", "head_dim"),
    [(*kernel, d) for kernel in KERNELS for d in (20, 37, 64, 72, 128, 249, 256) if d <= LARGEST.get(kernel, 256)],
    ids=str,
)
def test_unaligned_rows_are_as_good_as_aligned_ones(path, dtype, head_dim):
    wide = rand(2, 150, 2, 3 * head_dim + 1, dtype=dtype)
    slices = [wide[..., 1 + i * head_dim : 1 + (i + 1) * head_dim] for i in range(3)]
    padded = [torch.zeros(2, 150, 2, 256, dtype=dtype, device="cuda")[..., :head_dim].copy_(x) for x in slices]
    with flash_ext.use_path(path):
        assert torch.equal(flash_ext.forward(*slices, causal=True), flash_ext.forward(*padded, causal=True))


@pytest.mark.parametrize(
    ("path", "dtype", "head_dim"),
    [(*kernel, d) for kernel in (*KERNELS, ("sm90", BF16)) for d in (64, 128, 256) if d <= LARGEST.get(kernel, 256)],
    ids=str,
)
def test_rows_behind_a_sequence_are_not_read(path, dtype, head_dim):
    used = torch.tensor([33, 257], dtype=torch.int32, device="cuda")
    p = packed_problem([70, 130], [300, 290], head_dim, dtype, tail=40, seqused_k=used)
    clean = p.run(path, backward=False)
    for x in (p.k, p.v):
        x[33:300], x[557:] = math.nan, math.inf
    assert all(torch.equal(clean[name], x) for name, x in p.run(path, backward=False).items())
