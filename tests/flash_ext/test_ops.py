"""What torch expects of an operator: fakes, compiling, tracing, autocast, modes, subclasses."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from inputs import gradients, make

import flash_ext
from flash_ext.call import Extras, Scalars, new_rng_state


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


def test_the_reference_path_ignores_autocast():
    q = make(dtype=torch.bfloat16)
    with flash_ext.use_path("reference"):
        expected = flash_ext.forward(q, q, q)
        with torch.autocast("cpu", torch.bfloat16):
            got = flash_ext.forward(q, q, q)
            (grad,) = torch.autograd.grad(got.sum(), q)
        assert torch.equal(got, expected) and torch.equal(grad, torch.autograd.grad(expected.sum(), q)[0])


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
