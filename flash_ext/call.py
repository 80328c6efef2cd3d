"""A call in canonical form, and the checks that lead there.

Every message names the argument, says what it was and what is supported.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import DType
from .numeric import flag, length, number, window

DTYPES = {torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
FLOAT8 = torch.float8_e4m3fn
_TOO_LONG = 2**30  # rows and window bounds are added in 32 bits
_SOFTCAPS = (1e-30, 1e30)  # kernels divide by softcap: what lies beyond would overflow
_DENSE = ("(batch, seqlen_q, num_heads, head_dim)", "(batch, seqlen_k, num_heads_kv, head_dim)")
_PACKED = ("(total_q, num_heads, head_dim)", "(total_k, num_heads_kv, head_dim)")


class Extras(NamedTuple):
    """The tensors of a call besides q, k and v, in canonical form."""

    cu_seqlens_q: Tensor | None = None  # (batch + 1) int32, contiguous
    cu_seqlens_k: Tensor | None = None  # (batch + 1) int32, contiguous
    seqused_k: Tensor | None = None  # (batch) int32, contiguous
    alibi_slopes: Tensor | None = None  # (num_heads) or (batch, num_heads) fp32, last dimension contiguous
    attn_bias: Tensor | None = None  # (batch | 1, num_heads | 1, seqlen_q | 1, seqlen_k | 1), fp32 or q's dtype
    sinks: Tensor | None = None  # (num_heads) fp32, contiguous
    rng_state: Tensor | None = None  # (2) int64: seed and offset of the dropout


class Arguments(NamedTuple):
    """A call as the user wrote it. ``_C.eager`` takes any tuple in this order (csrc/binding_eager.h)."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    alibi_slopes: Tensor | None
    attn_bias: Tensor | None
    sinks: Tensor | None
    causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    dropout_p: float
    deterministic: bool
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def main(self) -> tuple[Tensor, Tensor, Tensor]:
        return self[:3]

    @property
    def extras(self) -> tuple[Tensor | None, ...]:
        """In the order of ``Extras``."""
        return self[3:9]


class Scalars(NamedTuple):
    """The numbers of a call. Window bounds are as the user gave them, cut to 32 bits."""

    causal: bool
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    deterministic: bool
    max_seqlen_q: int  # 0 in dense calls
    max_seqlen_k: int
    path: str  # "": choose


# Both as operators take them: flat, in the order of the classes.
SCHEMA_OF_EXTRAS = ", ".join(f"Tensor? {name}" for name in Extras._fields)
SCHEMA_OF_SCALARS = (
    "bool causal, float softmax_scale, SymInt window_left, SymInt window_right, float softcap, float dropout_p, "
    "bool deterministic, SymInt max_seqlen_q, SymInt max_seqlen_k, str path"
)


def check_call(call: Arguments, path: str) -> tuple[Extras, Scalars]:
    """The call as operators take it, its extras not yet canonical; raises where an argument cannot be served."""
    q, k, v = call.main
    extras = Extras(*call.extras)
    causal = flag("causal", call.causal)
    deterministic = flag("deterministic", call.deterministic) or torch.are_deterministic_algorithms_enabled()
    max_seqlen_q, max_seqlen_k = call.max_seqlen_q, call.max_seqlen_k
    packed = extras.cu_seqlens_q is not None
    _check_tensors(q, k, v, packed, path)
    batch = q.shape[0]
    if packed:
        batch = _check_segments(q, extras)
        max_seqlen_q = length("max_seqlen_q", max_seqlen_q)
        max_seqlen_k = length("max_seqlen_k", max_seqlen_k)
    seqlen_q, seqlen_k = (max_seqlen_q, max_seqlen_k) if packed else (q.shape[1], k.shape[1])
    _check_features(q, extras, batch, seqlen_q, seqlen_k)

    scale = q.shape[-1] ** -0.5 if call.softmax_scale is None else number("softmax_scale", call.softmax_scale)
    softcap, dropout_p = number("softcap", call.softcap), number("dropout_p", call.dropout_p)
    if softcap != 0 and not _SOFTCAPS[0] <= softcap <= _SOFTCAPS[1]:
        raise ValueError(f"softcap must be 0 for none, or lie between {_SOFTCAPS[0]} and {_SOFTCAPS[1]}; got {softcap}")
    if not 0 <= dropout_p <= 1 - 2**-24:
        raise ValueError(f"dropout_p must be in [0, 1) as a float32, got {dropout_p}")
    left, right = window(call.window_size)
    scalars = Scalars(causal, scale, left, right, softcap, dropout_p, deterministic, max_seqlen_q, max_seqlen_k, path)
    return extras, scalars


