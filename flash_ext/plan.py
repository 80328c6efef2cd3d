"""How a call reaches a kernel.

A ``Plan`` is everything about a call that its tensors' contents cannot change: path, kernel row, shapes of the
results. What C++ can do alone it does in one step (``_C.Kernels``): allocate, launch, record the gradient. The rest
(gradients of bias and sinks, copies of odd strides, the reference path) goes through ``autograd.Attention``.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from . import jit, reference_path
from .autograd import attend
from .call import DTYPES, FLOAT8, Extras, Scalars, check_lengths
from .dispatch import Call, Choice, DType, Layout, Pass, Variant, choose, mask_of, normalise_window
from .extension import _C, capability, table

NO_EXTRAS = Extras()


class Plan:
    """Everything about a call that its tensors' contents cannot change."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars):
        s = self.scalars = scalars
        self.packed = extras.cu_seqlens_q is not None
        self.checks_lengths = self.packed and (not q.is_cuda or os.environ.get("FLASH_EXT_CHECK_LENGTHS") == "1")
        self.has_bias, self.has_sinks = extras.attn_bias is not None, extras.sinks is not None
        self.has_extras = s.dropout_p != 0 or any(extra is not None for extra in extras)
        seqlen_q = s.max_seqlen_q if self.packed else q.shape[1]
        seqlen_k = s.max_seqlen_k if self.packed else k.shape[1]
        self.window = normalise_window(s.causal, (s.window_left, s.window_right), seqlen_q, seqlen_k)
        self.device = q.device
        self.device_index = q.device.index if q.is_cuda else 0
        self.head_dim_v = v.shape[-1]
        self.no_queries = math.prod(q.shape[:-1]) == 0 or seqlen_q == 0
        self.no_keys = math.prod(k.shape[:-1]) == 0 or seqlen_k == 0

        # The Hopper copy engine wants multiples of 16 bytes: rows must have them, strides get them by a copy.
        fits = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (q, v))
        adds = extras.alibi_slopes is not None or extras.attn_bias is not None
        changes = adds or s.softcap != 0 or s.dropout_p != 0 or not s.softmax_scale > 0  # AttnParams::changes_scores()
        self.call = Call(
            Pass.FWD,
            DType.E4M3 if q.dtype == FLOAT8 else DTYPES.get(q.dtype),
            q.shape[-1],
            v.shape[-1],
            mask_of(*self.window),
            Layout.PACKED if self.packed else Layout.DENSE,
            Variant.GENERAL if changes else Variant.PLAIN,
            extras.sinks is not None,
            fits,
            capability(self.device_index) if q.is_cuda else None,
        )
        self.scattered = tuple(not _C.has_rows(t) for t in (q, k, v))
        self.misaligned = tuple(not _C.is_aligned(t) for t in (q, k, v))
        self.kernels = _C.Kernels()
        self.kernels.scalars = self._scalars()

    def _choose(self, pass_: Pass, path: str) -> Choice:
        call = self.call._replace(pass_=pass_)
        choice = choose(call, table(), lambda row: jit.can_run(row, call.capability), _C.row_name, path or None)
        if choice.row >= 0 and not jit.is_ready(choice.row, call.capability):
            return replace(choice, reason=f"{choice.reason}; not in this build, compiled on first use")
        return choice

    @cached_property
    def fwd(self) -> Choice:
        return self._choose(Pass.FWD, self.scalars.path)

    @cached_property
    def bwd(self) -> Choice:
        return self._choose(Pass.BWD, self.scalars.path)

    @cached_property
    def dbias(self) -> Choice:
        return self._choose(Pass.DBIAS, "")  # whatever the path of dq, dk and dv: it needs only delta

    def _row(self, choice: Choice) -> int:
        if choice.row >= 0:
            jit.prepare(choice.row, self.device_index)  # compiles what this build lacks
        return choice.row

    @cached_property
    def fwd_kernels(self) -> _C.Kernels:
        self.kernels.fwd_row = self._row(self.fwd)
        return self.kernels

    @cached_property
    def kernels_of_both(self) -> _C.Kernels:
        self.kernels.fwd_row, self.kernels.bwd_row = self._row(self.fwd), self._row(self.bwd)
        return self.kernels

    @cached_property
    def bwd_kernels(self) -> _C.Kernels:
        self.kernels.bwd_row = self._row(self.bwd)
        return self.kernels

    @cached_property
    def dbias_kernels(self) -> _C.Kernels:
        self.kernels.dbias_row = self._row(self.dbias)
        return self.bwd_kernels

    def in_one_step(self, with_gradient: bool) -> bool:
        """Whether C++ alone serves such calls, once their extras are canonical. Raises where no kernel does."""
        choices = [self.fwd, self.bwd] if with_gradient else [self.fwd]
        if with_gradient and (self.has_bias or self.has_sinks):
            return False
        more = self.checks_lengths or self.no_queries or self.no_keys or any(map(self._copies, choices))
        return not more and all(choice.path != "reference" for choice in choices)

    @cached_property
    def run(self):
        """(q, k, v, extras) -> (out, lse), recording no gradient."""
        return self.fwd_kernels.forward if self.in_one_step(False) else self.forward

    @cached_property
    def attend(self):
        """(q, k, v, extras) -> (out, lse), recording the gradient. A path that cannot go backward says so now."""
        return self.kernels_of_both.attend if self.in_one_step(True) else partial(attend, self)

    def _copies(self, choice: Choice) -> tuple[bool, ...]:
        """Which of q, k and v this choice needs as copies; () for none."""
        copies = () if choice.path == "reference" else self.scattered
        if choice.path == "sm90":
            copies = tuple(a or b for a, b in zip(self.scattered, self.misaligned, strict=True))
        return copies if any(copies) else ()

    @cached_property
    def fwd_copies(self) -> tuple[bool, ...]:
        return self._copies(self.fwd)

    @cached_property
    def bwd_copies(self) -> tuple[bool, ...]:
        return self._copies(self.bwd)

    def _scalars(self) -> _C.Scalars:
        result, s = _C.Scalars(), self.scalars
        result.max_seqlen_q, result.max_seqlen_k = s.max_seqlen_q, s.max_seqlen_k
        result.softmax_scale, result.softcap, result.dropout_p = s.softmax_scale, s.softcap, s.dropout_p
        result.window_left, result.window_right = self.window
        result.deterministic = s.deterministic
        return result

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """(out, lse), whatever the call needs besides a kernel; ``extras`` are canonical."""
        if self.checks_lengths:
            check_lengths(extras, q.shape[0], k.shape[0], self.scalars.max_seqlen_q, self.scalars.max_seqlen_k)
        if self.no_queries or self.no_keys:
            return self._without_keys(*_C.empty_results(q, self.head_dim_v, q.dtype), extras)
        if self.fwd.path == "reference":
            return reference_path.forward(q, k, v, extras, **self._reference_options())
        if self.fwd_copies:
            q, k, v = copied((q, k, v), self.fwd_copies)
        return self.fwd_kernels.forward(q, k, v, extras)

    def _without_keys(self, out: Tensor, lse: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        lse.fill_(-math.inf)
        if extras.sinks is not None:
            lse.copy_(extras.sinks[:, None])
            if self.packed:
                lse.masked_fill_(_belongs_to_none(lse, extras.cu_seqlens_q), -math.inf)
        return out.zero_(), lse

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        extras: Extras,
        want_dbias: bool,
        want_dsinks: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """dq, dk, dv, dbias, dsinks, shaped like q, k, v, attn_bias and sinks; the last two None where not wanted.

        ``dout`` is shaped like ``out``, ``dlse`` like ``lse``; None: zeros.
        """
        bias, sinks = extras.attn_bias, extras.sinks
        has_work = not (self.no_queries or self.no_keys)
        if has_work and self.bwd.path == "reference":
            options = self._reference_options()
            return reference_path.backward(dout, dlse, q, k, v, extras, want_dbias, want_dsinks, **options)
        dbias = torch.zeros(bias.shape, dtype=torch.float32, device=self.device) if want_dbias else None
        if has_work:
            if self.bwd_copies:
                q, k, v = copied((q, k, v), self.bwd_copies)
            kernels = self.dbias_kernels if want_dbias else self.bwd_kernels
            dq, dk, dv, delta = kernels.backward(dout, dlse, q, k, v, out, lse, extras, dbias)
        else:
            dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
            delta = torch.zeros_like(lse) if dlse is None else -dlse  # out is 0
        dsinks = _dsinks(sinks, lse, delta, extras.cu_seqlens_q) if want_dsinks else None
        return dq, dk, dv, None if dbias is None else dbias.to(bias.dtype), dsinks

    def _reference_options(self) -> dict:
        s = self.scalars
        return {
            "softmax_scale": s.softmax_scale,
            "window_size": self.window,
            "softcap": s.softcap,
            "dropout_p": s.dropout_p,
        }


def copied(tensors: tuple[Tensor, ...], copies: tuple[bool, ...]) -> list[Tensor]:
    """The same tensors, contiguous copies in place of those that ``copies`` marks."""
    contiguous = torch.contiguous_format
    return [t.clone(memory_format=contiguous) if copy else t for t, copy in zip(tensors, copies, strict=True)]


def _dsinks(sinks: Tensor, lse: Tensor, delta: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """A sink is a key with score ``sink`` and a zero value: its probability is exp(sink - lse), its dP is 0."""
    grad = -torch.exp(sinks[:, None] - lse) * delta  # (batch, num_heads, seqlen_q) or (num_heads, total_q)
    if cu_seqlens_q is not None:
        grad = grad.masked_fill(_belongs_to_none(lse, cu_seqlens_q), 0.0)
    grad = grad.where(lse != -math.inf, 0.0)  # sink and every score -inf
    return grad.sum((0, 2) if lse.dim() == 3 else 1)


def _belongs_to_none(lse: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """(total_q,): the rows past the last segment, which kernels neither read nor write."""
    return torch.arange(lse.shape[1], device=lse.device) >= cu_seqlens_q[-1]


_plans: dict[tuple, Plan] = {}


def plan_for(q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars, kind: type[Plan] = Plan) -> Plan:
    """The plan of such calls, made once. ``kind`` follows from q's dtype."""
    signature = _C.signature(q, k, v, *extras[:6])
    key = (signature[:-1], scalars)
    plan = _plans.get(key) if signature else None
    if plan is None:
        plan = kind(q, k, v, extras, scalars)
        if signature:
            remember(_plans, key, plan)
    return plan


def remember(plans: dict, key: tuple, plan: Plan) -> None:
    if len(plans) >= 4096:  # a training run with ever new lengths must not grow without bound
        plans.clear()
    plans[key] = plan
