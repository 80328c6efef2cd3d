"""Gradients of eager calls: partial and missing ones, any strides, threads, hooks, checkpoints, second derivatives."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.compiled_autograd
from inputs import gradients, make
from torch.utils.checkpoint import checkpoint

import flash_ext
from flash_ext.call import Extras, Scalars
from flash_ext.plan import _dsinks


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_only_some_gradients(wanted):
    tensors = {name: make(2, 9, 4, 16) for name in "qkv"}
    everything = gradients(flash_ext.forward(**tensors), tuple(tensors.values()))
    some = {name: t.detach().requires_grad_(name in wanted) for name, t in tensors.items()}
    got = gradients(flash_ext.forward(**some), [some[name] for name in wanted])
    expected = [everything["qkv".index(name)] for name in wanted]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_saved_tensors_pass_hooks_and_are_guarded():
    """What a backward pass needs may be moved elsewhere meanwhile, and must not be changed."""
    q, k = make(), make()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.clone(), lambda t: t):
        out = flash_ext.forward(q * 1, k, k)
    assert len(kept) == 5  # q, k, v, out, lse
    assert torch.equal(gradients(out, [k])[0], gradients(flash_ext.forward(q, k, k), [k])[0])
    changed = q * 1
    out = flash_ext.forward(changed, k, k)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(out, [k])
    out = flash_ext.forward(q, k, k)
    gradients(out, [k])
    with pytest.raises(RuntimeError, match="second time"):
        gradients(out, [k])


@pytest.mark.parametrize("layout", ["expanded", "heads_first", "odd", "scattered"])
def test_gradients_of_any_strides(layout):
    q = make(2, 9, 4, 16)
    dout = {
        "expanded": lambda: torch.randn(1, 1, 1, 1).expand(2, 9, 4, 16),
        "heads_first": lambda: torch.randn(2, 4, 9, 16).transpose(1, 2),
        "odd": lambda: torch.randn(2, 9, 4, 17)[..., 1:],
        "scattered": lambda: torch.randn(2, 16, 4, 9).transpose(1, 3),
    }[layout]()
    out, lse = flash_ext.forward(q, q, q, return_lse=True)
    dlse = torch.randn(2, 9, 4).transpose(1, 2)
    got, expected = (
        torch.autograd.grad((out, lse), q, grads, retain_graph=True)[0]
        for grads in ((dout, dlse), (dout.contiguous(), dlse.contiguous()))
    )
    assert torch.equal(got, expected)


def test_compiled_autograd():
    q = make()
    out = flash_ext.forward(q, q, q, causal=True)
    (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.sum().backward()
    assert torch.equal(q.grad, expected)


def test_backward_from_another_thread():
    """The engine runs a backward pass where it likes: nothing may depend on the thread."""
    q = make()
    out = flash_ext.forward(q, q, q, causal=True)
    (expected,) = gradients(out, [q])
    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(flash_ext.forward, q, q, q, causal=True).result()
        (got,) = pool.submit(gradients, out, [q]).result()
    assert torch.equal(got, expected)


def test_checkpoint():
    q, k, v = make(), make(), make()
    for options in ({"causal": True}, {"dropout_p": 0.3}):
        torch.manual_seed(3)
        expected = gradients(flash_ext.forward(q, k, v, **options), (q, k, v))
        torch.manual_seed(3)
        function = functools.partial(flash_ext.forward, **options)
        out = checkpoint(function, q, k, v, use_reentrant=False)
        assert all(torch.equal(a, b) for a, b in zip(expected, gradients(out, (q, k, v)), strict=True))


def test_nothing_is_kept_without_gradients():
    q = make()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out, lse = flash_ext.forward(q, q, q, return_lse=True)
        assert out.grad_fn is None and not lse.requires_grad
    with torch.inference_mode():
        x = torch.randn(2, 9, 4, 16)
        kept = weakref.ref(x)
        out = flash_ext.forward(x, x, x)
    assert out.is_inference()
    del x
    gc.collect()
    assert kept() is None


def test_second_derivative_is_refused():
    """By the autograd node of C++, by that of Python (with the gradient of a bias), and by the operator's."""
    q, bias = make(), make(9, 9)
    scalars = Scalars(False, 0.25, -1, -1, 0.0, 0.0, False, 0, 0, "")
    calls = (flash_ext.forward(q, q, q), flash_ext.forward(q, q, q, attn_bias=bias))
    for out in (*calls, torch.ops.flash_ext.fwd(q, q, q, *Extras(), *scalars)[0]):
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="twice"):
            (grad.pow(2).sum() + q.sum()).backward()


