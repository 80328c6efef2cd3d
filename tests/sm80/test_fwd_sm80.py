"""The sm_80 forward kernels where their own design could break: one key that outweighs all, loads of unaligned rows, rows
that must not be read. (What Hopper's could get wrong too: tests/test_tensor_cores.py.)"""

from __future__ import annotations

import math

import pytest
import torch
from problems import rand

import flash_ext

pytestmark = pytest.mark.gpu


def test_one_key_that_outweighs_all_gives_its_value():
    """Whatever its probability was rounded to."""
    q, k, v = (rand(1, 1024, 1, 128) for _ in range(3))
    k[:, 100], q[...] = 3.0, 3.0
    with flash_ext.use_path("sm80"):
        out = flash_ext.forward(q, k, v)
    assert torch.equal(out, v[:, 100:101].expand_as(out))


@pytest.mark.parametrize("head_dim", [20, 37, 64, 72, 128, 249, 256])
def test_unaligned_rows_are_as_good_as_aligned_ones(head_dim):
    wide = rand(2, 150, 2, 3 * head_dim + 1)
    slices = [wide[..., 1 + i * head_dim : 1 + (i + 1) * head_dim] for i in range(3)]
    padded = [torch.zeros(2, 150, 2, 256, dtype=wide.dtype, device="cuda")[..., :head_dim].copy_(x) for x in slices]
    with flash_ext.use_path("sm80"):
        assert torch.equal(flash_ext.forward(*slices, causal=True), flash_ext.forward(*padded, causal=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [0, 64, 256])
def test_tiles_without_keys_are_zero(head_dim, seqlen_k):
    q, k, v = rand(4, 1024, 8, head_dim), rand(4, seqlen_k, 8, head_dim), rand(4, seqlen_k, 8, head_dim)
    with flash_ext.use_path("sm80"):
        for _ in range(5):
            out, lse = flash_ext.forward(q, k, v, causal=True, return_lse=True)
            assert not out[:, : 1024 - seqlen_k].any() and (lse[:, :, : 1024 - seqlen_k] == -math.inf).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_behind_a_sequence_are_not_read(head_dim):
    cu = torch.tensor([0, 70, 200], dtype=torch.int32, device="cuda")
    q, k, v = (rand(200, 2, head_dim) for _ in range(3))
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 130, "max_seqlen_k": 130}
    used = {"seqused_k": torch.tensor([33, 100], dtype=torch.int32, device="cuda")}
    with flash_ext.use_path("sm80"):
        clean = flash_ext.flash_attn_varlen_func(q, k, v, **options, **used)
        for x in (k, v):
            x[33:70], x[170:] = math.nan, math.inf
        assert torch.equal(clean, flash_ext.flash_attn_varlen_func(q, k, v, **options, **used))
