"""The gradient of a broadcast bias, summed by the kernel that owns a tile of it."""

from __future__ import annotations

import pytest
import torch
from simt.problems import BF16, FP32, problem, rand

import flash_ext
from flash_ext.testing import check, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("path", "dtype"), [("simt", FP32), ("simt", BF16), ("sm80", FP32)], ids=str)
@pytest.mark.parametrize("full", ["k", "qk", "hk", "bk", "hqk", "bhqk"])
@pytest.mark.parametrize("head_dim", [(64, 64), (128, 128)], ids=str)
def test_broadcast(head_dim, full, path, dtype):
    """A bias that is the same for all keys of a row changes nothing: its gradient is zero but for rounding."""
    sizes = {"b": 2, "h": 4, "q": 150, "k": 200}
    p = problem(150, 200, head_dim, (4, 2), dtype=dtype, causal=True, softcap=20.0)
    p.options["attn_bias"] = rand(*(n if letter in full else 1 for letter, n in sizes.items()), dtype=dtype)
    with poison():
        check(p, path)


def test_bitwise_repeatable():
    q, k, v = (rand(3, 200, 2, 64) for _ in range(3))
    bias = rand(1, 2, 200, 200).requires_grad_()

    def gradient():
        with flash_ext.use_path("simt"):
            out = flash_ext.forward(q, k, v, attn_bias=bias)
        return torch.autograd.grad(out.sum(), bias)[0]

    first = gradient()
    assert all(torch.equal(first, gradient()) for _ in range(5))
