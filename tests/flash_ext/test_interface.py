"""The public functions: their signatures and results, paths, what importing does."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys

import pytest
import torch
from inputs import int32, make_qkv
from torch.utils._python_dispatch import TorchDispatchMode

import flash_ext
from flash_ext.dispatch import Choice, Pass


def test_not_supported_yet():
    q, k, v = make_qkv()
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache"):
        flash_ext.flash_attn_with_kvcache(q, k, v)


@pytest.mark.parametrize("name", [n for n in flash_ext.__all__ if n in ("forward", "explain") or n.endswith("_func")])
def test_signatures_show_their_keywords(name):
    parameters = inspect.signature(getattr(flash_ext, name)).parameters
    shown = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"}
    if "packed" not in name:
        shown |= {"attn_bias", "sinks"}
    assert shown <= set(parameters)
    assert not any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def test_positions_are_those_of_flash_attn():
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
    dense = list(inspect.signature(flash_ext.flash_attn_func).parameters)
    assert dense[:11] == ["q", "k", "v", *common, "return_attn_probs"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    varlen = list(inspect.signature(flash_ext.flash_attn_varlen_func).parameters)
    assert varlen[:16] == ["q", "k", "v", *lengths, *common, "return_attn_probs", "block_table"]
    packed = {
        "qkvpacked": ["qkv"],
        "kvpacked": ["q", "kv"],
        "varlen_qkvpacked": ["qkv", "cu_seqlens", "max_seqlen"],
        "varlen_kvpacked": ["q", "kv", *lengths],
    }
    for name, first in packed.items():
        parameters = list(inspect.signature(getattr(flash_ext, f"flash_attn_{name}_func")).parameters)
        assert parameters == [*first, *common, "return_attn_probs"]


def test_explain_takes_what_forward_takes():
    forward, explain = (set(inspect.signature(f).parameters) for f in (flash_ext.forward, flash_ext.explain))
    assert forward <= explain


def test_flash_attn_names_agree():
    q, k, v = make_qkv(k=(2, 7, 4, 16))
    out = flash_ext.forward(q, k, v, causal=True)
    assert torch.equal(out, flash_ext.flash_attn_func(q, k, v, 0.0, None, True))
    kv = torch.stack([k, v], dim=2)
    assert torch.equal(out, flash_ext.flash_attn_kvpacked_func(q, kv, causal=True))
    qkv = torch.randn(2, 6, 3, 4, 16, requires_grad=True)
    out = flash_ext.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, flash_ext.forward(*qkv.unbind(2), causal=True))
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape

    lengths = int32(0, 6, 12)
    flat = qkv.detach().flatten(0, 1)
    out_packed = flash_ext.flash_attn_varlen_qkvpacked_func(flat, lengths, 6, causal=True)
    assert torch.allclose(out_packed, out.flatten(0, 1), atol=1e-6)
    again = flash_ext.flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], lengths, lengths, 6, 6, causal=True)
    assert torch.equal(again, out_packed)
    with pytest.raises(ValueError, match="qkv must have shape"):
        flash_ext.flash_attn_qkvpacked_func(torch.randn(2, 6, 2, 4, 16))
    with pytest.raises(TypeError, match="kv must be a tensor, got tuple"):
        flash_ext.flash_attn_kvpacked_func(q, (k, v))


def test_gradient_of_an_expanded_bias_reaches_its_base():
    q, k, v = make_qkv()
    base = torch.randn(1, 1, 5, 7, requires_grad=True)
    dout = torch.randn_like(q)
    flash_ext.forward(q, k, v, attn_bias=base.expand(2, 4, 5, 7)).backward(dout)
    expanded, base.grad = base.grad, None
    flash_ext.forward(q, k, v, attn_bias=base).backward(dout)
    assert torch.allclose(expanded, base.grad, atol=1e-5)


def test_float64_on_the_reference_path():
    q, k, v = make_qkv(torch.float64)
    with flash_ext.use_path("reference"):
        out, lse = flash_ext.forward(q, k, v, return_lse=True)
    assert out.dtype == lse.dtype == torch.float64


def test_use_path():
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match="path must be one of"), flash_ext.use_path("cuda"):
        pass
    with flash_ext.use_path("sm90"), pytest.raises(NotImplementedError, match="sm90"):
        flash_ext.forward(q, k, v)
    with flash_ext.use_path("reference"):
        assert flash_ext.explain(q, k, v).path == "reference"
        with flash_ext.use_path("cpu"):
            assert flash_ext.explain(q, k, v).path == "cpu"
        assert flash_ext.explain(q, k, v).path == "reference"
    assert flash_ext.explain(q, k, v).path == "cpu"


def test_backward_keeps_the_path_of_forward():
    q, k, v = (t.requires_grad_() for t in make_qkv())
    with flash_ext.use_path("reference"):
        out = flash_ext.forward(q, k, v)
    with flash_ext.use_path("cpu"):
        out.sum().backward()
    assert out.grad_fn.plan.bwd.path == "reference"


def test_explain():
    q, k, v = make_qkv()
    explanation = flash_ext.explain(q, k, v, causal=True)
    assert (explanation.path, explanation.kernel, explanation.backward.kernel) == ("cpu", "fwd_cpu", "bwd_cpu")
    forward, backward = str(explanation).splitlines()
    assert forward == f"forward: path cpu, kernel 'fwd_cpu' ({explanation.reason})"
    assert backward.startswith("backward: path cpu, kernel 'bwd_cpu'")
    scattered = q.transpose(1, 3).contiguous().transpose(1, 3)
    assert "q is copied" in str(flash_ext.explain(scattered, k, v))
    assert "float8" in str(flash_ext.explain(*(t.to(torch.float8_e4m3fn) for t in (q, k, v))))


def test_explain_says_what_runs_besides_kernels(monkeypatch):
    q, k, v = make_qkv()
    scattered = q.transpose(1, 3).contiguous().transpose(1, 3)
    with flash_ext.use_path("reference"):
        assert not flash_ext.explain(scattered, k, v).notes
    assert flash_ext.explain(q, k[:, :0], v[:, :0]).notes == ("no kernel runs: there are no keys",)
    assert flash_ext.explain(scattered[:, :0], k, v).notes == ("no kernel runs: there are no queries",)

    def hopper(call, table, can_run, row_name, path):
        path = "simt" if call.pass_ == Pass.DBIAS else "sm90"
        return Choice(path, 0, f"{call.pass_.name.lower()} {path}", "")

    monkeypatch.setattr("flash_ext.plan.choose", hopper)
    monkeypatch.setattr("flash_ext.jit.is_ready", lambda *_: True)
    bias = torch.zeros(5, 7, requires_grad=True)
    note = "computed in a pass of its own, by path simt, kernel 'dbias simt'"
    (said,) = flash_ext.explain(q, k, v, attn_bias=bias).notes
    assert "added up by the backward kernel" in said and said.endswith(note)
    said = flash_ext.explain(q, k, v, attn_bias=bias, deterministic=True).notes
    assert said == (f"the gradient of attn_bias is {note}",)
    assert not flash_ext.explain(q, k, v, attn_bias=bias.detach()).notes
    said = flash_ext.explain(q.new_zeros(2, 5, 4, 17)[..., 1:], k, v).notes
    assert said == ("q is copied: its strides are not multiples of 16 bytes, or 0 along the sequence",)


def test_explain_says_what_is_copied_for_the_backward_pass(monkeypatch):
    def choose(call, table, can_run, row_name, path):
        return Choice("sm80" if call.pass_ == Pass.FWD else "sm90", 0, "", "")

    q, k, v = make_qkv()
    monkeypatch.setattr("flash_ext.plan.choose", choose)
    monkeypatch.setattr("flash_ext.jit.is_ready", lambda *_: True)
    (said,) = flash_ext.explain(q, k.new_zeros(2, 7, 2, 17)[..., 1:], v).notes
    assert said.startswith("k is copied for the backward pass: its strides")


def test_explain_refuses_what_the_call_refuses():
    q, k, v = make_qkv()
    q8, k8, v8 = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    with pytest.raises(ValueError, match="float8 must not require a gradient"):
        flash_ext.explain(q8.requires_grad_(), k8, v8)
    with pytest.raises(TypeError, match="cu_seqlens_q must be an int32 tensor where"):
        flash_ext.explain(q[0], k[0], v[0], cu_seqlens_k=int32(0, 7))
    with pytest.raises(NotImplementedError, match="q is on device meta"):
        flash_ext.explain(*(t.to("meta") for t in (q, k, v)))


def test_explain_under_autocast_converts_nothing():
    q, k, v = make_qkv()
    k = k.bfloat16()
    with torch.autocast("cpu", torch.bfloat16), Operators() as operators:
        explanation = flash_ext.explain(q, k, v, return_lse=True)
    assert explanation.path == "cpu"
    assert set(operators.names) == {"aten.empty_like.default"}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_merge_states():
    out, lse = torch.randn(2, 5, 4, 16), torch.randn(2, 4, 5)
    nothing, never = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (flash_ext.merge_states(out, lse, nothing, never), flash_ext.merge_states(nothing, never, out, lse)):
        assert torch.allclose(merged[0], out) and torch.allclose(merged[1], lse)
    merged = flash_ext.merge_states(nothing, never, nothing, never)
    assert (merged[0] == 0).all() and (merged[1] == -math.inf).all()
    merged = flash_ext.merge_states(out, lse, torch.full_like(out, math.nan), never)
    assert torch.allclose(merged[0], out) and torch.allclose(merged[1], lse)
    huge = flash_ext.merge_states(out, lse + 1e4, out, lse + 1e4)
    assert torch.allclose(huge[0], out, atol=1e-6) and torch.allclose(huge[1], lse + 1e4 + math.log(2), rtol=1e-6)


def test_merge_states_has_no_nan_gradients():
    out, lse = torch.randn(5, 4, 16, requires_grad=True), torch.randn(4, 5)
    lse[:, 2] = -math.inf
    lse.requires_grad_()
    merged, merged_lse = flash_ext.merge_states(out, lse, out * 2, lse)
    finite = merged_lse.where(merged_lse != -math.inf, 0.0)
    (merged.sum() + finite.sum()).backward()
    assert torch.isfinite(out.grad).all() and torch.isfinite(lse.grad).all()


def test_import_leaves_cuda_alone():
    code = "import torch, flash_ext; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_works_after_fork():
    code = """
