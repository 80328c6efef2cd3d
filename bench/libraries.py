"""The libraries of a comparison. Each turns a case and its inputs into a call in the library's own best layout.

A call does what the case asks for and nothing more: no LSE where none is wanted, no conversion of layouts. A library
that cannot serve a case says why by `Unsupported`; the row then has no number for it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case, Inputs
from .standard import standard_attention


class Unsupported(Exception):
    """This library does not serve this case."""


@dataclass
class Call:
    forward: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v in the library's layout
    dout: torch.Tensor  # in the layout of the output
    heads_first: bool = False  # layout (batch, heads, seqlen, dim) instead of (batch, seqlen, heads, dim)
    session: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # open while the call is used

    def out(self) -> torch.Tensor:
        return self.common(self.forward())

    def common(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seqlen, heads, dim) or (total, heads, dim)."""
        return x.transpose(1, 2) if self.heads_first else x

    def backward(self) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Runs forward once; what it returns runs backward alone, as often as wanted."""
        for leaf in self.leaves:
            leaf.requires_grad_()
        out = self.forward()
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)


def _leaves(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.q.detach(), inputs.k.detach(), inputs.v.detach()


@cache
def _module(*names: str):
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return None


def _flash_ext(path: str = "", **more):
    def prepare(case: Case, inputs: Inputs) -> Call:
        flash_ext = _module("flash_ext")
        if flash_ext is None:
            raise Unsupported("flash_ext cannot be imported")
        if more and not case.needs_grad:
            raise Unsupported("the forward is the same")
        if case.dtype == "e4m3" and not _has_fp8_kernels():
            raise Unsupported("flash_ext has no fp8 kernels; it would convert to bf16")
        q, k, v = leaves = _leaves(inputs)
        options = {**inputs.options, **more}
        if inputs.descale is not None:
            options.update(q_descale=inputs.descale, k_descale=inputs.descale, v_descale=inputs.descale)

        if case.packed:
            cu, longest = inputs.cu_seqlens, case.seqlen

            def forward():
                return flash_ext.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
        else:

            def forward():
                return flash_ext.forward(q, k, v, **options)

        chosen = path or case.path
        session = (lambda: flash_ext.use_path(chosen)) if chosen else contextlib.nullcontext
        return Call(forward, leaves, inputs.dout, session=session)

    return prepare


def _has_fp8_kernels() -> bool:
    from flash_ext.dispatch import DType
    from flash_ext.extension import table

    return any(row.dtype == DType.E4M3 for row in table())


def _fa3(case: Case, inputs: Inputs) -> Call:
    fa3 = _module("flash_attn_interface", "fa3_fwd_interface")
    if fa3 is None:
        raise Unsupported("neither flash_attn_interface nor fa3_fwd_interface can be imported")
    if case.dtype == "fp32" or case.feature not in ("", "sinks") or (case.feature and case.needs_grad):
        raise Unsupported("this build of FA3 has no fp32, softcap, ALiBi or bias")
    if case.needs_grad and _fa3_has_no_backward(fa3):
        raise Unsupported("this build of FA3 has no backward")
    q, k, v = leaves = _leaves(inputs)
    options = dict(inputs.options)
    if case.feature == "sinks":
        options["sinks"] = options["sinks"].to(torch.bfloat16)
    if inputs.descale is not None:
        options.update(q_descale=inputs.descale, k_descale=inputs.descale, v_descale=inputs.descale)

    if case.packed:
        cu, longest = inputs.cu_seqlens, case.seqlen

        def forward():
            return _first(fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options))
    else:

        def forward():
            return _first(fa3.flash_attn_func(q, k, v, **options))

    return Call(forward, leaves, inputs.dout)


def _fa3_has_no_backward(fa3) -> bool:
    config = _module("flash_attn_config")
    flags = config.CONFIG["build_flags"] if config else {}
    return fa3.__name__ == "fa3_fwd_interface" or flags.get("FLASHATTENTION_DISABLE_BACKWARD", False)


def _fa4(case: Case, inputs: Inputs) -> Call:
    fa4 = _module("flash_attn.cute.interface", "flash_attn.cute")
    if fa4 is None:
        raise Unsupported("flash_attn.cute cannot be imported")
    if case.dtype not in ("bf16", "fp16") or case.feature:
        raise Unsupported("FA4 is timed on plain bf16 and fp16 calls")
    q, k, v = leaves = _leaves(inputs)
    window = tuple(None if bound < 0 else bound for bound in case.window_size)
    options = {"causal": case.causal, "window_size": window}

    if case.packed:
        cu = inputs.cu_seqlens

        def forward():
            return _first(fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options))
    else:

        def forward():
            return _first(fa4.flash_attn_func(q, k, v, **options))

    return Call(forward, leaves, inputs.dout)


def _first(result):
    return result[0] if isinstance(result, tuple) else result


def _fa2(case: Case, inputs: Inputs) -> Call:
    """FlashAttention-2 as torch ships it, through the operator below SDPA: it has windows, ALiBi and packed batches."""
    if case.dtype not in ("bf16", "fp16") or case.feature not in ("", "alibi"):
        raise Unsupported("torch's flash backend takes bf16 and fp16, and of the features only ALiBi")
    if case.feature and case.needs_grad:
        raise Unsupported("torch's flash backend has no backward with ALiBi")
    if case.head_dim != case.head_dim_v or not inputs.q.is_cuda:
        raise Unsupported("torch's flash backend wants one head_dim, on a GPU")
    q, k, v = leaves = _leaves(inputs)
    left, right = (None if bound < 0 else bound for bound in case.window_size)
    options = {"window_size_left": left, "window_size_right": right, "alibi_slopes": inputs.options.get("alibi_slopes")}
    cu = inputs.cu_seqlens
    rows = (cu, cu, case.seqlen, case.seqlen) if case.packed else (None, None, case.seqlen, case.seqlen_k)

    def forward():
        return torch.ops.aten._flash_attention_forward(q, k, v, *rows, 0.0, case.causal, False, **options)[0]

    return Call(forward, leaves, inputs.dout)


def _sdpa(backend: SDPBackend):
    def prepare(case: Case, inputs: Inputs) -> Call:
        if case.packed or case.window_size != (-1, -1) or case.dtype == "e4m3":
            raise Unsupported("SDPA has no packed batches, windows or fp8")
        if case.causal and case.seqlen != case.seqlen_k:
            raise Unsupported("SDPA aligns causal masks to the top left")
        if case.feature not in ("", "bias") or (case.feature and case.causal):
            raise Unsupported("SDPA has a bias, without a causal mask, and none of the other features")
        gqa = case.num_heads != case.num_heads_kv
        if gqa and backend == SDPBackend.EFFICIENT_ATTENTION:
            raise Unsupported("torch's memory-efficient backend has no grouped heads")
        # Copied, so that a backward's leaves are this call's own.
        q, k, v = leaves = tuple(x.transpose(1, 2).contiguous() for x in _leaves(inputs))
        dout = inputs.dout.transpose(1, 2).contiguous()
        bias = inputs.options.get("attn_bias")

        def forward():
            return F.scaled_dot_product_attention(q, k, v, bias, is_causal=case.causal, enable_gqa=gqa)

        return Call(forward, leaves, dout, heads_first=True, session=lambda: sdpa_kernel(backend))

    return prepare


def _cudnn(case: Case, inputs: Inputs) -> Call:
    if not case.packed:
        return _sdpa(SDPBackend.CUDNN_ATTENTION)(case, inputs)
    q, k, v = leaves = _leaves(inputs)
    cu, longest = inputs.cu_seqlens, case.seqlen

    def forward():
        rows = (None, cu, cu, longest, longest)
        return torch.ops.aten._cudnn_attention_forward(q, k, v, *rows, case.needs_grad, 0.0, case.causal, False)[0]

    return Call(forward, leaves, inputs.dout)


def _standard(case: Case, inputs: Inputs) -> Call:
    if case.packed or case.dtype == "e4m3":
        raise Unsupported("standard attention here is dense, in 16 or 32 bit")
    if case.feature == "dropout":
        raise Unsupported("standard attention draws other random numbers")
    q, k, v = leaves = _leaves(inputs)
    return Call(lambda: standard_attention(q, k, v, **inputs.options), leaves, inputs.dout)


LIBRARIES: dict[str, Callable[[Case, Inputs], Call]] = {
    "flash_ext": _flash_ext(),
    "fa3": _fa3,
    "fa4": _fa4,
    "cudnn": _cudnn,
    "fa2": _fa2,
    "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
    "standard": _standard,
    "deterministic": _flash_ext(deterministic=True),
    # One path of flash_ext each: the generations of this field side by side.
    "simt": _flash_ext("simt"),
    "sm80": _flash_ext("sm80"),
    "sm90": _flash_ext("sm90"),
    "cpu": _flash_ext("cpu"),
}
PATHS = ("simt", "sm80", "sm90", "cpu")  # those of LIBRARIES that are flash_ext itself
OURS = ("flash_ext", "deterministic", *PATHS)

DEFAULT_LIBRARIES = {
    "fwd": ("flash_ext", "fa3", "fa4", "cudnn", "fa2"),
    "bwd": ("flash_ext", "fa3", "fa4", "cudnn", "fa2"),
    "fp8": ("flash_ext", "fa3"),
    "fp32": ("flash_ext", "simt", "efficient"),
    "accuracy": ("flash_ext", "fa3", "cudnn", "fa2", "standard"),
    "generations": ("standard", "simt", "sm80", "sm90"),
    "overhead": ("flash_ext", "fa3", "fa4", "cudnn", "fa2", "efficient"),
    "memory": ("flash_ext", "cudnn", "fa2", "efficient", "standard"),
}


def prepare(name: str, case: Case, inputs: Inputs) -> Call:
    if name not in LIBRARIES:
        raise ValueError(f"library must be one of {', '.join(LIBRARIES)}, got {name!r}")
    return LIBRARIES[name](case, inputs)
