"""The path "reference": plain attention (``reference``) behind the interface of the kernels, gradients by autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import reference
from .call import Extras


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, **options) -> tuple[Tensor, Tensor]:
    """(out, lse), computed in float32 at least, whatever the dtype and autocast. ``options``: the numbers of
    ``reference.attention``."""
    with torch.autocast(q.device.type, enabled=False):
        out, lse = reference.attention(*(reference.wide(t) for t in (q, k, v)), **extras._asdict(), **options)
    return out.to(q.dtype).contiguous(), lse.contiguous()


def backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    want_dbias: bool,
    want_dsinks: bool,
    **options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsinks; the last two None where not wanted."""
    with _autograd_on(), torch.autocast(q.device.type, enabled=False):
        wide = [reference.wide(t.detach()).requires_grad_() for t in (q, k, v)]
        bias, sinks = extras.attn_bias, extras.sinks
        bias = reference.wide(bias.detach()).requires_grad_() if want_dbias else bias
        sinks = sinks.detach().requires_grad_() if want_dsinks else sinks
        results = reference.attention(*wide, **extras._replace(attn_bias=bias, sinks=sinks)._asdict(), **options)
    grads = [None if g is None else g.to(r.dtype) for g, r in zip((dout, dlse), results, strict=True)]
    outputs = [r for r, g in zip(results, grads, strict=True) if g is not None]
    inputs = wide + [bias] * want_dbias + [sinks] * want_dsinks
    grads = [g for g in grads if g is not None]
    with torch.autocast(q.device.type, enabled=False):
        grads = torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)
    dq, dk, dv = (g.to(t.dtype).contiguous() for g, t in zip(grads[:3], (q, k, v), strict=True))
    dbias = grads[3].to(extras.attn_bias.dtype) if want_dbias else None
    return dq, dk, dv, dbias, grads[-1] if want_dsinks else None


@contextmanager
def _autograd_on() -> Iterator[None]:
    """Record gradients, also below the dispatcher's autograd layer, where operators run."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    key = torch._C.DispatchKey
    for layer in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        exclude = exclude.remove(layer)
    with torch._C._ForceDispatchKeyGuard(include.add(key.ADInplaceOrView), exclude), torch.enable_grad():
        yield