import os, torch, flash_ext
x = torch.randn(1, 300, 2, 16)
for used_before in (False, True):
    if used_before:
        flash_ext.forward(x, x, x)
    pid = os.fork()
    if pid == 0:
        flash_ext.forward(x, x, x)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_needs_no_numpy():
    code = """
import sys
sys.modules["numpy"] = None
import torch, flash_ext
x = torch.randn(1, 8, 2, 16, requires_grad=True)
flash_ext.forward(x, x, x, causal=True).sum().backward()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_packed_rows_of_no_sequence():
    """Past the last sequence gradients are zero, and what lies there reaches nothing. (out and lse: only on the CPU.)"""
    q, k, v = (torch.randn(12, 2, 16) for _ in range(3))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    results = {}
    for tail in (0.0, math.nan):
        leaves = [t.clone() for t in (q, k, v)]
        for t in leaves:
            t[8:] = tail
            t.requires_grad_()
        with flash_ext.testing.poison():
            out, lse = flash_ext.flash_attn_varlen_func(*leaves, cu, cu, 5, 5, causal=True, return_lse=True)
            dout = torch.ones_like(out)
            dout[8:] = tail
            grads = torch.autograd.grad(out, leaves, dout)
        assert (out[8:] == 0).all() and (lse[:, 8:] == -math.inf).all()
        assert all((g[8:] == 0).all() for g in grads)
        results[tail] = (out, lse, *grads)
    assert all(torch.equal(a, b) for a, b in zip(*results.values(), strict=True))


def test_packed_rows_of_no_sequence_have_no_sink():
    q, k = torch.randn(5, 2, 16), torch.randn(4, 2, 16)
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    for path in ("reference", "cpu"):
        for owned in (3, 0):
            with flash_ext.use_path(path):
                cu_q, cu_k = int32(0, owned), int32(0, 0)
                lse = flash_ext.flash_attn_varlen_func(q, k, k, cu_q, cu_k, owned, 0, sinks=sinks, return_lse=True)[1]
            assert torch.equal(lse[:, :owned], sinks[:, None].expand(2, owned)) and (lse[:, owned:] == -math.inf).all()
            dlse = torch.ones_like(lse)
            dlse[:, owned:] = math.nan
            assert torch.equal(torch.autograd.grad(lse, sinks, dlse)[0], torch.full((2,), float(owned)))
