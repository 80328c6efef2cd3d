"""What does not match the reference is not timed. A few whole heads are compared with standard attention in fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_ext import tolerance

from .cases import DTYPES, Case, Inputs
from .standard import standard_attention

NAMES = ("out", "dq", "dk", "dv")
DROPOUT_SEED = 11  # of torch's generator before a call that is checked
FP8_NORM_LIMIT = 0.06  # quantising P to e4m3 alone costs about 0.03


@dataclass
class Slice:
    """One segment and one kv head with the query heads that share it."""

    rows: tuple  # index of (batch, seqlen) or (total,), a batch dimension of 1 kept
    heads: slice
    heads_kv: slice


@dataclass
class Expected:
    where: Slice
    reference: list[Tensor]  # out, or out, dq, dk, dv: (1, seqlen, heads, dim) fp64
    plain: list[Tensor]  # the same by standard attention in the inputs' dtype


class Checker:
    def __init__(self, case: Case, inputs: Inputs):
        self.case = case
        self.expected = [self._expect(inputs, where) for where in self._slices()]

    def _slices(self) -> list[Slice]:
        group = self.case.num_heads // self.case.num_heads_kv
        if not self.case.packed:
            rows = [(slice(0, 1),), (slice(self.case.batch - 1, self.case.batch),)]
        else:
            starts = [sum(self.case.lengths[:i]) for i in range(len(self.case.lengths))]
            order = sorted(range(len(starts)), key=lambda i: self.case.lengths[i])
            rows = [(None, slice(starts[i], starts[i] + self.case.lengths[i])) for i in (order[0], order[-1])]
        heads_kv = (0, self.case.num_heads_kv - 1)
        return [
            Slice(r, slice(h * group, (h + 1) * group), slice(h, h + 1)) for r, h in zip(rows, heads_kv, strict=True)
        ]

    def _take(self, x: Tensor, where: Slice, heads: slice) -> Tensor:
        return x[where.rows][:, :, heads]

    def _expect(self, inputs: Inputs, where: Slice) -> Expected:
        options = dict(inputs.options)
        for name in ("alibi_slopes", "sinks"):
            if name in options:
                options[name] = options[name][where.heads]
        if "attn_bias" in options:
            options["attn_bias"] = options["attn_bias"][:, where.heads]
        if dropout_p := options.pop("dropout_p", 0.0):
            options["keep"] = self._kept(dropout_p, where, inputs.q.device)
        tensors = [
            self._take(inputs.q, where, where.heads),
            self._take(inputs.k, where, where.heads_kv),
            self._take(inputs.v, where, where.heads_kv),
            self._take(inputs.dout, where, where.heads),
        ]
        plain_dtype = torch.bfloat16 if self.case.dtype == "e4m3" else DTYPES[self.case.dtype]
        return Expected(where, self._run(tensors, options, torch.float64), self._run(tensors, options, plain_dtype))

    def _kept(self, dropout_p: float, where: Slice, device: torch.device) -> Tensor:
        """What dropout leaves after DROPOUT_SEED, as factors (1, heads, seqlen_q, seqlen_k)."""
        from flash_ext.call import new_rng_state
        from flash_ext.reference import dropout_mask

        torch.manual_seed(DROPOUT_SEED)
        first_head = where.rows[0].start * self.case.num_heads + where.heads.start
        shape = (where.heads.stop - where.heads.start, self.case.seqlen, self.case.seqlen_k)
        keep, scale = dropout_mask(dropout_p, new_rng_state(device), *shape, first_head)
        return (keep * scale)[None]

    def _run(self, tensors: list[Tensor], options: dict, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, dout = (x.detach().to(dtype) for x in tensors)
        if not self.case.needs_grad:
            return [standard_attention(q, k, v, **options)]
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out = standard_attention(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def complaint(self, results: list[Tensor]) -> str:
        """Why `results` (out, or out, dq, dk, dv, dense or packed) are wrong; '' if they are right."""
        for expected in self.expected:
            where = expected.where
            for name, got, reference, plain in zip(NAMES, results, expected.reference, expected.plain, strict=False):
                heads = where.heads_kv if name in ("dk", "dv") else where.heads
                if reason := disagreement(name, self._take(got, where, heads), reference, plain, self.case.dtype):
                    return reason
        return ""

    def relative_rmse(self, out: Tensor) -> float:
        """Root mean square error of `out` (dense or packed) over the root mean square of the reference."""
        expected = [(self._take(out, e.where, e.where.heads).double(), e.reference[0]) for e in self.expected]
        error = sum((got - reference).square().sum() for got, reference in expected)
        return (error / sum(reference.square().sum() for _, reference in expected)).sqrt().item()


def disagreement(name: str, got: Tensor, reference: Tensor, plain: Tensor, dtype: str) -> str:
    """The rule of flash_ext.tolerance; for e4m3, which has none there, a bound on the relative error."""
    if dtype != "e4m3":
        results = ({name: x} for x in (got, reference, plain))
        return "; ".join(tolerance.failures(*results, DTYPES[dtype]))
    error = relative_error(got, reference)
    return "" if error <= FP8_NORM_LIMIT else f"{name}: relative error {error:.3g}, allowed {FP8_NORM_LIMIT}"


def relative_error(got: Tensor, reference: Tensor) -> float:
    error = torch.linalg.vector_norm(got.double() - reference)
    return (error / torch.linalg.vector_norm(reference).clamp_min(1e-30)).item()
