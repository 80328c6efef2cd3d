"""The Hugging Face attention function, without Hugging Face: a stub stands in where transformers is not installed."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F

from flash_ext.integrations.transformers import attention_forward, register


def make(seqlen_q=6, seqlen_k=9):
    return torch.randn(2, 4, seqlen_q, 16), torch.randn(2, 2, seqlen_k, 16), torch.randn(2, 2, seqlen_k, 16)


@pytest.fixture
def layer():
    layer = torch.nn.Module()
    layer.is_causal = True
    return layer.eval()


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)


def test_causal_and_window(layer):
    q, k, v = make()
    i, j = torch.arange(6)[:, None] + 3, torch.arange(9)
    for window, visible in ((None, j <= i), (3, (j <= i) & (j > i - 3))):
        out, probs = attention_forward(layer, q, k, v, None, scaling=0.3, sliding_window=window)
        assert probs is None and torch.allclose(out, sdpa(q, k, v, visible), atol=1e-5)


def test_not_causal(layer):
    q, k, v = make()
    out, _ = attention_forward(layer, q, k, v, None, scaling=0.3, is_causal=False)
    assert torch.allclose(out, sdpa(q, k, v, None), atol=1e-5)


def test_masks_hold_everything(layer):
    q, k, v = make()
    visible = torch.rand(2, 1, 6, 12) > 0.4  # longer than the keys, as static caches make it
    visible[..., 0] = True
    expected = sdpa(q, k, v, visible[..., :9])
    out, _ = attention_forward(layer, q, k, v, visible, scaling=0.3)
    assert torch.allclose(out, expected, atol=1e-5)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    out, _ = attention_forward(layer, q, k, v, additive, scaling=0.3)
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_padding_have_no_gradient(layer, dtype):
    """Every key of theirs is masked by the lowest number, beside which float32 holds no log of how many they are."""
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    masked = ~torch.ones(40, 40).tril().bool()
    masked[:, :16] = True  # padding on the left
    mask = torch.zeros(1, 1, 40, 40, dtype=dtype).masked_fill(masked, torch.finfo(dtype).min)
    out, _ = attention_forward(layer, q, k, v, mask)
    assert (out[:, :16] == 0).all()
    out.sum().backward()
    assert (v.grad[:, :, :16] == 0).all() and torch.allclose(
        v.grad.float().sum(), torch.tensor(2 * 24 * 16.0), rtol=1e-2
    )


def test_packed_sequences_do_not_see_each_other(layer):
    q, k, v = (torch.randn(1, heads, 9, 16) for heads in (4, 2, 2))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    for window in (None, 2):
        parts = [
            attention_forward(layer, *(t[:, :, s] for t in (q, k, v)), None, scaling=0.3, sliding_window=window)[0]
            for s in (slice(4), slice(4, 9))
        ]
        out, _ = attention_forward(layer, q, k, v, None, scaling=0.3, sliding_window=window, **lengths)
        assert out.shape == (1, 9, 4, 16) and torch.allclose(out, torch.cat(parts, 1), atol=1e-6)
    out, _ = attention_forward(layer, q, k, v, None, scaling=0.3, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    causal = torch.ones(1, 1, 9, 9).tril().bool()
    for mask in (causal, torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)):
        masked, _ = attention_forward(layer, q, k, v, mask, scaling=0.3, **lengths)
        assert torch.allclose(masked, out, atol=1e-6)


def test_what_is_not_served_is_refused(layer):
    q, k, v = make()
    for name in ("head_mask", "position_bias"):
        with pytest.raises(NotImplementedError, match=name):
            attention_forward(layer, q, k, v, None, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="sliding_window must be at least 1"):
        attention_forward(layer, q, k, v, None, sliding_window=0)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k"):
        attention_forward(layer, q, k, v, None, cu_seq_lens_q=cu)
    with pytest.raises(NotImplementedError, match="batch of 1, got 2"):
        mask = torch.ones(2, 1, 6, 9).bool()
        attention_forward(layer, q, k, v, mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    attention_forward(layer, q, k, v, None, position_ids=torch.arange(6), use_cache=False)  # these change nothing


def test_dropout_only_in_training(layer):
    q, k, v = make()
    plain = attention_forward(layer, q, k, v, None)[0]
    assert torch.equal(plain, attention_forward(layer, q, k, v, None, dropout=0.5)[0])
    assert not torch.equal(plain, attention_forward(layer.train(), q, k, v, None, dropout=0.5)[0])


def test_sinks_and_softcap(layer):
    q, k, v = make()
    plain = attention_forward(layer, q, k, v, None)[0]
    assert not torch.equal(plain, attention_forward(layer, q, k, v, None, s_aux=torch.zeros(4))[0])
    assert not torch.equal(plain, attention_forward(layer, q, k, v, None, softcap=1.0)[0])


def test_register(monkeypatch):
    registered = {}

    class Interface:
        @classmethod
        def register(cls, name, function):
            registered[cls.__name__, name] = function

    stub, masking = types.ModuleType("transformers"), types.ModuleType("transformers.masking_utils")
    stub.AttentionInterface = type("AttentionInterface", (Interface,), {})
    monkeypatch.setitem(sys.modules, "transformers", stub)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)
    register()
    assert registered == {("AttentionInterface", "flash_ext"): attention_forward}
    stub.AttentionMaskInterface = type("AttentionMaskInterface", (Interface,), {})
    masking.sdpa_mask = object()
    register("mine")
    assert registered["AttentionMaskInterface", "mine"] is masking.sdpa_mask
