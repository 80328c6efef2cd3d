"""The Hopper backward where its own design could break: head dims between the kernels', unused keys, features, exact
sums, more blocks than multiprocessors. (What Ampere's could get wrong too: tests/test_tensor_cores.py.)"""

from __future__ import annotations

import pytest
import torch
from problems import DTYPES, HEAD_DIMS, cumulated, packed_problem, problem, rand

import flash_ext
from flash_ext.testing import Problem, check, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [8, 40, 72, 104, 136, 200])
def test_head_dims_between(head_dim):
    check(problem(100, 150, (head_dim, head_dim), causal=True), "sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_unused_keys_hold_nan(head_dim):
    p = problem(100, 300, (head_dim, head_dim))
    p.k[0, 140:], p.v[0, 140:] = torch.nan, torch.nan
    p.k[1], p.v[1] = torch.nan, torch.nan
    cu_q, cu_k = cumulated([100, 100]), cumulated([300, 300])
    used = torch.tensor([140, 0], device="cuda", dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 100, "max_seqlen_k": 300, "seqused_k": used}
    with poison():
        check(Problem(*(t.flatten(0, 1) for t in (p.q, p.k, p.v)), lengths), "sm90")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("extra", ["softcap", "alibi", "bias", "sinks", "dropout", "all"])
def test_general(extra, head_dim, dtype):
    options = {
        "softcap": {"softcap": 3.0},
        "alibi": {"alibi_slopes": torch.rand(4, device="cuda")},
        "bias": {"attn_bias": rand(1, 4, 150, 200, dtype=dtype)},
        "sinks": {"sinks": torch.randn(4, device="cuda")},
        "dropout": {"dropout_p": 0.2},
    }
    chosen = {k: v for name, o in options.items() if extra in (name, "all") for k, v in o.items()}
    check(problem(150, 200, (head_dim, head_dim), (4, 2), dtype, causal=True, **chosen), "sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("keys", [208, 211])
@pytest.mark.parametrize("shape", ["bhqk", "hqk", "qk", "bk", "hq"])
def test_gradient_of_bias(shape, keys, head_dim):
    """Added up by the main kernel where the bias has rows and columns, by the portable one else; bias of 208 keys is
    copied, of 211 not."""
    sizes = {"b": 2, "h": 4, "q": 150, "k": keys}
    bias = rand(*(sizes[letter] if letter in shape else 1 for letter in "bhqk"))
    for options in ({}, {"causal": True}, {"window_size": (60, 20)}, {"deterministic": True}):
        check(problem(150, keys, (head_dim, head_dim), (4, 2), attn_bias=bias, **options), "sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options", [{"softcap": 30.0}, {"softcap": 0.5}, {"dropout_p": 0.5}, {"softcap": 2.0, "dropout_p": 0.1}], ids=str
)
def test_options_of_many_tiles(options, head_dim):
    """What one tile leaves behind must not reach the next one: dropout's bits, the factor that waits in a dS tile."""
    with poison():
        check(problem(300, 1000, (head_dim, head_dim), (24, 12), causal=True, **options), "sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("option", ["softcap", "alibi_slopes", "attn_bias", "dropout_p"])
def test_options_of_packed_segments(option, head_dim):
    lengths = [1, 100, 0, 65, 200], [30, 130, 40, 65, 200]
    values = {
        "softcap": 4.0,
        "alibi_slopes": torch.rand(5, 4, device="cuda") - 0.3,
        "attn_bias": rand(5, 1, 200, 200),
        "dropout_p": 0.3,
    }
    with poison():
        check(packed_problem(*lengths, head_dim, tail=20, causal=True, **{option: values[option]}), "sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("large", [1, 4, 30])
@pytest.mark.parametrize("key", [7, 1999])
def test_exact_sums_hold_extreme_rows(key, large, head_dim):
    """The unit of a row of dq follows from a bound: a large row of dout, k or v must neither overflow nor drown others."""
    p = problem(2000, 2000, (head_dim, head_dim), deterministic=True)
    p.v[:, key] *= large
    p.k[:, key - 4] *= min(large, 4)
    p.q[:, 5] *= min(large, 8)
    check(p, "sm90")


@pytest.mark.parametrize("keys", [4096, 24576, 50000])
def test_exact_sums_of_many_keys(keys):
    """As floats, floats whose rounding begins to show, and integers; a channel of k that is larger than the others."""
    check(problem(70, keys, (128, 128), (2, 1), deterministic=True), "sm90")
    p = problem(70, keys, (128, 128), (2, 1), deterministic=True)
    p.k[..., 3] *= 10
    p.q[..., 3] /= 10
    check(p, "sm90")


def test_exact_sums_keep_nan():
    """Of a row: what is not finite must show, and nowhere else."""
    p = problem(100, 100, (64, 64), deterministic=True)
    q, k, v = (t.clone().requires_grad_() for t in (p.q, p.k, p.v))
    dout = torch.randn_like(p.q)
    dout[0, 3, 0, 5] = torch.inf
    with flash_ext.use_path("sm90"):
        (dq,) = torch.autograd.grad(flash_ext.forward(q, k, v, deterministic=True), (q,), dout)
    bad = ~torch.isfinite(dq).all(-1)
    assert bad[0, 3, 0] and bad.sum() == 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 0)}], ids=str)
def test_many_tiles_of_keys(options, head_dim):
    """Every thread block works through several of them; what nobody sees makes tiles without steps."""
    with poison():
        check(problem(150, 1500, head_dim, (40, 20), **options), "sm90")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (300, 100)}], ids=str)
def test_many_heads_are_deterministic(options, head_dim):
    """Thirty times the same bits, though additions to dq come in another order each time."""
    p = problem(1000, 1000, (head_dim, head_dim), (32, 32), deterministic=True, **options)
    dout, first = torch.randn_like(p.q), None
    for _ in range(30):
        inputs = [t.detach().requires_grad_() for t in (p.q, p.k, p.v)]
        with flash_ext.use_path("sm90"):
            grads = torch.autograd.grad(flash_ext.forward(*inputs, **p.options), inputs, dout)
        first = first or grads
        assert all(torch.equal(x, y) for x, y in zip(grads, first, strict=True))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_long(head_dim):
    """More blocks than multiprocessors, more than one L2 section of heads."""
    check(problem(2048, 2048, (head_dim, head_dim), (8, 8), causal=True), "sm90")
