"""The public functions. Every call, dense or packed, goes through ``attend``.

A bad argument raises one exception that names it, says what it was and what is supported, before anything is launched
(``call``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .call import Arguments, canonical, check_call, check_kind, is_float8, lse_shape
from .extension import _C, chosen_path, current_path
from .float8 import Float8Options, refuse_options
from .float8 import attend as attend_float8
from .ops import autocast_dtype, cast_for_autocast, fwd_operator
from .plan import NO_EXTRAS, Plan, remember

# Calls that were checked before and that need more than kernels, by the key of ``_C.eager``. Those that need no more C++
# itself remembers (``_C.remember``); operators, which see checked arguments alone, have theirs in ``plan_for``.
_plans: dict[bytes, Plan] = {}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention: ``softmax(q @ k.T * softmax_scale) @ v`` without the matrix in between. Differentiable once.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); float32, float16, bfloat16, or float8_e4m3fn.
        k: (batch, seqlen_k, num_heads_kv, head_dim); num_heads is a multiple of num_heads_kv.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v). Any strides. Where the last dimension is contiguous they cost
            no copy; on Hopper base and strides must be multiples of 16 bytes too, and no row be expanded along the
            sequence. ``explain`` says what is copied.
        causal: query i sees keys up to i + seqlen_k - seqlen_q (aligned to the bottom right).
        softmax_scale: factor of the scores; None: head_dim ** -0.5.
        window_size: (left, right): query i sees keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q +
            right, both included; -1: unbounded.
        softcap: if positive, a scaled score s becomes softcap * tanh(s / softcap).
        alibi_slopes: (num_heads,) or (batch, num_heads): adds -slope * |i + seqlen_k - seqlen_q - j|. Not
            differentiable.
        attn_bias: broadcastable to (batch, num_heads, seqlen_q, seqlen_k), added after scaling; -inf masks, a finite
            number never does (but where a row's are all beyond +-1e4, float32 holds lse, and with it the row's
            gradients, less exactly: mask with -inf).
            Differentiable; its gradient is cheapest where broadcast dimensions have size 1 rather than being expanded.
        sinks: (num_heads,): exp(sink) joins the softmax's denominator. Differentiable.
        dropout_p: probability in [0, 1) with which an entry of the softmax is dropped; random numbers from torch's
            generator.
        deterministic: gradients are bitwise equal from run to run (so does ``torch.use_deterministic_algorithms``).
        return_lse: also return lse.
        q_descale, k_descale, v_descale: float8 only, factors of the stored numbers, float32, broadcastable to
            (batch, num_heads_kv), positive. float8 inputs take no gradients. ``quantize_fp8`` makes them.
        out_dtype: float8 only, of the result: bfloat16 (None) or float16.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v) in q's dtype, or (out, lse) with lse (batch, num_heads, seqlen_q)
        float32, the natural logarithm of the softmax's denominator; both are differentiable. A row that sees no key
        has out 0 and lse -inf (with sinks: the sink). Where out alone is asked for and no gradient, its storage also
        holds the lse behind it (an allocation less): ``out.clone()`` where storages are saved or counted.

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that cannot be served, before anything runs.

    Source: Dao et al., "FlashAttention", 2022, section 3.1; Dao, "FlashAttention-2", 2023, section 3.1; Shah et al.,
    "FlashAttention-3", 2024, section 3. ALiBi: Press et al., 2022, section 3; softcap: Gemma 2 report, 2024, section 2;
    sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, section 3.
    """
    float8 = None
    if not (q_descale is k_descale is v_descale is out_dtype is None):
        float8 = Float8Options(q_descale, k_descale, v_descale, out_dtype)
    call = (
        q, k, v, None, None, None, alibi_slopes, attn_bias, sinks,
        causal, softmax_scale, window_size, softcap, dropout_p, deterministic, 0, 0,
    )  # fmt: skip
    return attend(call, return_lse, float8)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]:
    """Attention within each of many sequences that lie packed one behind the other. Options as in ``forward``.

    Args:
        q: (total_q, num_heads, head_dim); k: (total_k, num_heads_kv, head_dim); v: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device, from 0, not decreasing: where each sequence
            begins. Rows past the last entry belong to none: they are not read, and their gradients are 0. In out and
            lse, CUDA kernels leave them as they were allocated (writing them would cost every call a launch), so they
            may hold NaN: cut them off, or ``masked_fill`` them, before a matrix product.
        max_seqlen_q, max_seqlen_k: rows of the longest sequence, or more. The exact number is fastest: all but the Hopper
            forward launch blocks for so many rows of every sequence, and raise where that would be 2^31 blocks.
        seqused_k: (batch,) int32: how many keys of each sequence exist; None: all.
        attn_bias: broadcastable to (batch, num_heads, max_seqlen_q, max_seqlen_k), counted from each sequence's start.
        block_table: not supported yet.

    Returns:
        out (total_q, num_heads, head_dim_v); (out, lse) with ``return_lse``, (out, lse, None) with
        ``return_attn_probs``; lse (num_heads, total_q).

    Raises:
        TypeError, ValueError, NotImplementedError: an argument that cannot be served, before anything runs.

    The lengths are checked where that costs nothing: in host memory. On a CUDA device looking at them would make the
    host wait for the device; kernels clamp them to the memory that exists instead, and ``FLASH_EXT_CHECK_LENGTHS=1``
    in the environment has them checked all the same.
    """
    if block_table is not None:
        raise NotImplementedError("block_table (paged keys and values) is not supported yet; pass contiguous k and v")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise TypeError("cu_seqlens_q and cu_seqlens_k must be int32 tensors, got None; use forward for dense batches")
    float8 = None
    if not (q_descale is k_descale is v_descale is out_dtype is None):
        float8 = Float8Options(q_descale, k_descale, v_descale, out_dtype)
    call = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, attn_bias, sinks,
        causal, softmax_scale, window_size, softcap, dropout_p, deterministic, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    result = attend(call, return_lse or return_attn_probs, float8)
    return (*result, None) if return_attn_probs else result


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join the results of the same queries over disjoint sets of keys. Differentiable.

    Args:
        out_a, out_b: (batch, seqlen_q, num_heads, head_dim_v), or packed (total_q, num_heads, head_dim_v).
        lse_a, lse_b: (batch, num_heads, seqlen_q), or packed (num_heads, total_q), float32.

    Returns:
        (out, lse), as if attention had seen both sets at once; out in out_a's dtype. Rows without keys on one side
        take the other; without keys on both sides: out 0, lse -inf.

    Raises:
        TypeError, ValueError: an argument that does not go with the others.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.1.
    """
    for name, t in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_kind(name, t)
        if not t.is_floating_point():
            raise TypeError(f"{name} must be a floating point tensor, got {t.dtype}")
        if t.device != out_a.device:
            raise ValueError(f"{name} must be on out_a's device {out_a.device}, got {t.device}")
    if out_a.dim() not in (3, 4) or out_a.shape != out_b.shape:
        raise ValueError(
            "out_a and out_b must have one shape, (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads, "
            f"head_dim_v); got {tuple(out_a.shape)} and {tuple(out_b.shape)}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tuple(lse.shape) != lse_shape(out_a):
            raise ValueError(f"{name} must have shape {lse_shape(out_a)} to go with out_a, got {tuple(lse.shape)}")
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -math.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = weight_a + weight_b
    nothing = total == 0
    total = total.masked_fill(nothing, 1.0)
    lse = (top + torch.log(total)).masked_fill(nothing, -math.inf)
    parts = []
    for out, weight in ((out_a, weight_a), (out_b, weight_b)):
        share = (weight / total).transpose(-1, -2)[..., None]
        parts.append(share * out.masked_fill(share == 0, 0.0))  # not 0 * NaN where there were no keys
    return (parts[0] + parts[1]).to(out_a.dtype), lse


# ---- one way for every call ------------------------------------------------------------------------------------------


def attend(call: tuple, return_lse: bool, float8: Float8Options | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """out, or (out, lse). ``call``: ``Arguments``, as a plain tuple: to name them would cost every call time."""
    if float8 is None and not torch.compiler.is_dynamo_compiling():
        result = _C.eager(call, return_lse, chosen_path.get())
        if type(result) is not bytes:
            return result
        out, lse = _attend_by_plan(result, Arguments(*call))
    else:
        out, lse = _attend_slowly(Arguments(*call), float8)
    return (out, lse) if return_lse else out


def _attend_by_plan(key: bytes, call: Arguments) -> tuple[Tensor, Tensor]:
    """A call that C++ does not know: it is new, or needs more than kernels. ``key`` is b"" where torch's dispatcher or
    the checks have to see it."""
    q, k, v = call.main
    if not key or is_float8(q, k, v):
        return _attend_slowly(call, None)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan(q, k, v, *check_call(call, current_path()))
        remember(_plans, key, plan)
    extras = canonical(q, call.extras, plan.scalars.dropout_p) if plan.has_extras else NO_EXTRAS
    with_gradient = bool(key[-1])
    run = plan.attend if with_gradient else plan.run  # the kernels are prepared
    if plan.in_one_step(with_gradient) and all(a is b for a, b in zip(extras, (*call.extras, None), strict=True)):
        _C.remember(key, plan.kernels)
    return run(q, k, v, extras)


def _attend_slowly(call: Arguments, float8: Float8Options | None) -> tuple[Tensor, Tensor]:
    """Through the dispatcher: compiled, traced, autocast and float8 calls, subclasses of tensors, modes, transforms."""
    if not torch.compiler.is_compiling() and any(_has_tangent(x) for x in (*call.main, *call.extras)):
        raise NotImplementedError("forward-mode differentiation is not supported: there is no rule for tangents")
    before = call.main
    q, k, v = cast_for_autocast(autocast_dtype(call.q), *before)
    call = Arguments(q, k, v, *call[3:])
    if any(a is not b for a, b in zip(before, call.main, strict=True)) and not torch.compiler.is_compiling():
        return attend(call, True, float8)  # now that autocast leaves them alone
    if is_float8(q, k, v):
        return attend_float8(call, float8)
    if float8 is not None:
        refuse_options(float8, q)
    extras, scalars = check_call(call, current_path())
    return fwd_operator()(q, k, v, *canonical(q, extras, scalars.dropout_p), *scalars)


def _has_tangent(x: Tensor | None) -> bool:
    return isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None
