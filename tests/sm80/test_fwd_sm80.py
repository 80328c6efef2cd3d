"""The sm_80 forward kernels where their own design could break: one key that outweighs all, tiles without keys. (What
Hopper's could get wrong too: tests/test_tensor_cores.py, tests/test_rows.py.)"""

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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [0, 64, 256])
def test_tiles_without_keys_are_zero(head_dim, seqlen_k):
    q, k, v = rand(4, 1024, 8, head_dim), rand(4, seqlen_k, 8, head_dim), rand(4, seqlen_k, 8, head_dim)
    with flash_ext.use_path("sm80"):
        for _ in range(5):
            out, lse = flash_ext.forward(q, k, v, causal=True, return_lse=True)
            assert not out[:, : 1024 - seqlen_k].any() and (lse[:, :, : 1024 - seqlen_k] == -math.inf).all()
