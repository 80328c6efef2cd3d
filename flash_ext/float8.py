"""float8 (e4m3) inputs: their scales, how to make them, and which way a call with them takes.

Hopper has a kernel for them. Elsewhere, and with a bias, ALiBi or dropout, q, k and v are converted to bfloat16: exact
without scales, else rounded once, far below the quantisation's own error. There is no backward pass.

Source: Shah et al., "FlashAttention-3", 2024, section 3.3 (block quantisation, incoherent processing).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .call import (
    FLOAT8,
    SCHEMA_OF_EXTRAS,
    SCHEMA_OF_SCALARS,
    Arguments,
    Extras,
    Scalars,
    canonical,
    check_call,
    check_kind,
    check_lengths,
    check_starts,
    lse_shape,
)
from .extension import _C, current_path
from .numeric import flag, integer
from .plan import Plan, copied, plan_for

_LARGEST = 448.0  # e4m3
_NAMES = ("q_descale", "k_descale", "v_descale")


class Float8Options(NamedTuple):
    """What a call with float8 inputs has besides other calls' arguments."""

    q_descale: Tensor | None = None  # broadcastable to (batch, num_heads_kv) fp32, as are the next two
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    out_dtype: torch.dtype | None = None  # None: bfloat16


def quantize_fp8(
    x: Tensor,
    *,
    num_heads_kv: int | None = None,
    cu_seqlens: Tensor | None = None,
    hadamard: bool = False,
) -> tuple[Tensor, Tensor]:
    """``x`` in float8_e4m3fn with one scale per sequence and key head: (x8, descale), x ~ x8 * descale.

    Args:
        x: (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim) with ``cu_seqlens``.
        num_heads_kv: for q with grouped heads: heads of k, whose groups of q heads share a scale; None: num_heads.
        cu_seqlens: (batch + 1,) int32: where each packed sequence begins. Rows past the last entry count for no scale.
        hadamard: multiply x with a fixed orthogonal matrix first (random signs, then a Hadamard matrix, in blocks of
            the largest power of two that divides head_dim). Done to both q and k it changes no score, and spreads
            outliers of single columns over all of them, where they cost the others less accuracy. Not for v.

    Returns:
        x8 of x's shape, and descale (batch, num_heads_kv) float32, as ``forward`` takes them; neither is differentiable.

    Raises:
        TypeError, ValueError: an argument that cannot be served.
    """
    check_kind("x", x)
    if not x.is_floating_point():
        raise TypeError(f"x must be a floating point tensor, got {x.dtype}")
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(
            "x must have shape (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim) with "
            f"cu_seqlens; got {tuple(x.shape)}"
        )
    num_heads = x.shape[-2]
    num_heads_kv = num_heads if num_heads_kv is None else integer("num_heads_kv", num_heads_kv)
    if num_heads_kv < 1 or num_heads % num_heads_kv:
        raise ValueError(f"num_heads_kv must be an int that divides x's {num_heads} heads, got {num_heads_kv!r}")
    if x.shape[-1] == 0:
        raise ValueError(f"x must have a head_dim of at least 1, got shape {tuple(x.shape)}")
    if cu_seqlens is not None:
        check_starts("cu_seqlens", cu_seqlens, "x", x)
    x = x.detach().float()
    if flag("hadamard", hadamard):
        x = _rotated(x)
    groups = x.unflatten(-2, (num_heads_kv, -1))  # (..., rows, num_heads_kv, group, head_dim)
    largest = groups.abs().amax((-2, -1)) if x.numel() else groups.new_zeros(groups.shape[:-2])
    if cu_seqlens is None:
        descale = largest.amax(1) if x.shape[1] else largest.new_zeros(x.shape[0], num_heads_kv)
    else:
        segment = _segment_of_rows(x.shape[0], cu_seqlens)[:, None].expand(-1, num_heads_kv)
        descale = largest.new_zeros(cu_seqlens.numel(), num_heads_kv)  # the last: of rows that belong to none
        descale = descale.scatter_reduce(0, segment, largest, "amax")[:-1]
    # Not below what float32 holds with all its bits, so that nothing is divided by a rounded scale, or by 0.
    descale = (descale / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny).where(descale > 0, 1.0)
    return (groups / _of_rows(descale, x, cu_seqlens)[..., None, None]).flatten(-3, -2).to(FLOAT8), descale


