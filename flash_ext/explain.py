"""Which path and kernel a call would run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .call import Arguments, check_call, is_float8
from .dispatch import Choice
from .extension import current_path
from .float8 import Float8Options, Float8Plan, check_options, refuse_gradients, refuse_options, wants_gradient
from .ops import autocast_dtype, cast_for_autocast
from .plan import Plan


@dataclass(frozen=True)
class Explanation:
    """What would serve a call; ``print`` it. ``forward`` and ``backward`` hold path, kernel row and reasons."""

    forward: Choice
    backward: Choice | str  # str: why there is none
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.forward.path

    @property
    def kernel(self) -> str:
        return self.forward.kernel

    @property
    def reason(self) -> str:
        return self.forward.reason

    def __str__(self) -> str:
        lines = []
        for name, choice in (("forward", self.forward), ("backward", self.backward)):
            if isinstance(choice, str):
                lines.append(f"{name}: none ({choice})")
                continue
            lines.append(f"{name}: path {choice.path}, kernel '{choice.kernel}' ({choice.reason})")
            lines += [f"  not {path}: {why}" for path, why in choice.passed_over]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _empty(t: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(t, dtype=dtype)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_k: Tensor | None = None,
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
) -> Explanation:
    """Which path and kernel ``forward`` (or, given ``cu_seqlens``, ``flash_attn_varlen_func``) would run, and why not a
    faster one. Takes the arguments of the call; launches nothing.

    Raises:
        TypeError, ValueError, NotImplementedError: what the call would raise, but for the contents of ``cu_seqlens``.
    """
    rest = (
        cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, attn_bias, sinks,
        causal, softmax_scale, window_size, softcap, dropout_p, deterministic, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    if isinstance(q, Tensor) and q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"there are kernels for CPU and CUDA tensors; q is on device {q.device}")
    if cu_seqlens_q is None and not (cu_seqlens_k is None and seqused_k is None):
        raise TypeError("cu_seqlens_q must be an int32 tensor where cu_seqlens_k or seqused_k is given, got None")
    float8 = Float8Options(q_descale, k_descale, v_descale, out_dtype)
    notes = []
    if is_float8(q, k, v):
        refuse_gradients(q, k, v)
        extras, scalars = check_call(Arguments(q, k, v, *rest), current_path())
        check_options(float8, q, k, extras)
        plan = Float8Plan(q, k, v, extras, scalars)
        why = "an extra argument wants a gradient" if wants_gradient(extras) else plan.why_not
        if not why:
            return Explanation(plan.fwd, "float8 inputs take no gradients", tuple(_notes(plan, None, None)))
        notes.append(f"float8 inputs are converted to bfloat16, whose kernels run: {why}")
        q, k, v = (_empty(t, torch.bfloat16) for t in (q, k, v))
    else:
        refuse_options(float8, q)
        q, k, v = cast_for_autocast(autocast_dtype(q), q, k, v, cast=_empty)
    plan = Plan(q, k, v, *check_call(Arguments(q, k, v, *rest), current_path()))
    try:
        backward = plan.bwd
    except NotImplementedError as error:
        backward = str(error)
    return Explanation(plan.fwd, backward, (*notes, *_notes(plan, backward, attn_bias)))


def _notes(plan: Plan, backward: Choice | str | None, attn_bias: Tensor | None) -> list[str]:
    """What happens besides the kernels that were chosen."""
    if plan.no_queries or plan.no_keys:
        return [f"no kernel runs: there are no {'queries' if plan.no_queries else 'keys'}"]
    goes_back = isinstance(backward, Choice)
    fwd_copies, bwd_copies = plan.fwd_copies, plan.bwd_copies if goes_back else ()
    notes = []
    for i, name in enumerate("qkv"):
        of_fwd, of_bwd = bool(fwd_copies) and fwd_copies[i], bool(bwd_copies) and bwd_copies[i]
        if of_fwd or of_bwd:
            why = "strides are not multiples of 16 bytes, or 0 along the sequence"
            why = "last dimension is not contiguous" if plan.scattered[i] else why
            when = "" if of_fwd else " for the backward pass"
            notes.append(f"{name} is copied{when}: its {why}")
    if goes_back and backward.row >= 0 and attn_bias is not None and attn_bias.requires_grad:
        notes.append(f"the gradient of attn_bias is {_dbias(plan, backward)}")
    return notes


def _dbias(plan: Plan, backward: Choice) -> str:
    apart = f"computed in a pass of its own, by path {plan.dbias.path}, kernel '{plan.dbias.kernel}'"
    if backward.path != "sm90" or plan.scalars.deterministic or plan.scalars.softcap:
        return apart
    return f"added up by the backward kernel; if attn_bias has one row or one column, {apart}"
