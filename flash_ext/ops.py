"""The torch operators ``flash_ext::fwd`` and ``flash_ext::bwd``: for compiled, traced and otherwise intercepted calls.

Arguments arrive here checked and in canonical form (see ``call``); the operators are not a public interface.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .call import DTYPES, SCHEMA_OF_EXTRAS, SCHEMA_OF_SCALARS, Extras, Scalars, lse_shape
from .extension import _C
from .plan import plan_for

_REST = f"{SCHEMA_OF_EXTRAS}, {SCHEMA_OF_SCALARS}"
_FWD = f"(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor out, Tensor lse)"
_BWD = (
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_REST}, "
    "bool want_dbias, bool want_dsinks) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
torch.library.define("flash_ext::fwd", _FWD, tags=(torch.Tag.pt2_compliant_tag,))
torch.library.define("flash_ext::bwd", _BWD, tags=(torch.Tag.pt2_compliant_tag,))

_N = len(Extras._fields)


@torch.library.impl("flash_ext::fwd", ("cpu", "cuda"))
def _fwd(q, k, v, *rest):
    extras, scalars = Extras(*rest[:_N]), Scalars(*rest[_N:])
    return plan_for(q, k, v, extras, scalars).forward(q, k, v, extras)


@torch.library.register_fake("flash_ext::fwd")
def _fwd_fake(q, k, v, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(q), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


@torch.library.impl("flash_ext::bwd", ("cpu", "cuda"))
def _bwd(dout, dlse, q, k, v, out, lse, *rest):
    extras, scalars, wants = Extras(*rest[:_N]), Scalars(*rest[_N:-2]), rest[-2:]
    plan = plan_for(q, k, v, extras, scalars)
    *grads, dbias, dsinks = plan.backward(dout, dlse, q, k, v, out, lse, extras, *wants)
    return *grads, q.new_empty(0) if dbias is None else dbias, q.new_empty(0) if dsinks is None else dsinks


@torch.library.register_fake("flash_ext::bwd")
def _bwd_fake(dout, dlse, q, k, v, out, lse, *rest):
    extras, (want_dbias, want_dsinks) = Extras(*rest[:_N]), rest[-2:]
    grads = (t.new_empty(t.shape) for t in (q, k, v))
    dbias = extras.attn_bias.new_empty(extras.attn_bias.shape) if want_dbias else q.new_empty(0)
    return *grads, dbias, extras.sinks.new_empty(extras.sinks.shape) if want_dsinks else q.new_empty(0)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, *rest = inputs
    ctx.scalars = rest[_N:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *rest[:_N])


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None):
    q, k, v, out, lse, *extras = ctx.saved_tensors
    need_q, need_k, need_v, *needs = ctx.needs_input_grad
    need = Extras(*needs[:_N])
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsinks = _bwd_operator()(
        dout, dlse, q, k, v, out, lse, *extras, *ctx.scalars, need.attn_bias, need.sinks
    )
    grads = (dq if need_q else None, dk if need_k else None, dv if need_v else None)
    extras = Extras(attn_bias=dbias if need.attn_bias else None, sinks=dsinks if need.sinks else None)
    return *grads, *extras, *(None,) * len(ctx.scalars)


def _no_double_backward(ctx, *grads):
    raise RuntimeError(_C.TWICE)


torch.library.register_autograd("flash_ext::fwd", _backward, setup_context=_setup_context)
torch.library.register_autograd("flash_ext::bwd", _no_double_backward)


class _FwdOfTransforms(torch.autograd.Function):
    """The operator under torch.func.grad and vmap, for which what torch.library registers has no rule."""

    generate_vmap_rule = True
    forward = staticmethod(torch.ops.flash_ext.fwd)
    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


class _BwdOfTransforms(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(torch.ops.flash_ext.bwd)
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_double_backward)


def fwd_operator() -> Callable[..., tuple[Tensor, ...]]:
    """``flash_ext::fwd``, in the form that torch differentiates here."""
    return _FwdOfTransforms.apply if _is_transformed() else torch.ops.flash_ext.fwd


def _bwd_operator() -> Callable[..., tuple[Tensor, ...]]:
    return _BwdOfTransforms.apply if _is_transformed() else torch.ops.flash_ext.bwd


def _is_transformed() -> bool:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    kinds = torch._C._functorch.TransformType
    return torch._C._functorch.peek_interpreter_stack().key() in (kinds.Grad, kinds.Vmap)


def autocast_dtype(q: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast wants q, k and v in on q's device, None outside autocast."""
    device_type = q.device.type if isinstance(q, Tensor) else ""
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_for_autocast(dtype: torch.dtype | None, *tensors: Tensor, cast=Tensor.to) -> list[Tensor]:
    """torch's rule for scaled_dot_product_attention: float32 and 16-bit inputs become the autocast dtype, by
    ``cast(tensor, dtype)``."""
    if dtype is None:
        return list(tensors)
    return [cast(t, dtype) if _is_plain(t) and t.dtype in DTYPES and t.dtype != dtype else t for t in tensors]


def _is_plain(t: Tensor) -> bool:
    return isinstance(t, Tensor) and t.layout == torch.strided  # what is not is named by the checks


def _register_autocast(key: str) -> None:
    @torch.library.impl("flash_ext::fwd", key)
    def _fwd_autocast(q, k, v, *rest):
        q, k, v = cast_for_autocast(autocast_dtype(q), q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return torch.ops.flash_ext.fwd(q, k, v, *rest)


_register_autocast("AutocastCUDA")
_register_autocast("AutocastCPU")
