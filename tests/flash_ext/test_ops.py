"""What torch expects of an operator: compiling, tracing, autocast, checkpoints, modes, partial and missing
gradients."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import flash_ext
from flash_ext.call import Extras, Scalars, new_rng_state
from flash_ext.extension import _C
from flash_ext.plan import _dsinks, remember
from flash_ext.testing import Problem


def make(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape or (2, 9, 4, 16), dtype=dtype, requires_grad=grad)


def arguments(packed=False, everything=False, causal=True):
    """Of flash_ext::fwd."""
    q, k, v = (
        make(*shape)
        for shape in (
            [(10, 4, 16), (12, 2, 16), (12, 2, 8)] if packed else [(2, 9, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8)]
        )
    )
    extras = Extras()
    if packed:
        cu_q, cu_k = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
        extras = extras._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    if everything:
        bias = make(2, 4, 6, 7) if packed else make(1, 4, 9, 7)
        extras = extras._replace(
            attn_bias=bias, sinks=make(4), alibi_slopes=torch.rand(4), rng_state=new_rng_state("cpu")
        )
    scalars = Scalars(causal, 0.25, 5, -1, 3.0 * everything, 0.2 * everything, False, 6 * packed, 7 * packed, "")
    return (q, k, v, *extras, *scalars)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_opcheck(packed, everything):
    torch.library.opcheck(torch.ops.flash_ext.fwd.default, arguments(packed, everything))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_backward(packed):
    args = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in arguments(packed, True))
    out, lse = torch.ops.flash_ext.fwd(*args)
    backward = (torch.randn_like(out), torch.randn_like(lse), *args[:3], out, lse, *args[3:], True, True)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.flash_ext.bwd.default, backward, test_utils=utilities)


@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "qkv", "odd", "scattered", "expanded"])
def test_fake_results_have_the_strides_of_real_ones(layout):
    q, k, v = {
        "contiguous": lambda: [make(2, 8, 4, 16) for _ in range(3)],
        "heads_first": lambda: [make(2, 4, 8, 16).transpose(1, 2) for _ in range(3)],
        "qkv": lambda: list(make(2, 8, 3, 4, 16).unbind(2)),
        "odd": lambda: [make(2, 8, 4, 17)[..., 1:] for _ in range(3)],
        "scattered": lambda: [make(2, 16, 4, 8).transpose(1, 3) for _ in range(3)],
        "expanded": lambda: [make(2, 8, 1, 16).expand(-1, -1, 4, -1) for _ in range(3)],
    }[layout]()
    args = (q.detach(), k.detach(), v.detach(), *Extras(), *Scalars(False, 0.25, -1, -1, 0.0, 0.0, False, 0, 0, ""))
    real = torch.ops.flash_ext.fwd(*args)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.flash_ext.fwd(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in args))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_meta_tensors():
    q = torch.empty(2, 9, 4, 16, device="meta")
    out, lse = flash_ext.forward(q, q, q, return_lse=True)
    assert out.device.type == "meta" and out.shape == q.shape and lse.shape == (2, 4, 9)


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.ones_like(out) * 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (3, 1), "softcap": 2.0},
        {"sinks": True, "attn_bias": True, "alibi_slopes": True},
    ],
)
def test_compile(options):
    q, k, v = make(2, 9, 4, 16), make(2, 7, 2, 16), make(2, 7, 2, 16)
    tensors = {"sinks": make(4), "attn_bias": make(9, 7), "alibi_slopes": torch.rand(4)}
    options = {name: tensors[name] if value is True and name in tensors else value for name, value in options.items()}

    def function(q, k, v):
        return flash_ext.forward(q, k, v, **options)

    expected, got = function(q, k, v), compiled(function)(q, k, v)
    inputs = [t for t in (q, k, v, *options.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    assert torch.equal(expected, got)
    assert all(torch.equal(a, b) for a, b in zip(gradients(expected, inputs), gradients(got, inputs), strict=True))


def test_compile_with_dynamic_sizes_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: flash_ext.forward(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=counter
    )
    compilations = []
    for batch, seqlen in ((2, 9), (3, 17), (5, 40)):
        q, k, v = (make(batch, seqlen, 4, 16) for _ in range(3))
        expected, got = flash_ext.forward(q, k, v, causal=True), function(q, k, v)
        assert torch.equal(expected, got)
        assert torch.equal(gradients(expected, [k])[0], gradients(got, [k])[0])
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]


def test_compile_packed():
    q, k, v = make(10, 4, 16), make(12, 2, 16), make(12, 2, 16)
    cu_q, cu_k = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)

    def function(q, k, v, cu_q, cu_k):
        return flash_ext.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 7, causal=True)

    expected, got = function(q, k, v, cu_q, cu_k), compiled(function)(q, k, v, cu_q, cu_k)
    assert torch.equal(expected, got)
    assert torch.equal(gradients(expected, [v])[0], gradients(got, [v])[0])
    with pytest.raises(ValueError, match="must end within"):
        compiled(function)(q, k, v, cu_q + 1 - torch.tensor([1, 0, 0], dtype=torch.int32), cu_k)


def test_compile_of_slices_that_share_storage():
    qkv = make(2, 9, 3, 4, 16)
    function = compiled(lambda x: flash_ext.flash_attn_qkvpacked_func(x * 1.0, causal=True))
    out = function(qkv)
    assert torch.equal(out, flash_ext.flash_attn_qkvpacked_func(qkv, causal=True))
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape


def test_compile_with_dropout_follows_the_generator():
    q = make(2, 9, 4, 16)
    function = compiled(lambda q: flash_ext.forward(q, q, q, dropout_p=0.5))
    torch.manual_seed(1)
    first = function(q)
    assert not torch.equal(first, function(q))
    torch.manual_seed(1)
    assert torch.equal(first, function(q))


def test_compile_keeps_the_path():
    q = make(2, 9, 4, 16)
    function = compiled(lambda q: flash_ext.forward(q, q, q))
    with flash_ext.use_path("sm90"), pytest.raises(Exception, match="sm90"):
        function(q)


def test_autocast():
    q, k, v = make(), make(), make(dtype=torch.float16)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_ext.forward(q, k, v)
        got = compiled(lambda q, k, v: flash_ext.forward(q, k, v))(q, k, v)
        operator = torch.ops.flash_ext.fwd(*arguments())[0]
    assert out.dtype == got.dtype == operator.dtype == torch.bfloat16
    assert torch.equal(out, flash_ext.forward(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and v.grad.dtype == torch.float16
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", enabled=False),
        pytest.raises(TypeError, match="dtype"),
    ):
        flash_ext.forward(q, k, v)


def test_autocast_that_converts_nothing_takes_the_short_way(monkeypatch):
    q = make(dtype=torch.bfloat16)
    monkeypatch.setattr(flash_ext.interface, "_attend_slowly", lambda *_: pytest.fail("through the dispatcher"))
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_ext.forward(q, q, q)
    assert torch.equal(out, flash_ext.forward(q, q, q))


def test_the_reference_path_ignores_autocast():
    q = make(dtype=torch.bfloat16)
    with flash_ext.use_path("reference"):
        expected = flash_ext.forward(q, q, q)
        with torch.autocast("cpu", torch.bfloat16):
            got = flash_ext.forward(q, q, q)
            (grad,) = torch.autograd.grad(got.sum(), q)
        assert torch.equal(got, expected) and torch.equal(grad, torch.autograd.grad(expected.sum(), q)[0])


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
    q = make()
    for out in (flash_ext.forward(q, q, q), torch.ops.flash_ext.fwd(q, q, q, *arguments()[3:])[0]):
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


def test_modes_see_the_operator():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q = make()
    with Watch():
        flash_ext.forward(q, q, q).sum().backward()
    assert "flash_ext.fwd.default" in seen and "flash_ext.bwd.default" in seen


def test_subclasses_and_parameters():
    class Tagged(torch.Tensor):
        pass

    q = make(grad=False)
    expected = flash_ext.forward(q, q, q)
    assert torch.equal(expected, flash_ext.forward(q.as_subclass(Tagged), q, q))
    parameter = torch.nn.Parameter(q)
    flash_ext.forward(parameter, q, q).sum().backward()
    assert parameter.grad is not None


def test_unused_results_give_no_gradient():
    q = make()
    out, lse = flash_ext.forward(q, q, q, return_lse=True)
    del out
    lse.sum().backward()
    assert torch.isfinite(q.grad).all()


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
            results.append((out, lse, *grads, function(*args, **options)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_known_calls_are_told_apart(monkeypatch):
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


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(grad):
    q = make(grad=grad)
    flash_ext.forward(q, q, q)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        flash_ext.forward(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), q, q)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: flash_ext.forward(x, q, q), (q,), (torch.ones_like(q),))


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
        assert _C.signature(make(2, 8, 4, 16), q, q, *nothing) == plain
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


def test_sinks_gradient_ignores_rows_of_no_segment():
    lse = torch.tensor([[0.5, math.nan]])
    delta = torch.tensor([[1.0, math.nan]])
    grad = _dsinks(torch.tensor([0.5]), lse, delta, torch.tensor([0, 1], dtype=torch.int32))
    assert torch.equal(grad, torch.tensor([-1.0]))
    masked = _dsinks(torch.tensor([-math.inf]), torch.full((1, 1, 2), -math.inf), torch.ones(1, 1, 2), None)
    assert torch.equal(masked, torch.zeros(1))


def test_alignment_for_the_hopper_copy_engine():
    aligned = torch.empty(2, 8, 4, 16, dtype=torch.bfloat16)
    assert _C.is_aligned(aligned)
    assert _C.is_aligned(aligned[:, :, :1].expand(2, 8, 4, 16))  # expanded heads
    assert not _C.is_aligned(aligned[:, :1].expand(2, 8, 4, 16))  # one row expanded
    assert _C.is_aligned(aligned[:, :1])  # the stride of a single row means nothing
    assert not _C.is_aligned(aligned.flatten()[1:513].view(2, 8, 2, 16))  # base
    assert not _C.is_aligned(torch.empty(8, 4, 20, dtype=torch.bfloat16)[..., :16])  # packed, rows of 40 bytes