def test_gradcheck():
    """Against finite differences, in float64 and so on the reference path: formula and wiring of every gradient."""
    q, k, v = (make(*shape, dtype=torch.float64) for shape in [(1, 4, 2, 3), (1, 5, 1, 3), (1, 5, 1, 2)])
    bias, sinks = make(1, 2, 4, 5, dtype=torch.float64), make(2, dtype=torch.float64)

    def function(q, k, v, bias, sinks):
        with flash_ext.use_path("reference"):
            return flash_ext.forward(q, k, v, attn_bias=bias, sinks=sinks, softcap=2.0, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sinks))


def test_unused_results_give_no_gradient():
    q = make()
    out, lse = flash_ext.forward(q, q, q, return_lse=True)
    del out
    lse.sum().backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(grad):
    q = make(grad=grad)
    flash_ext.forward(q, q, q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        flash_ext.forward(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), q, q)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: flash_ext.forward(x, q, q), (q,), (torch.ones_like(q),))


def test_transforms_of_torch_func():
    """grad and vmap, and one in the other: gradients of every sample."""
    tensors = [torch.randn(3, 1, 9, 4, 16) for _ in "qkv"] + [torch.randn(3, 9, 9)]

    def loss(q, k, v, bias):
        out, lse = flash_ext.forward(q, k, v, attn_bias=bias, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    each = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(*tensors)
    together = torch.func.grad(lambda *t: torch.vmap(loss)(*t).sum(), argnums=(0, 1, 2, 3))(*tensors)
    for i in range(3):
        leaves = [t[i].clone().requires_grad_() for t in tensors]
        for a, b, c in zip(each, together, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            assert torch.allclose(a[i], c, atol=1e-5) and torch.allclose(b[i], c, atol=1e-5)
    values = torch.vmap(lambda q: flash_ext.forward(q, q, q), in_dims=-1)(tensors[0].movedim(0, -1))
    assert torch.allclose(values[1], flash_ext.forward(*[tensors[0][1]] * 3), atol=1e-6)
    q = make()
    out, pull_back = torch.func.vjp(lambda x: flash_ext.forward(x, q.detach(), q.detach()), q.detach())
    (expected,) = torch.autograd.grad(flash_ext.forward(q, q.detach(), q.detach()).sum(), q)
    assert torch.equal(pull_back(torch.ones_like(out))[0], expected)


def test_second_derivatives_under_torch_func_are_refused():
    q = make(grad=False)
    once = torch.func.grad(lambda x: flash_ext.forward(x, q, q).sum())
    with pytest.raises(RuntimeError, match="twice"):
        torch.func.grad(lambda x: once(x).square().sum())(q)


def test_sinks_gradient_ignores_rows_of_no_segment():
    lse = torch.tensor([[0.5, math.nan]])
    delta = torch.tensor([[1.0, math.nan]])
    grad = _dsinks(torch.tensor([0.5]), lse, delta, torch.tensor([0, 1], dtype=torch.int32))
    assert torch.equal(grad, torch.tensor([-1.0]))
    masked = _dsinks(torch.tensor([-math.inf]), torch.full((1, 1, 2), -math.inf), torch.ones(1, 1, 2), None)
    assert torch.equal(masked, torch.zeros(1))
