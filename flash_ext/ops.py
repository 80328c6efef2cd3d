"""The torch operators ``flash_ext::fwd`` and ``flash_ext::bwd``, and how a call reaches a kernel.

A ``Plan`` is everything about a call that its tensors' contents cannot change: path, kernel row, shapes of the
results. Plans are cached by signature, so that a repeated eager call costs one lookup and one step into C++
(``_C.Kernels``), which allocates, launches, and records the gradient. What C++ cannot do alone (gradients of bias and
sinks, copies of odd strides, the reference path) goes through ``Attention``, a Python autograd function; compiled,
traced and otherwise intercepted calls go through the operators. All end in ``_C.Kernels`` or ``reference``.

Arguments arrive here checked and in canonical form (see ``interface``); the operators are not a public interface.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from . import jit, reference
from .call import DTYPES, FLOAT8, Extras, Scalars, check_lengths
from .dispatch import (
    PATHS,
    Call,
    Choice,
    DType,
    Key,
    Layout,
    Pass,
    Variant,
    choose,
    mask_of,
    normalise_window,
)


class _Extension:
    """``flash_ext._C``, loaded on first use: importing flash_ext needs neither a build nor a compiler."""

    def __getattr__(self, name: str):
        value = getattr(jit.extension(), name)
        setattr(self, name, value)
        return value


_C = _Extension()

NO_EXTRAS = Extras()
_path: ContextVar[str] = ContextVar("flash_ext_path", default="")


@contextmanager
def use_path(path: str):
    """Serve every call in this context by ``path``; a call that it cannot serve raises ``NotImplementedError``.

    ``path``: "reference" (torch operators, any device, also float64), "cpu", "simt" (portable CUDA), "sm80", "sm90".
    Holds for this thread (and for the tasks that it starts), and for the backward passes of the calls made in it. A
    compiled function keeps the path under which it was traced.
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}; got {path!r}")
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


@torch.compiler.assume_constant_result
def current_path() -> str:
    return _path.get()


@cache
def table() -> list[Key]:
    return [Key(*row) for row in _C.instances()]


@cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


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
            _capability(self.device_index) if q.is_cuda else None,
        )
        self.scattered = tuple(not _C.has_rows(t) for t in (q, k, v))
        self.misaligned = tuple(not _C.is_aligned(t) for t in (q, k, v))
        self.kernels = _C.Kernels()
        self.kernels.scalars = self._scalars()

    def _choose(self, pass_: Pass, path: str) -> Choice:
        call = self.call._replace(pass_=pass_)
        return choose(call, table(), lambda row: jit.can_run(row, call.capability), _C.row_name, path or None)

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
    def bwd_kernels(self) -> _C.Kernels:
        self.kernels.bwd_row = self._row(self.bwd)
        return self.kernels

    @cached_property
    def dbias_kernels(self) -> _C.Kernels:
        self.kernels.dbias_row = self._row(self.dbias)
        return self.bwd_kernels

    def _in_one_step(self, choice: Choice, copies: tuple[bool, ...]) -> bool:
        """Whether C++ needs no help."""
        plain = not (self.checks_lengths or self.no_queries or self.no_keys)
        return plain and choice.path != "reference" and not copies

    @cached_property
    def run(self):
        """(q, k, v, extras) -> (out, lse), recording no gradient."""
        return self.fwd_kernels.forward if self._in_one_step(self.fwd, self.fwd_copies) else self.forward

    @cached_property
    def attend(self):
        """(q, k, v, extras) -> (out, lse), recording the gradient. A path that cannot go backward says so now."""
        copies = self.bwd_copies or self.fwd_copies
        alone = self._in_one_step(self.fwd, copies) and self._in_one_step(self.bwd, copies)
        if alone and not self.has_bias and not self.has_sinks:
            self.bwd_kernels  # noqa: B018
            return self.fwd_kernels.attend
        return partial(_attend, self)

    def _copies(self, choice: Choice) -> tuple[bool, ...]:
        """Which of q, k and v this choice needs as copies; () for none."""
        copies = self.scattered
        if choice.path == "sm90":
            copies = tuple(a or b for a, b in zip(self.scattered, self.misaligned, strict=True))
        return copies if any(copies) else ()

    @cached_property
    def fwd_copies(self) -> tuple[bool, ...]:
        return self._copies(self.fwd)

    @cached_property
    def bwd_copies(self) -> tuple[bool, ...]:
        return self._copies(self.bwd)

    def notes(self) -> list[str]:
        """What ``explain`` says besides the choice."""
        copied = [name for name, copy in zip("qkv", self.fwd_copies, strict=False) if copy]
        why = {
            True: "its last dimension is not contiguous",
            False: "its strides are not multiples of 16 bytes, or 0 along the sequence",
        }
        return [f"{name} is copied: {why[self.scattered['qkv'.index(name)]]}" for name in copied]

    def _scalars(self) -> _C.Scalars:
        result, s = _C.Scalars(), self.scalars
        result.max_seqlen_q, result.max_seqlen_k = s.max_seqlen_q, s.max_seqlen_k
        result.softmax_scale, result.softcap, result.dropout_p = s.softmax_scale, s.softcap, s.dropout_p
        result.window_left, result.window_right = self.window
        result.deterministic = s.deterministic
        return result

    def _options_of(self, extras: Extras) -> _C.Options:
        options = _C.Options(self._scalars())
        for name, tensor in zip(Extras._fields, extras, strict=True):
            if tensor is not None:
                setattr(options, name, tensor)
        return options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        if self.checks_lengths:
            check_lengths(extras, q.shape[0], k.shape[0], self.scalars.max_seqlen_q, self.scalars.max_seqlen_k)
        if self.no_queries or self.no_keys:
            return self._without_keys(*_C.empty_results(q, self.head_dim_v), extras)
        if self.fwd.path == "reference":
            return self._reference(q, k, v, extras)
        if self.fwd_copies:
            q, k, v = _copied((q, k, v), self.fwd_copies)
        return self.fwd_kernels.forward(q, k, v, extras)

    def _without_keys(self, out: Tensor, lse: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        lse.fill_(-math.inf)
        if extras.sinks is not None:
            lse.copy_(extras.sinks[:, None])
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
        """dq, dk, dv, dbias, dsinks; the last two None where not wanted."""
        bias, sinks = extras.attn_bias, extras.sinks
        dbias = torch.zeros(bias.shape, dtype=torch.float32, device=self.device) if want_dbias else None
        if self.no_queries or self.no_keys:
            dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
            dsinks = None
            if want_dsinks:  # lse is the sink itself
                rows = (0, 2) if dlse is not None and dlse.dim() == 3 else 1
                dsinks = torch.zeros_like(sinks) if dlse is None else dlse.sum(rows)
            return dq, dk, dv, dbias if dbias is None else dbias.to(bias.dtype), dsinks
        if self.bwd.path == "reference":
            return self._reference_backward(dout, dlse, q, k, v, extras, want_dbias, want_dsinks)

        if self.bwd_copies:
            q, k, v = _copied((q, k, v), self.bwd_copies)
        kernels = self.dbias_kernels if want_dbias else self.bwd_kernels
        dq, dk, dv, delta = kernels.backward(dout, dlse, q, k, v, out, lse, extras, dbias)
        dsinks = _dsinks(sinks, lse, delta, extras.cu_seqlens_q) if want_dsinks else None
        return dq, dk, dv, dbias if dbias is None else dbias.to(bias.dtype), dsinks

    def _reference(self, q, k, v, extras: Extras) -> tuple[Tensor, Tensor]:
        """In float32 at least, whatever the dtype and autocast."""
        with torch.autocast(self.device.type, enabled=False):
            out, lse = reference.attention(*(_wide(t) for t in (q, k, v)), **self._reference_options(extras))
        results = _C.empty_results(q, self.head_dim_v)
        return results[0].copy_(out), results[1].copy_(lse)

    def _reference_backward(self, dout, dlse, q, k, v, extras: Extras, want_dbias: bool, want_dsinks: bool):
        with _autograd_on(), torch.autocast(self.device.type, enabled=False):
            wide = [_wide(t.detach()).requires_grad_() for t in (q, k, v)]
            bias, sinks = extras.attn_bias, extras.sinks
            bias = _wide(bias.detach()).requires_grad_() if want_dbias else bias
            sinks = sinks.detach().requires_grad_() if want_dsinks else sinks
            options = self._reference_options(extras._replace(attn_bias=bias, sinks=sinks))
            results = reference.attention(*wide, **options)
        grads = [None if g is None else g.to(r.dtype) for g, r in zip((dout, dlse), results, strict=True)]
        outputs = [r for r, g in zip(results, grads, strict=True) if g is not None]
        inputs = wide + [bias] * want_dbias + [sinks] * want_dsinks
        grads = [g for g in grads if g is not None]
        with torch.autocast(self.device.type, enabled=False):
            grads = torch.autograd.grad(outputs, inputs, grads, allow_unused=True, materialize_grads=True)
        dq, dk, dv = (g.to(t.dtype).contiguous() for g, t in zip(grads[:3], (q, k, v), strict=True))
        dbias = grads[3].to(extras.attn_bias.dtype) if want_dbias else None
        return dq, dk, dv, dbias, grads[-1] if want_dsinks else None

    def _reference_options(self, extras: Extras) -> dict:
        s = self.scalars
        return dict(
            extras._asdict(),
            softmax_scale=s.softmax_scale,
            window_size=self.window,
            softcap=s.softcap,
            dropout_p=s.dropout_p,
        )


@contextmanager
def _autograd_on():
    """Record gradients, also below the dispatcher's autograd layer, where operators run."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    key = torch._C.DispatchKey
    for layer in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        exclude = exclude.remove(layer)
    with torch._C._ForceDispatchKeyGuard(include.add(key.ADInplaceOrView), exclude), torch.enable_grad():
        yield


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _copied(tensors: tuple[Tensor, ...], copies: tuple[bool, ...]) -> list[Tensor]:
    return [_copy(t) if copy else t for t, copy in zip(tensors, copies, strict=True)]


def _copy(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _stream(device_index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device_index)


def _dsinks(sinks: Tensor, lse: Tensor, delta: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """A sink is a key with score ``sink`` and a zero value: its probability is exp(sink - lse), its dP is 0."""
    grad = -torch.exp(sinks[:, None] - lse) * delta  # (batch, num_heads, seqlen_q) or (num_heads, total_q)
    if cu_seqlens_q is not None:  # rows past the last segment were never written
        rows = torch.arange(lse.shape[1], device=lse.device)
        grad = grad.where(rows < cu_seqlens_q[-1], 0.0)
    grad = grad.where(lse != -math.inf, 0.0)  # sink and every score -inf
    return grad.sum((0, 2) if lse.dim() == 3 else 1)


_plans: dict[tuple, Plan] = {}


def plan_for(q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars, kind: type[Plan] = Plan) -> Plan:
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


class Attention(torch.autograd.Function):
    """Eager calls that C++ does not serve alone: (plan, q, k, v, *extras) -> (out, lse)."""

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
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *extras = ctx.saved_tensors
        need_bias, need_sinks = need_extras[4:6]
        with torch.no_grad():
            dq, dk, dv, dbias, dsinks = ctx.plan.backward(
                dout, dlse, q, k, v, out, lse, Extras(*extras), need_bias, need_sinks
            )
        grads = (None, dq if need_q else None, dk if need_k else None, dv if need_v else None)
        grads = (*grads, None, None, None, None, dbias, dsinks, None)
        return _once_only(grads) if torch.is_grad_enabled() else grads


def _attend(plan: Plan, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    return Attention.apply(plan, q, k, v, *extras)


_TWICE = (
    "attention cannot be differentiated twice: its gradients were made with create_graph=True and then used in a loss"
)


def _once_only(grads: tuple) -> tuple:
    """The same gradients, of which no further gradient can be taken: an error instead of silent zeros."""
    refuse = torch._C._functions.DelayedError(_TWICE, len(grads))
    return refuse(*(None if g is None else g.requires_grad_() for g in grads))


# The operators. `extras` and `scalars` lie flat in the schema, in the order of their classes.
_EXTRAS = ", ".join(f"Tensor? {name}" for name in Extras._fields)
_SCALARS = (
    "bool causal, float softmax_scale, SymInt window_left, SymInt window_right, float softcap, float dropout_p, "
    "bool deterministic, SymInt max_seqlen_q, SymInt max_seqlen_k, str path"
)
_FWD = f"(Tensor q, Tensor k, Tensor v, {_EXTRAS}, {_SCALARS}) -> (Tensor out, Tensor lse)"
_BWD = (
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_EXTRAS}, {_SCALARS}, "
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
def _fwd_fake(q, k, v, cu_seqlens_q, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return out, q.new_empty(lse_shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


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
    need_q, need_k, need_v = ctx.needs_input_grad[:3]
    need_bias, need_sinks = ctx.needs_input_grad[7:9]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dbias, dsinks = torch.ops.flash_ext.bwd(
        dout, dlse, q, k, v, out, lse, *extras, *ctx.scalars, need_bias, need_sinks
    )
    grads = (dq if need_q else None, dk if need_k else None, dv if need_v else None)
    nothing = (None,) * len(ctx.scalars)
    return *grads, None, None, None, None, dbias if need_bias else None, dsinks if need_sinks else None, None, *nothing


def _no_double_backward(ctx, *grads):
    raise RuntimeError(_TWICE)


torch.library.register_autograd("flash_ext::fwd", _backward, setup_context=_setup_context)
torch.library.register_autograd("flash_ext::bwd", _no_double_backward)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that torch.autocast wants q, k and v in on this device, None outside autocast."""
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_for_autocast(dtype: torch.dtype | None, *tensors: Tensor) -> list[Tensor]:
    """torch's rule for scaled_dot_product_attention: float32 and 16-bit inputs become the autocast dtype."""
    return [t.to(dtype) if dtype is not None and t.dtype in DTYPES else t for t in tensors]


def _register_autocast(device_type: str, key: str) -> None:
    @torch.library.impl("flash_ext::fwd", key)
    def _fwd_autocast(q, k, v, *rest):
        q, k, v = cast_for_autocast(autocast_dtype(device_type), q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))):
            return torch.ops.flash_ext.fwd(q, k, v, *rest)


_register_autocast("cuda", "AutocastCUDA")
_register_autocast("cpu", "AutocastCPU")