def _rotated(x: Tensor) -> Tensor:
    """x times a fixed orthogonal matrix: signs, then Hadamard matrices of order 2**n on the diagonal."""
    head_dim = x.shape[-1]
    bits = torch.arange(1, head_dim + 1, device=x.device) * 0x9E3779B1  # a hash: compilers and vmap refuse generators
    bits = ((bits ^ (bits >> 15)) & 0x7FFFFFFF) * 0x85EBCA77
    x = x * ((bits >> 28 & 1) * 2 - 1)
    order, step = head_dim & -head_dim, 1
    while step < order:
        pairs = x.unflatten(-1, (-1, 2, step))
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return x * order**-0.5


def _segment_of_rows(total: int, cu_seqlens: Tensor) -> Tensor:
    """(total,): the packed sequence that a row belongs to; batch for rows past the last one."""
    rows = torch.arange(total, device=cu_seqlens.device, dtype=torch.int32)
    return torch.bucketize(rows, cu_seqlens[1:].contiguous(), right=True)


def _of_rows(descale: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """descale (batch, heads) for every row of x: (batch, 1, heads) or (total, heads)."""
    if cu_seqlens is None:
        return descale[:, None]
    of_none = descale.new_ones(1, descale.shape[1])
    return torch.cat([descale, of_none])[_segment_of_rows(x.shape[0], cu_seqlens)]


def dequantize(tensors: Sequence[Tensor], descales: Sequence[Tensor | None], extras: Extras) -> list[Tensor]:
    """q, k and v in bfloat16; ``descales`` (batch, num_heads_kv) float32 or None, as ``check_options`` gives them."""
    starts = (extras.cu_seqlens_q, extras.cu_seqlens_k, extras.cu_seqlens_k)
    return [_dequantize(*row) for row in zip(tensors, descales, starts, strict=True)]


def _dequantize(t: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    if descale is None:
        return t.to(torch.bfloat16)
    descale = descale.repeat_interleave(t.shape[-2] // descale.shape[1], dim=1)  # (batch, heads of t)
    return (t.float() * _of_rows(descale, t, cu_seqlens)[..., None]).to(torch.bfloat16)


def wants_gradient(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refuse_gradients(q: Tensor, k: Tensor, v: Tensor) -> None:
    if wants_gradient((q, k, v)):
        raise ValueError("q, k and v in float8 must not require a gradient: there is no float8 backward")


def refuse_options(options: Float8Options, q: Tensor) -> None:
    """Of a call that is not in float8."""
    named = ", ".join(name for name, x in options._asdict().items() if x is not None)
    if named and isinstance(q, Tensor):
        raise ValueError(f"{named} must be given with float8_e4m3fn q, k and v only; q is {q.dtype}")


def check_options(
    options: Float8Options, q: Tensor, k: Tensor, extras: Extras
) -> tuple[list[Tensor | None], torch.dtype]:
    """The scales as (batch, num_heads_kv), and the dtype of the result; an error names those that are not right."""
    out_dtype = options.out_dtype or torch.bfloat16
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"out_dtype must be torch.bfloat16 or torch.float16, got {out_dtype}")
    batch = q.shape[0] if extras.cu_seqlens_q is None else extras.cu_seqlens_q.numel() - 1
    shape = (batch, k.shape[-2])
    result = []
    for name, descale in zip(_NAMES, options[:3], strict=True):
        if descale is not None:
            check_kind(name, descale)
            if descale.dtype != torch.float32:
                raise TypeError(f"{name} must be a float32 tensor, got {descale.dtype}")
            if descale.device != q.device:
                raise ValueError(f"{name} must be on q's device {q.device}, got {descale.device}")
            try:
                descale = descale.detach().expand(shape)
            except RuntimeError:
                raise ValueError(f"{name} must be broadcastable to {shape}, got {tuple(descale.shape)}") from None
        result.append(descale)
    return result, out_dtype


class Float8Plan(Plan):
    """The plan of a call with float8 inputs; ``why_not`` says why no float8 kernel serves it, if none does."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars):
        super().__init__(q, k, v, extras, scalars)
        given = {
            "attn_bias": extras.attn_bias is not None,
            "ALiBi": extras.alibi_slopes is not None,
            "dropout": scalars.dropout_p != 0,
        }
        self.unserved = [name for name, has in given.items() if has]

    @cached_property
    def why_not(self) -> str:
        if self.unserved:
            return f"there is no float8 kernel with {self.unserved[0]}"
        try:
            choice = self.fwd
        except NotImplementedError as error:
            return str(error)
        return "" if choice.row >= 0 else f"path {choice.path} has no float8 kernel"

    def forward8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: Extras,
        descales: Sequence[Tensor | None],
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) by the float8 kernel; ``descales`` as ``check_options`` gives them."""
        if self.checks_lengths:
            check_lengths(extras, q.shape[0], k.shape[0], self.scalars.max_seqlen_q, self.scalars.max_seqlen_k)
        if self.no_queries or self.no_keys:
            return self._without_keys(*_C.empty_results(q, self.head_dim_v, out_dtype), extras)
        if self.fwd_copies:
            q, k, v = copied((q, k, v), self.fwd_copies)
        return self.fwd_kernels.forward8(q, k, v, extras, descales, out_dtype)


def attend(call: Arguments, options: Float8Options | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call whose q, k and v are float8, not checked yet."""
    q, k, v = call.main
    options = options or Float8Options()
    refuse_gradients(q, k, v)
    checked, scalars = check_call(call, current_path())
    descales, out_dtype = check_options(options, q, k, checked)
    extras = canonical(q, checked, scalars.dropout_p)
    if wants_gradient(extras):
        out, lse = torch.ops.flash_ext.fwd(*dequantize((q, k, v), descales, extras), *extras, *scalars)
        return out.to(out_dtype), lse
    if torch.compiler.is_compiling() or not _C.signature(q, k, v, *extras[:6]):
        return torch.ops.flash_ext.fwd_float8(q, k, v, *extras, *descales, *scalars, out_dtype)
    return _run(q, k, v, extras, descales, scalars, out_dtype)


def _run(q, k, v, extras: Extras, descales, scalars: Scalars, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    plan = plan_for(q, k, v, extras, scalars, Float8Plan)
    if not plan.why_not:
        return plan.forward8(q, k, v, extras, descales, out_dtype)
    q, k, v = dequantize((q, k, v), descales, extras)
    out, lse = plan_for(q, k, v, extras, scalars).forward(q, k, v, extras)
    return out.to(out_dtype), lse


# The operator, for compiled and otherwise intercepted calls. Not differentiable.
_N = len(Extras._fields)
_DESCALES = ", ".join(f"Tensor? {name}" for name in _NAMES)
torch.library.define(
    "flash_ext::fwd_float8",
    f"(Tensor q, Tensor k, Tensor v, {SCHEMA_OF_EXTRAS}, {_DESCALES}, {SCHEMA_OF_SCALARS}, ScalarType out_dtype) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("flash_ext::fwd_float8", ("cpu", "cuda"))
def _fwd_float8(q, k, v, *rest):
    extras, descales = Extras(*rest[:_N]), rest[_N : _N + 3]
    return _run(q, k, v, extras, descales, Scalars(*rest[_N + 3 : -1]), rest[-1])


@torch.library.register_fake("flash_ext::fwd_float8")
def _fwd_float8_fake(q, k, v, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=rest[-1])
    return out, q.new_empty(lse_shape(q), dtype=torch.float32)
