"""float8 inputs: quantising, scales, results, and what a call says about them. Without a GPU they are converted."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import int32, make_qkv

import flash_ext
from flash_ext.float8 import _rotated

FLOAT8 = torch.float8_e4m3fn


def make(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def back(x8: torch.Tensor, descale: torch.Tensor) -> torch.Tensor:
    """What dense x8 stands for."""
    return x8.float() * descale.repeat_interleave(x8.shape[2] // descale.shape[1], 1)[:, None, :, None]


def test_quantised_numbers_come_back():
    x = make(2, 33, 4, 32) * torch.tensor([1.0, 100.0, 1e-4, 3.0])[:, None]
    x8, descale = flash_ext.quantize_fp8(x)
    assert x8.dtype == FLOAT8 and x8.shape == x.shape and descale.shape == (2, 4) and descale.dtype == torch.float32
    assert torch.equal(x8.float().abs().amax((1, 3)), torch.full((2, 4), 448.0))
    largest = x.abs().amax((1, 3), keepdim=True)
    assert ((back(x8, descale) - x).abs() <= 2**-4 * x.abs() + 2**-10 * largest / 448).all()


def test_groups_of_heads_share_a_scale():
    x = make(2, 9, 6, 32)
    x8, descale = flash_ext.quantize_fp8(x, num_heads_kv=2)
    assert descale.shape == (2, 2)
    assert torch.allclose(descale, x.unflatten(2, (2, 3)).abs().amax((1, 3, 4)) / 448)
    assert (back(x8, descale) - x).abs().max() < 0.07 * x.abs().max()


def test_packed_sequences_have_scales_of_their_own():
    cu = torch.tensor([0, 5, 5, 10], dtype=torch.int32)
    for rest in (1.0, 1e4, math.nan):  # rows that belong to no sequence count for no scale
        x = make(12, 2, 32)
        x[5:10] *= 50
        x[10:] *= rest
        x8, descale = flash_ext.quantize_fp8(x, cu_seqlens=cu)
        assert torch.allclose(descale[0], x[:5].abs().amax((0, 2)) / 448)
        assert torch.equal(descale[1], torch.ones(2))  # no rows
        assert torch.allclose(descale[2], x[5:10].abs().amax((0, 2)) / 448)
        assert torch.allclose(x8[5:10].float() * descale[2][:, None], x[5:10], rtol=0.07, atol=0.1)


def test_zeros_and_no_rows():
    for x in (torch.zeros(2, 3, 2, 32), torch.zeros(2, 0, 2, 32)):
        x8, descale = flash_ext.quantize_fp8(x)
        assert x8.shape == x.shape and torch.equal(descale, torch.ones(2, 2))


@pytest.mark.parametrize("largest", [1e-45, 1e-43, 1e-38, 5e-36])
def test_scales_of_tiny_numbers_are_no_zeros(largest: float):
    x = torch.full((1, 2, 1, 32), largest)
    x8, descale = flash_ext.quantize_fp8(x)
    assert descale.item() >= torch.finfo(torch.float32).tiny
    assert ((back(x8, descale) - x).abs() <= 2**-4 * x + 2**-10 * descale).all()


def test_rows_of_no_sequence():
    none = torch.zeros(1, dtype=torch.int32)
    x8, descale = flash_ext.quantize_fp8(torch.randn(5, 2, 32), cu_seqlens=none)
    assert x8.shape == (5, 2, 32) and descale.shape == (0, 2)
    out = flash_ext.flash_attn_varlen_func(x8, x8, x8, none, none, 0, 0, q_descale=descale, v_descale=descale)
    assert (out == 0).all()


@pytest.mark.parametrize("head_dim", [32, 64, 96, 192, 256])
def test_rotation_is_orthogonal(head_dim: int):
    rotation = _rotated(torch.eye(head_dim))
    assert torch.allclose(rotation @ rotation.T, torch.eye(head_dim), atol=1e-5)
    assert rotation.abs().max() <= (head_dim & -head_dim) ** -0.5 + 1e-6


def test_quantising_is_compiled_and_mapped():
    x = make(2, 9, 2, 32)

    def quantise(x):
        return flash_ext.quantize_fp8(x, hadamard=True)

    whole = quantise(x)
    compiled = torch.compile(quantise, fullgraph=True, backend="aot_eager")(x)
    mapped = torch.func.vmap(quantise)(x[:, None])
    for other in (compiled, (t[:, 0] for t in mapped)):
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(other, whole, strict=True))
    with torch.device("meta"):
        assert torch.equal(quantise(x)[1], whole[1])


def test_rotation_helps_against_outliers():
    q, k = make(1, 64, 2, 64), make(1, 96, 2, 64)
    for t in (q, k):
        t[..., 3] *= 30  # one column with large entries, as models have
    exact = torch.einsum("bqhd,bkhd->bhqk", q, k)
    errors = []
    for hadamard in (False, True):
        parts = (back(*flash_ext.quantize_fp8(t, hadamard=hadamard)) for t in (q, k))
        errors.append((torch.einsum("bqhd,bkhd->bhqk", *parts) - exact).pow(2).mean().sqrt().item())
    assert errors[1] < errors[0]


def quantised(seqlen: int = 40) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    tensors, options = [], {}
    for name, x in zip("qkv", make(3, 2, seqlen, 2, 32), strict=True):
        x8, options[f"{name}_descale"] = flash_ext.quantize_fp8(x + 0.1, hadamard=name != "v")
        tensors.append(x8)
    return tensors, options


def test_forward_is_attention_of_what_they_stand_for():
    tensors, options = quantised()
    parts = [back(t, scale) for t, scale in zip(tensors, options.values(), strict=True)]
    exact, exact_lse = flash_ext.forward(*parts, return_lse=True)
    for dtype in (None, torch.bfloat16, torch.float16):
        out, lse = flash_ext.forward(*tensors, **options, out_dtype=dtype, return_lse=True)
        assert out.dtype == (dtype or torch.bfloat16) and lse.dtype == torch.float32
        assert (out.float() - exact).abs().max() < 0.05 and (lse - exact_lse).abs().max() < 0.02


@pytest.mark.parametrize("option", ["attn_bias", "alibi_slopes", "dropout_p", "softcap", "sinks"])
def test_options_are_served_by_converting(option: str):
    """Bit by bit what bfloat16 inputs give: without scales they hold the same numbers."""
    tensors = [make(2, 40, heads, 32).to(FLOAT8) for heads in (4, 2, 2)]
    values = {"attn_bias": make(4, 40, 40), "alibi_slopes": make(4).abs(), "dropout_p": 0.3, "softcap": 2.0}
    options = {option: values.get(option, make(4)), "causal": True}
    without = {"attn_bias": "attn_bias", "alibi_slopes": "ALiBi", "dropout_p": "dropout"}.get(option)
    why = f"there is no float8 kernel with {without}" if without else "path 'cpu' computes in"
    assert why in flash_ext.explain(*tensors, **options).notes[0]
    results = []
    for inputs in (tensors, [t.bfloat16() for t in tensors]):
        torch.manual_seed(1)
        results.append(flash_ext.forward(*inputs, **options))
    assert torch.equal(*results)
    assert not torch.equal(results[0], flash_ext.forward(*tensors, causal=True))


def test_scales_broadcast():
    tensors, _ = quantised()
    whole = flash_ext.forward(*tensors, v_descale=torch.full((2, 2), 0.5))
    for scale in (torch.tensor(0.5), torch.tensor([0.5]), torch.full((2, 1), 0.5), torch.full((1, 2), 0.5)):
        assert torch.equal(flash_ext.forward(*tensors, v_descale=scale), whole)


def test_options_are_for_float8_only():
    x = make(1, 4, 2, 32)
    with pytest.raises(ValueError, match="v_descale must be given with float8"):
        flash_ext.forward(x, x, x, v_descale=torch.ones(1))
    with pytest.raises(ValueError, match="out_dtype must be given with float8"):
        flash_ext.forward(x, x, x, out_dtype=torch.float16)
    with pytest.raises(TypeError, match="k must have q's dtype"):
        flash_ext.forward(x.to(FLOAT8), x, x)


def test_the_sinks_gradient_is_there():
    tensors, options = quantised()
    sinks = torch.zeros(2, requires_grad=True)
    flash_ext.forward(*tensors, **options, sinks=sinks).sum().backward()
    assert sinks.grad.abs().max() > 0


def test_no_keys():
    q, k = make(1, 5, 2, 32).to(FLOAT8), make(1, 0, 2, 32).to(FLOAT8)
    out, lse = flash_ext.forward(q, k, k, return_lse=True)
    assert out.dtype == torch.bfloat16 and not out.any() and (lse == -math.inf).all()


def test_explain_says_that_they_are_converted():
    tensors, options = quantised()
    assert "converted to bfloat16" in str(flash_ext.explain(*tensors, **options))
    with pytest.raises(ValueError, match="q_descale must be broadcastable"):
        flash_ext.explain(*tensors, q_descale=torch.ones(5, 2))


def test_compiled():
    tensors, options = quantised()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, scale):
        return flash_ext.forward(q, k, v, v_descale=scale)

    scale = options["v_descale"]
    assert torch.equal(call(*tensors, scale), flash_ext.forward(*tensors, v_descale=scale))


def test_they_take_no_gradient():
    q, k, v = (t.to(FLOAT8) for t in make_qkv())
    with pytest.raises(ValueError, match="float8 must not require a gradient"):
        flash_ext.forward(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert flash_ext.forward(q, k, v).dtype == torch.bfloat16


def test_packed_scales_belong_to_segments():
    q, k, v = (torch.randn(n, 2, 16).to(FLOAT8) for n in (10, 12, 12))
    lengths = (int32(0, 4, 10), int32(0, 5, 12), 6, 7)
    scale = torch.tensor([[0.5, 1.0], [2.0, 0.25]])
    out = flash_ext.flash_attn_varlen_func(q, k, v, *lengths, q_descale=scale, v_descale=scale)
    rows = torch.tensor([0] * 4 + [1] * 6), torch.tensor([0] * 5 + [1] * 7)
    scaled_q, scaled_v = q.float() * scale[rows[0]][..., None], v.float() * scale[rows[1]][..., None]
    exact = flash_ext.flash_attn_varlen_func(scaled_q, k.float(), scaled_v, *lengths)
    assert torch.allclose(out.float(), exact, atol=0.03)
    with pytest.raises(ValueError, match="k_descale must be broadcastable"):
        flash_ext.flash_attn_varlen_func(q, k, v, *lengths, k_descale=torch.ones(3, 2))
