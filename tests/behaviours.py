"""The cases that no tolerance rule judges, run on every path that the machine has like those of ``cases.py``."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_ext

BEHAVIOURS: dict[str, Callable[[str], None]] = {}


def behaviour(function: Callable[[str], None]) -> Callable[[str], None]:
    """``function(device)``, called with the path to be tested in use."""
    BEHAVIOURS[function.__name__] = function
    return function


def tensors(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def qkv(device: str, batch=1, seqlen_q=64, seqlen_k=64, heads=2, heads_kv=2, dim=64, dtype=torch.bfloat16):
    q = tensors(device, batch, seqlen_q, heads, dim, dtype=dtype, seed=1).requires_grad_()
    k = tensors(device, batch, seqlen_k, heads_kv, dim, dtype=dtype, seed=2).requires_grad_()
    v = tensors(device, batch, seqlen_k, heads_kv, dim, dtype=dtype, seed=3).requires_grad_()
    return q, k, v


@behaviour
def rows_without_keys_are_zero(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=5, seqlen_k=2, heads=1, heads_kv=1)
    out, lse = flash_ext.forward(q, k, v, causal=True, return_lse=True)
    assert (out[0, :3] == 0).all() and (lse[0, 0, :3] == -math.inf).all()
    assert torch.equal(out[0, 3, 0], v[0, 0, 0]) and torch.isfinite(out).all()
    torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert (q.grad[0, :3] == 0).all()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


@behaviour
def one_causal_query_sees_all_keys(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=1, seqlen_k=8, heads=1, heads_kv=1)
    assert torch.equal(flash_ext.forward(q, k, v, causal=True), flash_ext.forward(q, k, v))


@behaviour
def finite_bias_is_no_mask(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=40, seqlen_k=50)
    bias = torch.zeros(40, 50, device=device, dtype=q.dtype)
    bias[0] = torch.finfo(q.dtype).min
    out, lse = flash_ext.forward(q, k, v, attn_bias=bias, return_lse=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert torch.allclose(out[0, 0].float(), v[0].float().mean(0), atol=1e-2)


@behaviour
def infinite_bias_masks(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=256, seqlen_k=256)
    bias = torch.zeros(256, device=device)
    bias[:128] = -math.inf
    masked = flash_ext.forward(q, k, v, attn_bias=bias)
    assert torch.allclose(masked.float(), flash_ext.forward(q, k[:, 128:], v[:, 128:]).float(), atol=1e-2)
    everything = flash_ext.forward(q, k, v, attn_bias=torch.full((1,), -math.inf, device=device), return_lse=True)
    assert (everything[0] == 0).all() and (everything[1] == -math.inf).all()


@behaviour
def first_tile_masked_and_low_logits(device: str) -> None:
    q = torch.full((1, 88, 14, 128), 5.0, device=device, dtype=torch.bfloat16)
    k = torch.full((1, 448, 2, 128), -5.0, device=device, dtype=torch.bfloat16)
    v = tensors(device, 1, 448, 2, 128)
    out = flash_ext.forward(q, k, v, causal=True)
    rows = torch.arange(88, device=device)[:, None] + 360 >= torch.arange(448, device=device)
    means = torch.einsum("ij,jhd->ihd", rows.float() / rows.sum(1, keepdim=True), v[0].float())
    assert torch.allclose(out[0].float(), means.repeat_interleave(7, dim=1), atol=1e-2)


@behaviour
def huge_logits(device: str) -> None:
    q = torch.full((1, 1, 1, 64), 1024.0, device=device, dtype=torch.bfloat16)
    k = torch.full((1, 1, 1, 64), -8.0, device=device, dtype=torch.bfloat16)
    v = tensors(device, 1, 1, 1, 64)
    out, lse = flash_ext.forward(q, k, v, softmax_scale=1.0, return_lse=True)
    assert torch.equal(out, v) and lse.item() == -524288.0
    x = torch.full((1, 1, 1, 64), 133120.0, device=device, dtype=torch.bfloat16)
    out, lse = flash_ext.forward(x, x, x, return_lse=True)
    assert torch.equal(out, x) and torch.isfinite(lse).all()
    many = x.expand(1, 700, 1, 64)  # blocks of keys that are visited without looking for their maximum
    assert torch.equal(flash_ext.forward(x, many, many), x)


@behaviour
def empty_inputs(device: str) -> None:
    for shape in ({"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}):
        for causal in (False, True):
            q, k, v = qkv(device, **shape)
            out, lse = flash_ext.forward(q, k, v, causal=causal, return_lse=True)
            assert out.shape == q.shape and lse.shape == (q.shape[0], 2, q.shape[1])
            assert (out == 0).all() and (lse == -math.inf).all()
            torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
            assert all(t.grad.shape == t.shape and (t.grad == 0).all() for t in (q, k, v))
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    q, k, v = qkv(device, seqlen_k=0)
    out, lse = flash_ext.forward(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all() and torch.equal(lse[0, :, 0], sinks)
    torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert torch.equal(sinks.grad, torch.full_like(sinks, 64.0))


@behaviour
def empty_segments(device: str) -> None:
    q, k, v = (t.detach()[0].requires_grad_() for t in qkv(device, seqlen_q=40, seqlen_k=50))
    cu_q = torch.tensor([0, 0, 40, 40], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 20, 20, 50], dtype=torch.int32, device=device)
    out = flash_ext.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 30)
    assert (out == 0).all()
    out.sum().backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


@behaviour
def huge_window_is_none(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=100, seqlen_k=60)
    full = flash_ext.forward(q, k, v)
    for window in ((-1, 2**31 - 1), (2**31 - 1, -1), (2**63, 2**70), (10**6, 10**6)):
        assert torch.equal(flash_ext.forward(q, k, v, window_size=window), full)


@behaviour
def window_counts_both_ends(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=8, seqlen_k=8)
    q = torch.zeros_like(q)
    lse = flash_ext.forward(q, k, v, window_size=(3, 0), return_lse=True)[1]
    assert torch.allclose(lse[0, 0].exp(), torch.tensor([1, 2, 3, 4, 4, 4, 4, 4.0], device=device))
    for window in ((-1, -3), (-2, 0)):
        with pytest.raises(ValueError, match="window_size"):
            flash_ext.forward(q, k, v, window_size=window)


@behaviour
def alibi_of_one_query_is_the_last_row(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=90, seqlen_k=90)
    slopes = torch.tensor([0.1, 0.5], device=device)
    all_rows = flash_ext.forward(q, k, v, alibi_slopes=slopes)
    last = flash_ext.forward(q[:, -1:], k, v, alibi_slopes=slopes)
    assert torch.allclose(all_rows[:, -1:].float(), last.float(), atol=1e-2)


@behaviour
def gradients_of_any_stride(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=70, seqlen_k=70)

    def gradients(dout: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(flash_ext.forward(q, k, v), (q, k, v), dout))

    ones = torch.ones(1, 70, 2, 64, device=device, dtype=q.dtype)
    expanded = torch.ones(1, device=device, dtype=q.dtype).expand(1, 70, 2, 64)
    random = tensors(device, 1, 70, 2, 64, seed=9)
    transposed = random.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    odd = torch.cat([random[..., :1], random], dim=-1)[..., 1:]
    for contiguous, other in ((ones, expanded), (random, transposed), (random, odd)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(contiguous), gradients(other), strict=True))


@behaviour
def sink_of_zero_halves(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=1, seqlen_k=1)
    out = flash_ext.forward(torch.zeros_like(q), k, v, sinks=torch.zeros(2, device=device))
    assert torch.equal(out, v * 0.5)
    q, k, v = qkv(device, seqlen_q=4, seqlen_k=2)
    sinks = torch.tensor([0.25, -2.0], device=device, dtype=torch.bfloat16)
    out, lse = flash_ext.forward(q, k, v, sinks=sinks, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all() and torch.equal(lse[0, :, 0], sinks.float())


@behaviour
def views_equal_copies(device: str) -> None:
    heads_first = [tensors(device, 2, 4, 80, 64, seed=i).transpose(1, 2) for i in range(3)]
    sliced = list(tensors(device, 2, 80, 3, 4, 64).unbind(2))
    expanded = [tensors(device, 2, 97, 4, 64), *(t.expand(-1, -1, 4, -1) for t in tensors(device, 2, 2, 97, 1, 64))]
    odd_size_one = [tensors(device, 80, 4, 64, seed=i).as_strided((1, 80, 4, 64), (3, 256, 64, 1)) for i in range(3)]
    for q, k, v in (heads_first, sliced, expanded, odd_size_one):
        copies = (t.clone(memory_format=torch.contiguous_format) for t in (q, k, v))
        assert torch.equal(flash_ext.forward(q, k, v, causal=True), flash_ext.forward(*copies, causal=True))


@behaviour
def scattered_rows_are_copied(device: str) -> None:
    scattered = [tensors(device, 1, 4, 64, 50, seed=i).permute(0, 3, 1, 2).requires_grad_() for i in range(3)]
    results = []
    for inputs in (scattered, [t.detach().contiguous().requires_grad_() for t in scattered]):
        out = flash_ext.forward(*inputs, deterministic=True)
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@behaviour
def deterministic_gradients(device: str) -> None:
    q, k, v = qkv(device, batch=2, seqlen_q=300, seqlen_k=300, heads=4, heads_kv=1)
    out = flash_ext.forward(q, k, v, causal=True, window_size=(100, 0), deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(29 if device == "cuda" else 2):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@behaviour
def every_call_uses_its_own_options(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=90, seqlen_k=90)
    variants = ({}, {"softmax_scale": 0.5}, {"softcap": 2.0}, {"window_size": (3, 3)}, {"causal": True})
    first = [flash_ext.forward(q, k, v, **options) for options in variants]
    again = [flash_ext.forward(q, k, v, **options) for options in variants]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(not torch.equal(first[0], other) for other in first[1:])


@behaviour
def gradients_only_where_wanted(device: str) -> None:
    q, k, v = qkv(device)
    full = torch.autograd.grad(flash_ext.forward(q, k, v).sum(), (q, k, v))
    for wanted in range(3):
        args = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((q, k, v))]
        flash_ext.forward(*args).sum().backward()
        assert torch.equal(args[wanted].grad, full[wanted])
        assert all(t.grad is None for i, t in enumerate(args) if i != wanted)


@behaviour
def lse_alone_has_a_gradient(device: str) -> None:
    q, k, v = qkv(device, dtype=torch.float32)
    lse = flash_ext.forward(q, k, v, return_lse=True)[1]
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    exact = torch.logsumexp(torch.einsum("bihd,bjhd->bhij", q, k) * 64**-0.5, dim=-1)
    exact_dq, exact_dk = torch.autograd.grad(exact.sum(), (q, k))
    assert torch.allclose(dq, exact_dq, atol=1e-5) and torch.allclose(dk, exact_dk, atol=1e-5)


@behaviour
def merged_halves_equal_the_whole(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=50, seqlen_k=90, dtype=torch.float32)
    whole, whole_lse = flash_ext.forward(q, k, v, return_lse=True)
    a = flash_ext.forward(q, k[:, :30], v[:, :30], return_lse=True)
    b = flash_ext.forward(q, k[:, 30:], v[:, 30:], return_lse=True)
    out, lse = flash_ext.merge_states(*a, *b)
    assert torch.allclose(out, whole, atol=1e-5) and torch.allclose(lse, whole_lse, atol=1e-5)
    dout = torch.randn_like(out)
    parts, wholes = (torch.autograd.grad(x, (q, k, v), dout) for x in (out, whole))
    for part, full in zip(parts, wholes, strict=True):
        assert torch.allclose(part, full, atol=1e-4)


@behaviour
def dropout_keeps_the_mean(device: str) -> None:
    torch.manual_seed(0)
    q, k, v = qkv(device, batch=2, seqlen_q=256, seqlen_k=256)
    v = torch.ones_like(v)
    out = flash_ext.forward(q * 0, k, v, dropout_p=0.25)
    assert abs(out.float().mean().item() - 1) < 0.01
    assert not torch.equal(out, flash_ext.forward(q * 0, k, v, dropout_p=0.25))
    torch.manual_seed(0)
    assert torch.equal(out, flash_ext.forward(q * 0, k, v, dropout_p=0.25))


@behaviour
def float8_is_dequantised(device: str) -> None:
    def quantised(t: Tensor) -> tuple[Tensor, Tensor]:
        scale = t.abs().max().float() / 448
        return (t / scale).to(torch.float8_e4m3fn), scale.expand(1, 2)

    q, k, v = (t.detach().float() for t in qkv(device, seqlen_q=64, seqlen_k=4096))
    for factor in (0.0, 1.0, 8.0):  # uniform, usual, peaked
        (q8, sq), (k8, sk), (v8, sv) = quantised(q * factor + 1e-3), quantised(k), quantised(v)
        out = flash_ext.forward(q8, k8, v8, q_descale=sq, k_descale=sk, v_descale=sv)
        assert out.dtype == torch.bfloat16
        exact, _ = flash_ext.reference.attention(*((x.float() * s[0, 0]) for x, s in ((q8, sq), (k8, sk), (v8, sv))))
        assert (out.float() - exact).abs().max() < 0.05 * exact.abs().max()


@behaviour
def lengths_longer_than_the_tensors(device: str) -> None:
    q, k, v = (t.detach()[0] for t in qkv(device, seqlen_q=40, seqlen_k=50))
    cu_q = torch.tensor([0, 30, 40], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 20, 50], dtype=torch.int32, device=device)

    def results(longest_q: int, longest_k: int) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = flash_ext.flash_attn_varlen_func(*leaves, cu_q, cu_k, longest_q, longest_k, causal=True)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    expected = results(40, 50)
    for longest in (131072, 2**31 - 1):
        for a, b in zip(results(longest, longest), expected, strict=True):
            assert torch.allclose(a.float(), b.float(), atol=1e-2)