def check_kind(name: str, t: Tensor) -> None:
    """That ``t`` is a tensor with elements in memory at strides."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.is_nested:
        raise TypeError(f"{name} must not be nested; flash_attn_varlen_func takes sequences packed into one tensor")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {t.layout}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, packed: bool, path: str) -> None:
    shape_q, shape_k = _PACKED if packed else _DENSE
    for name, t, wanted in (("q", q, shape_q), ("k", k, shape_k), ("v", v, shape_k + "_v")):
        check_kind(name, t)
        if t.dim() != (3 if packed else 4):
            raise ValueError(f"{name} must have shape {wanted.replace(')_v', '_v)')}, got {tuple(t.shape)}")
    if q.dtype not in (*DTYPES, FLOAT8) and not (path == "reference" and q.dtype == torch.float64):
        more = "; use_path('reference') takes float64" if q.dtype == torch.float64 else ""
        raise TypeError(f"q must be float32, float16, bfloat16 or float8_e4m3fn, got {q.dtype}{more}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {t.dtype}")
        if t.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {t.device}")
    head_dim, num_heads, num_heads_kv = q.shape[-1], q.shape[-2], k.shape[-2]
    if k.shape[-1] != head_dim:
        raise ValueError(f"k must have q's head_dim {head_dim}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have k's shape {tuple(k.shape)} but for head_dim_v, got {tuple(v.shape)}")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's batch {q.shape[0]}, got {k.shape[0]}")
    if head_dim == 0 or v.shape[-1] == 0:
        raise ValueError(f"head_dim of q and v must be at least 1, got {head_dim} and {v.shape[-1]}")
    if num_heads == 0 or num_heads_kv == 0 or num_heads % num_heads_kv:
        raise ValueError(
            f"q's num_heads must be a positive multiple of k's num_heads_kv, got {num_heads} and {num_heads_kv}"
        )
    for name, t in (("q", q), ("k", k), ("v", v)):
        if any(size >= _TOO_LONG for size in t.shape):
            raise ValueError(f"{name} must have sizes below 2**30, got {tuple(t.shape)}")


def check_starts(name: str, t: Tensor, of: str, rows: Tensor) -> int:
    """The batch that starts (batch + 1,) of packed sequences tell. ``of``: the name of what lies packed, ``rows``."""
    _check_int32(name, t, of, rows)
    if t.dim() != 1 or t.numel() == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(t.shape)}")
    return t.numel() - 1


def _check_int32(name: str, t: Tensor, of: str, rows: Tensor) -> None:
    check_kind(name, t)
    if t.dtype != torch.int32:
        raise TypeError(f"{name} must be an int32 tensor, got {t.dtype}")
    if t.device != rows.device:
        raise ValueError(f"{name} must be on {of}'s device {rows.device}, got {t.device}")


def _check_segments(q: Tensor, extras: Extras) -> int:
    batch = check_starts("cu_seqlens_q", extras.cu_seqlens_q, "q", q)
    if check_starts("cu_seqlens_k", extras.cu_seqlens_k, "q", q) != batch:
        raise ValueError(
            f"cu_seqlens_k must have cu_seqlens_q's shape ({batch + 1},), got {tuple(extras.cu_seqlens_k.shape)}"
        )
    if extras.seqused_k is not None:
        _check_int32("seqused_k", extras.seqused_k, "q", q)
        if tuple(extras.seqused_k.shape) != (batch,):
            raise ValueError(f"seqused_k must have shape ({batch},), got {tuple(extras.seqused_k.shape)}")
    return batch


def _check_features(q: Tensor, extras: Extras, batch: int, seqlen_q: int, seqlen_k: int) -> None:
    num_heads = q.shape[-2]
    for name in ("alibi_slopes", "attn_bias", "sinks"):
        t = getattr(extras, name)
        if t is None:
            continue
        check_kind(name, t)
        if t.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {t.device}")
        takes_float64 = name == "alibi_slopes" or q.dtype == torch.float64
        if t.dtype not in DTYPES and not (takes_float64 and t.dtype == torch.float64):
            wanted = "float64, float32, float16 or bfloat16" if takes_float64 else "float32, float16 or bfloat16"
            hint = "; write a mask as torch.where(mask, 0.0, -inf)" if t.dtype == torch.bool else ""
            raise TypeError(f"{name} must be {wanted}, got {t.dtype}{hint}")

    slopes, bias, sinks = extras.alibi_slopes, extras.attn_bias, extras.sinks
    if slopes is not None:
        if tuple(slopes.shape) not in ((num_heads,), (batch, num_heads)):
            raise ValueError(
                f"alibi_slopes must have shape ({num_heads},) or ({batch}, {num_heads}), got {tuple(slopes.shape)}"
            )
        if slopes.requires_grad:
            raise ValueError(
                "alibi_slopes must not require a gradient: it is not differentiable; pass alibi_slopes.detach()"
            )
    if bias is not None:
        full = (batch, num_heads, seqlen_q, seqlen_k)
        sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        if len(sizes) != 4 or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
            raise ValueError(f"attn_bias must be broadcastable to {full}, got {tuple(bias.shape)}")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        raise ValueError(f"sinks must have shape ({num_heads},), got {tuple(sinks.shape)}")


def check_lengths(extras: Extras, total_q: int, total_k: int, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """The contents of cu_seqlens and seqused_k. On a CUDA device this waits for the device."""
    for side, cu, total, longest in (
        ("q", extras.cu_seqlens_q, total_q, max_seqlen_q),
        ("k", extras.cu_seqlens_k, total_k, max_seqlen_k),
    ):
        starts = cu.tolist()
        lengths = [end - begin for begin, end in pairwise(starts)]
        if starts[0] != 0:
            raise ValueError(f"cu_seqlens_{side} must start at 0, got {starts[0]}")
        if min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens_{side} must not decrease, got {starts}")
        if starts[-1] > total:
            raise ValueError(f"cu_seqlens_{side} must end within the {total} rows of {side}, got {starts[-1]}")
        if max(lengths, default=0) > longest:
            raise ValueError(f"max_seqlen_{side} must be at least the longest segment {max(lengths)}, got {longest}")
    if extras.seqused_k is not None:
        used = extras.seqused_k.tolist()
        if any(not 0 <= n <= length for n, length in zip(used, lengths, strict=True)):
            raise ValueError(f"seqused_k must lie between 0 and the segments' lengths {lengths}, got {used}")


def canonical(q: Tensor, extras: Extras, dropout_p: float) -> Extras:
    """Checked extras as kernels take them, and random numbers for the dropout."""
    cu_q, cu_k, seqused_k, slopes, bias, sinks = extras[:6]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rng_state = None
    if cu_q is not None:
        cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
        seqused_k = None if seqused_k is None else seqused_k.contiguous()
    if slopes is not None:
        slopes = slopes.to(wide).contiguous()
    if bias is not None:
        bias = bias if bias.dtype in (wide, q.dtype) else bias.to(wide)
        bias = bias if bias.dim() == 4 else bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    if sinks is not None:
        sinks = sinks.to(wide).contiguous()
    if dropout_p:
        rng_state = new_rng_state(q.device)
    return Extras(cu_q, cu_k, seqused_k, slopes, bias, sinks, rng_state)


def new_rng_state(device: torch.device) -> Tensor:
    """Seed and offset of one call's dropout, from the device's generator: never waits, right under graph capture."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(batch, num_heads, seqlen_q), or (num_heads, total_q) if packed."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def is_float8(*tensors: Tensor) -> bool:
    return all(isinstance(t, Tensor) and t.dtype == FLOAT8 for t in tensors)
