"""Calls that come again: what tells them apart, and that C++ serves them as Python did."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from inputs import make

import flash_ext
from flash_ext import jit
from flash_ext.call import Arguments, check_call
from flash_ext.dispatch import Variant
from flash_ext.extension import _C
from flash_ext.plan import Plan, remember
from flash_ext.testing import Problem, poison


def test_autocast_that_converts_nothing_takes_the_short_way(monkeypatch):
    q = make(dtype=torch.bfloat16)
    monkeypatch.setattr(flash_ext.interface, "_attend_slowly", lambda *_: pytest.fail("through the dispatcher"))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_ext.forward(q, q, q)
    assert torch.equal(out, flash_ext.forward(q, q, q))


@pytest.mark.parametrize("grad", [False, True])
def test_a_gradient_that_cannot_be_is_refused_in_repeated_calls(grad):
    q = make(grad=grad)
    flash_ext.forward(q, q, q, alibi_slopes=torch.rand(4))
    flash_ext.forward(q, q, q, alibi_slopes=torch.rand(4))
    with pytest.raises(ValueError, match="alibi_slopes"):
        flash_ext.forward(q, q, q, alibi_slopes=torch.rand(4, requires_grad=True))


def refuse_new_plans(monkeypatch):
    monkeypatch.setattr(flash_ext.interface, "check_call", lambda *_: pytest.fail("checked again"))


@pytest.mark.parametrize("grad", [False, True])
def test_repeated_calls_are_not_checked_again(grad, monkeypatch):
    q, bias = make(1, 3, 5, 7, grad=grad), make(3, 3, grad=grad)
    calls = ({}, {"causal": True, "softmax_scale": 2}, {"window_size": [1, 0]}, {"attn_bias": bias}, {"dropout_p": 0.5})
    for options in calls:
        flash_ext.forward(q, q, q, **options)
    refuse_new_plans(monkeypatch)
    for options in calls:
        flash_ext.forward(q * 1, q, q, **options)
    with pytest.raises(pytest.fail.Exception):
        flash_ext.forward(q, q, q, softcap=1.0)


def test_known_calls_give_what_new_ones_give():
    """C++ alone serves them: results and gradients, with and without lse, dense and packed."""
    q, k, v = make(2, 9, 4, 16), make(2, 7, 2, 16), make(2, 7, 2, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = (*(t[0].detach().requires_grad_() for t in (q, q, q)), cu, cu, 5, 5)
    for function, args, options in (
        (flash_ext.forward, (q, k, v), {"causal": True}),
        (flash_ext.forward, (q, k, v), {"alibi_slopes": torch.rand(4), "attn_bias": make(1, 4, 9, 7, grad=False)}),
        (flash_ext.flash_attn_varlen_func, packed, {"window_size": (2, 0)}),
    ):
        _C.forget()
        results = []
        for _ in range(2):
            out, lse = function(*args, **options, return_lse=True)
            grads = torch.autograd.grad((out, lse), args[:3], (torch.ones_like(out), torch.ones_like(lse)))
            with torch.no_grad(), poison():
                alone, pair = function(*args, **options), function(*args, **options, return_lse=True)
            results.append((out, lse, *grads, function(*args, **options), alone, *pair))
            assert torch.equal(alone, out) and torch.equal(pair[1], lse)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_known_calls_are_told_apart():
    """Whatever a user may write for an argument means the same the second time."""
    q = make(2, 9, 4, 16, grad=False)
    variants = (
        *({"softmax_scale": x} for x in (None, 1, 1.0, 0.5, True, np.float64(0.5))),
        *({"window_size": x} for x in ((2, 1), [2, 1], (2, -1), (-1, 2), (2**70, 2), (np.int64(2), 1))),
        *({"softcap": x} for x in (0, 0.0, 3, 3.0)),
        *({"causal": x} for x in (True, 0, 1)),
    )
    expected = [flash_ext.forward(q, q, q, **options) for options in variants]
    got = [flash_ext.forward(q, q, q, **options) for options in variants]
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(got[variants.index({"window_size": (-1, 2)})], got[variants.index({"window_size": (2**70, 2)})])
    for options, out in zip(variants, got, strict=True):
        if options != {"window_size": (2**70, 2)}:
            exact = Problem(q, q, q, options).reference(backward=False)["out"]
            assert torch.allclose(out.double(), exact, atol=1e-5)
    for wrong in ({"softcap": math.nan}, {"softmax_scale": "1"}, {"window_size": (1, 2, 3)}, {"window_size": (-2, 0)}):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
                flash_ext.forward(q, q, q, **wrong)


def test_cache_is_bounded():
    plans = {(n,): n for n in range(4096)}
    remember(plans, ("new",), 0)
    assert len(plans) == 1
    _C.forget()
    kernels = _C.Kernels()
    for n in range(5000):
        _C.remember(b"%d" % n, kernels)
    assert _C.forget() == 5000 - 4096


def test_signature_tells_calls_apart():
    q, other = make(2, 8, 4, 16, grad=False), make(2, 4, 8, 16, grad=False).transpose(1, 2)
    nothing = (None,) * 6
    plain = _C.signature(q, q, q, *nothing)
    assert plain and plain == _C.signature(q.clone(), q, q, *nothing)
    shifted = torch.randn(2 * 8 * 4 * 16 + 1)[1:].view(2, 8, 4, 16)
    for changed in (other, q.bfloat16(), make(2, 8, 4, 17, grad=False)[..., 1:], make(2, 8, 4, 16), shifted):
        assert _C.signature(changed, q, q, *nothing) != plain
    assert _C.signature(q, q, q, None, None, None, None, q, None) != _C.signature(
        q, q, q, None, None, None, q, None, None
    )
    assert not _C.signature(q.to("meta"), q, q, *nothing)
    with torch.no_grad():
        assert _C.signature(make(2, 8, 4, 16), q, q, *nothing)[-1] == plain[-1], "no gradient is wanted"
    with torch.autocast("cpu", torch.bfloat16):
        assert not _C.signature(q, q, q, *nothing)


def test_deterministic_follows_torch(monkeypatch):
    kernels = []
    monkeypatch.setattr(_C, "remember", lambda key, new: kernels.append(new))
    q = make(1, 3, 4, 8)
    _C.forget()
    for switch in (True, False):
        torch.use_deterministic_algorithms(switch)
        try:
            flash_ext.forward(q, q, q)
        finally:
            torch.use_deterministic_algorithms(False)
    assert [k.scalars.deterministic for k in kernels] == [1, 0]


def checked(q: torch.Tensor, v: torch.Tensor | None = None, **options):
    """Extras and scalars of a dense call."""
    call = Arguments(q, q, q if v is None else v, *[None] * 6, False, None, (-1, -1), 0.0, 0.0, False, 0, 0)
    return check_call(call._replace(**options), "")


@pytest.mark.parametrize(
    ("options", "variant"),
    [
        ({}, Variant.PLAIN),
        ({"causal": True, "softmax_scale": 0.5}, Variant.PLAIN),
        ({"sinks": torch.zeros(4)}, Variant.PLAIN),  # dispatch knows which paths need the general one
        ({"softcap": 1.0}, Variant.GENERAL),
        ({"alibi_slopes": torch.zeros(4)}, Variant.GENERAL),
        ({"attn_bias": torch.zeros(9)}, Variant.GENERAL),
        ({"dropout_p": 0.1}, Variant.GENERAL),
        ({"softmax_scale": 0.0}, Variant.GENERAL),
        ({"softmax_scale": -1.0}, Variant.GENERAL),
    ],
    ids=str,
)
def test_variant_that_a_call_needs(options, variant):
    q = make(grad=False)
    call = Plan(q, q, q, *checked(q, **options)).call
    assert call.variant == variant and call.sinks == ("sinks" in options)


@pytest.mark.parametrize(("dims", "fits"), [((16, 16), True), ((20, 16), False), ((16, 20), False), ((24, 8), True)])
def test_rows_for_the_hopper_copy_engine(dims, fits):
    q, v = (make(1, 3, 4, dim, dtype=torch.bfloat16, grad=False) for dim in dims)
    assert Plan(q, q, v, *checked(q, v)).call.aligned is fits


def test_the_reason_says_what_is_compiled_on_first_use(monkeypatch):
    q = make(dtype=torch.bfloat16)
    arguments = checked(q)
    monkeypatch.setattr(jit, "can_run", lambda *_: True)
    for ready in (False, True):
        monkeypatch.setattr(jit, "is_ready", lambda *_, ready=ready: ready)
        plan = Plan(q, q, q, *arguments)
        plan.call = plan.call._replace(capability=(9, 0))
        assert plan.fwd.path == "sm90" and ("compiled on first use" in plan.fwd.reason) is not ready


def test_alignment_for_the_hopper_copy_engine():
    aligned = torch.empty(2, 8, 4, 16, dtype=torch.bfloat16)
    assert _C.is_aligned(aligned)
    assert _C.is_aligned(aligned[:, :, :1].expand(2, 8, 4, 16))  # expanded heads
    assert not _C.is_aligned(aligned[:, :1].expand(2, 8, 4, 16))  # one row expanded
    assert _C.is_aligned(aligned[:, :1])  # the stride of a single row means nothing
    assert not _C.is_aligned(aligned.flatten()[1:513].view(2, 8, 2, 16))  # base
    assert not _C.is_aligned(torch.empty(8, 4, 20, dtype=torch.bfloat16)[..., :16])  # packed, rows of 40 bytes
