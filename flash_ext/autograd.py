"""The gradient of eager calls that C++ does not serve alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .call import Extras
from .extension import _C

if TYPE_CHECKING:
    from .plan import Plan


class Attention(torch.autograd.Function):
    """(plan, q, k, v, *extras) -> (out, lse)."""

    @staticmethod
    def forward(ctx, plan: Plan, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None):
        out, lse = plan.forward(q, k, v, Extras._make(extras))
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *extras)
        return out, lse

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        _, need_q, need_k, need_v, *need_extras = ctx.needs_input_grad
        need = Extras(*need_extras)
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *extras = ctx.saved_tensors
        with torch.no_grad():
            dq, dk, dv, dbias, dsinks = ctx.plan.backward(
                dout, dlse, q, k, v, out, lse, Extras(*extras), need.attn_bias, need.sinks
            )
        grads = (None, dq if need_q else None, dk if need_k else None, dv if need_v else None)
        grads += Extras(attn_bias=dbias, sinks=dsinks)
        return _once_only(grads) if torch.is_grad_enabled() else grads


def attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    return Attention.apply(plan, q, k, v, *extras)


def _once_only(grads: tuple) -> tuple:
    """The same gradients, of which no further gradient can be taken: an error instead of silent zeros."""
    refuse = torch._C._functions.DelayedError(_C.TWICE, len(grads))
    return refuse(*(None if g is None else g.requires_grad_() for g in grads))
