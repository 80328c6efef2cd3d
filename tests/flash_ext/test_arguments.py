"""Arguments: every bad one is named, and every good form of one is taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from inputs import int32, make_qkv

import flash_ext

# (error, words of its message, arguments that differ from a good call)
BAD = [
    (TypeError, "q must be a tensor, got list", {"q": [1.0]}),
    (TypeError, "k must be a tensor, got NoneType", {"k": None}),
    (ValueError, r"q must have shape \(batch, seqlen_q", {"q": torch.zeros(5, 4, 16)}),
    (ValueError, r"v must have shape \(batch, seqlen_k", {"v": torch.zeros(7, 2, 16)}),
    (TypeError, "q must be a dense tensor, got layout torch.sparse_coo", {"q": torch.zeros(2, 5, 4, 16).to_sparse()}),
    (TypeError, "v must be a dense tensor", {"v": torch.zeros(2, 7, 2, 16).to_mkldnn()}),
    (TypeError, "k must not be nested", {"k": torch.nested.nested_tensor([torch.zeros(7, 2, 16)] * 2)}),
    (TypeError, "k must have q's dtype torch.float32, got torch.bfloat16", {"k": torch.zeros(2, 7, 2, 16).bfloat16()}),
    (TypeError, "q must be float32.*use_path", {"q": torch.zeros(2, 5, 4, 16).double()}),
    (TypeError, "q must be .*got torch.int32$", {"q": torch.zeros(2, 5, 4, 16).int()}),
    (TypeError, "q must be .*got torch.float8_e5m2", {"q": torch.zeros(2, 5, 4, 16).to(torch.float8_e5m2)}),
    (ValueError, "k must have q's head_dim 16, got 8", {"k": torch.zeros(2, 7, 2, 8)}),
    (ValueError, "k must have q's batch 2, got 3", {"k": torch.zeros(3, 7, 2, 16), "v": torch.zeros(3, 7, 2, 16)}),
    (ValueError, "v must have k's shape", {"v": torch.zeros(2, 6, 2, 16)}),
    (ValueError, "multiple of k's num_heads_kv, got 4 and 3", {"k": torch.zeros(2, 7, 3, 16), "v": torch.zeros(2, 7, 3, 16)}),
    (ValueError, "head_dim .*at least 1", {"q": torch.zeros(2, 5, 4, 0), "k": torch.zeros(2, 7, 2, 0)}),
    (ValueError, "k must be on q's device", {"k": torch.zeros(2, 7, 2, 16, device="meta")}),
    (TypeError, "causal must be True or False, got 'no'", {"causal": "no"}),
    (TypeError, "causal must be True or False, got None", {"causal": None}),
    (TypeError, "causal must be True or False, got tensor", {"causal": torch.tensor(True)}),
    (TypeError, "deterministic must be True or False, got 2", {"deterministic": 2}),
    (ValueError, "window_size", {"window_size": (-1, -3)}),
    (TypeError, "window_size", {"window_size": 3}),
    (TypeError, "window_size must be a pair", {"window_size": {0, 1}}),
    (TypeError, "window_size", {"window_size": (1, 2, 3)}),
    (TypeError, "window_size must be an int, got 1.5", {"window_size": (1.5, 2)}),
    (TypeError, "window_size must be an int, got a tensor", {"window_size": torch.tensor([1, 2])}),
    (ValueError, "softcap", {"softcap": -1.0}),
    (ValueError, "softcap must be 0 for none, or lie between", {"softcap": 1e-40}),
    (TypeError, "softcap must be a number, got NoneType", {"softcap": None}),
    (ValueError, "softmax_scale must be finite", {"softmax_scale": math.nan}),
    (ValueError, "softmax_scale must be finite in float32, got 1e\\+300", {"softmax_scale": 1e300}),
    (ValueError, "softmax_scale must be finite in float32, got 3.41e\\+38", {"softmax_scale": 3.41e38}),
    (ValueError, "softmax_scale must be finite", {"softmax_scale": 10**400}),
    (TypeError, "softmax_scale must be a number, got Tensor", {"softmax_scale": torch.tensor(1.0)}),
    (TypeError, "softmax_scale must be a number, got complex", {"softmax_scale": 1j}),
    (TypeError, "softmax_scale must be a number, got list", {"softmax_scale": [1.0]}),
    (ValueError, r"dropout_p must be in \[0, 1\) .*, got 1.0", {"dropout_p": 1.0}),
    (ValueError, r"dropout_p must be in \[0, 1\) as a float32, got 0.99999", {"dropout_p": 1 - 1e-9}),
    (ValueError, r"alibi_slopes must have shape \(4,\) or \(2, 4\), got \(3,\)", {"alibi_slopes": torch.zeros(3)}),
    (TypeError, "alibi_slopes must be float64, .*int64", {"alibi_slopes": torch.zeros(4).long()}),
    (ValueError, "alibi_slopes .*detach", {"alibi_slopes": torch.zeros(4, requires_grad=True)}),
    (ValueError, "alibi_slopes must be on q's device", {"alibi_slopes": torch.zeros(4, device="meta")}),
    (ValueError, "attn_bias must be broadcastable", {"attn_bias": torch.zeros(5, 6)}),
    (ValueError, "attn_bias must be broadcastable", {"attn_bias": torch.zeros(1, 1, 1, 5, 7)}),
    (TypeError, "attn_bias .*torch.where", {"attn_bias": torch.zeros(5, 7).bool()}),
    (TypeError, "attn_bias .*float64", {"attn_bias": torch.zeros(5, 7).double()}),
    (TypeError, "attn_bias must be a dense tensor", {"attn_bias": torch.zeros(5, 7).to_sparse()}),
    (ValueError, r"sinks must have shape \(4,\), got \(2,\)", {"sinks": torch.zeros(2)}),
    (TypeError, "sinks must be a tensor, got list", {"sinks": [0.0] * 4}),
    (ValueError, "q_descale", {"q_descale": torch.ones(2, 2)}),
    (ValueError, "out_dtype must be given with float8", {"out_dtype": torch.float16}),
]  # fmt: skip


def call_with(function, change):
    q, k, v = make_qkv()
    arguments = {"q": q, "k": k, "v": v} | change
    return function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize("function", [flash_ext.forward, flash_ext.explain])
@pytest.mark.parametrize(("error", "words", "change"), BAD)
def test_bad_argument_is_named(function, error, words, change):
    with pytest.raises(error, match=words):
        call_with(function, change)


@pytest.mark.parametrize(("error", "words", "change"), [row for row in BAD if "dtype" not in row[1]])
def test_bad_argument_is_named_under_autocast(error, words, change):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(error, match=words):
        call_with(flash_ext.forward, change)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "q_descale must be a tensor, got float", {"q_descale": 1.0}),
        (TypeError, "k_descale must be a float32 tensor, got torch.float64", {"k_descale": torch.ones(2, 2).double()}),
        (ValueError, "v_descale must be on q's device cpu, got meta", {"v_descale": torch.ones(2, 2, device="meta")}),
        (ValueError, r"v_descale must be broadcastable to \(2, 2\), got \(2, 4\)", {"v_descale": torch.ones(2, 4)}),
        (TypeError, "out_dtype must be", {"out_dtype": torch.float32}),
        (TypeError, "v must have q's dtype", {"v": torch.zeros(2, 7, 2, 16)}),
    ],
)
@pytest.mark.parametrize("function", [flash_ext.forward, flash_ext.explain])
def test_bad_float8_argument_is_named(function, error, words, change):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in make_qkv())
    with pytest.raises(error, match=words):
        call_with(function, {"q": q, "k": k, "v": v} | change)


def test_sizes_beyond_what_indices_hold_are_named():
    one, many = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1).expand(1, 2**30, 1, 1)
    with pytest.raises(ValueError, match="q must have sizes below 2\\*\\*30"):
        flash_ext.forward(many, one, one)
    with pytest.raises(ValueError, match="k must have sizes below 2\\*\\*30"):
        flash_ext.forward(one, many, many)
    wide = torch.zeros(1, 1, 1, 2**18 + 1)
    with flash_ext.use_path("cpu"), pytest.raises(ValueError, match="head_dim and head_dim_v must be at most"):
        flash_ext.forward(wide, wide, one)


def test_a_bad_argument_is_named_in_compiled_calls():
    q, k, v = make_qkv()
    function = torch.compile(lambda q: flash_ext.forward(q, k, v, softcap=-1.0), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="softcap must be 0 for none"):
        function(q)


def packed(**changes):
    torch.manual_seed(0)
    arguments = {
        "q": torch.randn(10, 4, 16),
        "k": torch.randn(12, 2, 16),
        "v": torch.randn(12, 2, 16),
        "cu_seqlens_q": torch.tensor([0, 4, 10], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 5, 12], dtype=torch.int32),
        "max_seqlen_q": 6,
        "max_seqlen_k": 7,
    }
    return flash_ext.flash_attn_varlen_func(**(arguments | changes))


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "cu_seqlens_q .*int64", {"cu_seqlens_q": torch.tensor([0, 4, 10])}),
        (TypeError, "cu_seqlens_k .*list", {"cu_seqlens_k": [0, 5, 12]}),
        (TypeError, "cu_seqlens_q", {"cu_seqlens_q": None}),
        (ValueError, r"cu_seqlens_q must have shape \(batch \+ 1,\), got \(0,\)", {"cu_seqlens_q": int32()}),
        (ValueError, r"cu_seqlens_k must have shape \(batch \+ 1,\)", {"cu_seqlens_k": int32(0, 5, 12)[None]}),
        (ValueError, "cu_seqlens_k must be on q's device", {"cu_seqlens_k": int32(0, 5, 12).to("meta")}),
        (ValueError, r"cu_seqlens_k must have cu_seqlens_q's shape \(3,\), got \(2,\)", {"cu_seqlens_k": int32(0, 12)}),
        (ValueError, "cu_seqlens_q must start at 0, got 1", {"cu_seqlens_q": int32(1, 4, 10)}),
        (ValueError, "cu_seqlens_k must not decrease", {"cu_seqlens_k": int32(0, 5, 3)}),
        (ValueError, "cu_seqlens_q must end within the 10 rows of q, got 11", {"cu_seqlens_q": int32(0, 5, 11)}),
        (ValueError, "max_seqlen_q must be at least the longest segment 6, got 5", {"max_seqlen_q": 5}),
        (ValueError, "max_seqlen_k must be in", {"max_seqlen_k": -1}),
        (TypeError, "max_seqlen_q must be an int, got a tensor", {"max_seqlen_q": torch.tensor(6)}),
        (TypeError, "max_seqlen_q must be an int, got 6.5", {"max_seqlen_q": 6.5}),
        (ValueError, r"seqused_k must have shape \(2,\)", {"seqused_k": int32(1)}),
        (ValueError, "seqused_k must lie between", {"seqused_k": int32(6, 1)}),
        (ValueError, "seqused_k must lie between", {"seqused_k": int32(1, -1)}),
        (TypeError, "seqused_k must be an int32 tensor, got torch.int64", {"seqused_k": torch.tensor([1, 1])}),
        (ValueError, "max_seqlen_q must be in", {"max_seqlen_q": 2**31}),
        (ValueError, r"q must have shape \(total_q", {"q": torch.randn(1, 10, 4, 16)}),
        (ValueError, r"attn_bias must be broadcastable to \(2, 4, 6, 7\)", {"attn_bias": torch.zeros(10, 12)}),
        (NotImplementedError, "block_table", {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
    ],
)
def test_bad_packed_argument_is_named(error, words, change):
    with pytest.raises(error, match=words):
        packed(**change)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (TypeError, "out_a must be a tensor, got NoneType", {"out_a": None}),
        (TypeError, "lse_b must be a tensor, got float", {"lse_b": 1.0}),
        (TypeError, "lse_a must be a floating point tensor, got torch.int32", {"lse_a": torch.zeros(2, 4, 5).int()}),
        (ValueError, "out_b must be on out_a's device", {"out_b": torch.zeros(2, 5, 4, 16, device="meta")}),
        (ValueError, "out_a and out_b", {"out_b": torch.zeros(2, 4, 4, 16)}),
        (ValueError, "lse_b must have shape", {"lse_b": torch.zeros(2, 5, 4)}),
    ],
)
def test_bad_argument_of_merge_states_is_named(error, words, change):
    out, lse = torch.zeros(2, 5, 4, 16), torch.zeros(2, 4, 5)
    with pytest.raises(error, match=words):
        flash_ext.merge_states(**({"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse} | change))


@pytest.mark.parametrize(
    ("error", "words", "x", "options"),
    [
        (TypeError, "x must be a tensor, got list", [1.0], {}),
        (ValueError, r"x must have shape \(batch, seqlen, .* got \(5, 4, 16\)", torch.zeros(5, 4, 16), {}),
        (TypeError, "x must be a floating point tensor, got torch.int32", torch.zeros(2, 5, 4, 16).int(), {}),
        (TypeError, "hadamard must be True or False, got 'no'", torch.zeros(2, 5, 4, 16), {"hadamard": "no"}),
        (ValueError, "x must have a head_dim", torch.zeros(2, 5, 4, 0), {}),
        (ValueError, "num_heads_kv must be an int that divides", torch.zeros(2, 5, 4, 16), {"num_heads_kv": 3}),
        (TypeError, "num_heads_kv must be an int, got '2'", torch.zeros(2, 5, 4, 16), {"num_heads_kv": "2"}),
        (TypeError, "x must be a dense tensor", torch.zeros(2, 5, 4, 16).to_sparse(), {}),
        (TypeError, "cu_seqlens must be a tensor, got list", torch.zeros(5, 4, 16), {"cu_seqlens": [0, 5]}),
        (TypeError, "cu_seqlens must be an int32", torch.zeros(5, 4, 16), {"cu_seqlens": torch.tensor([0, 5])}),
        (ValueError, "cu_seqlens must have shape", torch.zeros(5, 4, 16), {"cu_seqlens": int32(0, 5)[None]}),
        (ValueError, "cu_seqlens must be on x's device", torch.zeros(5, 4, 16), {"cu_seqlens": int32(0).to("meta")}),
    ],
)
def test_bad_argument_of_quantize_fp8_is_named(error, words, x, options):
    with pytest.raises(error, match=words):
        flash_ext.quantize_fp8(x, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_slopes_of_any_float_dtype(dtype):
    q, k, v = make_qkv()
    slopes = torch.tensor([0.5, 0.25, 1.0, 2.0])
    expected = flash_ext.forward(q, k, v, alibi_slopes=slopes)
    assert torch.equal(expected, flash_ext.forward(q, k, v, alibi_slopes=slopes.to(dtype)))
    assert torch.equal(expected, flash_ext.forward(q, k, v, alibi_slopes=slopes.to(dtype).expand(2, 4)))


def test_bias_forms_agree():
    q, k, v = make_qkv()
    bias = torch.randn(5, 7)
    expected = flash_ext.forward(q, k, v, attn_bias=bias)
    for form in (bias[None], bias[None, None], bias.expand(2, 4, 5, 7), bias.t().contiguous().t()):
        assert torch.equal(expected, flash_ext.forward(q, k, v, attn_bias=form))
    half = flash_ext.forward(q, k, v, attn_bias=bias.bfloat16())
    assert torch.allclose(half, expected, atol=0.05)


def test_numbers_of_any_kind():
    q, k, v = make_qkv()
    expected = flash_ext.forward(q, k, v, softmax_scale=1.0, softcap=2.0, window_size=(3, 2), causal=True)
    forms = {"softmax_scale": 1, "softcap": 2, "window_size": [3, 2], "causal": 1}
    of_numpy = {
        "softmax_scale": np.float32(1),
        "softcap": np.int64(2),
        "window_size": (3, np.int8(2)),
        "causal": np.True_,
    }
    for _ in range(2):  # the second call is one that was checked before
        assert torch.equal(expected, flash_ext.forward(q, k, v, **of_numpy))
        assert torch.equal(expected, flash_ext.forward(q, k, v, **forms))
        assert torch.equal(expected, flash_ext.forward(q, k, v, **(forms | {"window_size": (3.0, 2**70)})))
    assert flash_ext.forward(q * 0, k, v, softmax_scale=torch.finfo(torch.float32).max).isfinite().all()
    assert torch.equal(packed(max_seqlen_q=np.int64(6), max_seqlen_k=7.0), packed())


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_the_smallest_and_the_largest_softcap(softcap):
    q, k, v = make_qkv()
    expected = v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(q)  # every score is 0
    if softcap > 1:
        expected = flash_ext.forward(q, k, v)
    assert torch.allclose(flash_ext.forward(q, k, v, softcap=softcap), expected, atol=1e-6)


def test_the_largest_dropout_keeps_nothing():
    assert not flash_ext.forward(*make_qkv(), dropout_p=1 - 2**-24).any()


def test_lengths_longer_than_the_tensors():
    """A caller may name a model's longest context; memory and work follow what exists."""
    for longest in (6, 7, 4096, 2**31 - 1):
        assert torch.equal(packed(max_seqlen_q=longest, causal=True), packed(max_seqlen_q=6, causal=True))
        assert torch.equal(packed(max_seqlen_k=7 + longest // 2), packed())


def test_a_value_without_truth_is_no_flag():
    q, k, v = make_qkv()
    for _ in range(2):  # the second call is one that was checked before
        with pytest.raises((RuntimeError, ValueError), match="ambiguous"):
            flash_ext.forward(q, k, v, return_lse=torch.zeros(2))


def test_number_of_results():
    q, k, v = make_qkv()
    assert isinstance(flash_ext.forward(q, k, v), torch.Tensor)
    out, lse = flash_ext.forward(q, k, v, return_lse=True)
    assert out.shape == (2, 5, 4, 16) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    out, lse, probs = flash_ext.flash_attn_func(q, k, v, return_attn_probs=True)
    assert probs is None and lse.shape == (2, 4, 5)
    out, lse = packed(return_lse=True)
    assert out.shape == (10, 4, 16) and lse.shape == (4, 10)
    assert len(packed(return_attn_probs=True)) == 3
