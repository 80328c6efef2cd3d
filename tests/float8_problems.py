"""How the results of float8 inputs are judged."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from cases import Config
from closed_form import ClosedForm
from torch import Tensor

import flash_ext
from flash_ext import reference
from flash_ext.testing import Problem, poison

FLOAT8 = torch.float8_e4m3fn
ALLOWED = 0.14


class Deviations(NamedTuple):
    """Rounding P to 3 bits moves an output by at most 2**-4 of the sum of P |v|, and its denominator by as much. Tensor
    cores add up q.k with 14 bits: scores in the hundreds are off by 0.1, and P by as much."""

    not_finite: float
    worst: float  # error in units of the sum of P |v|
    error: float  # in norm
    bound: float  # norm of the sums of P |v|
    wrongly_seen: float  # rows whose lse alone says that they see a key, or that they do not
    out_of_nothing: float
    lse: float  # beyond the rounding of q.k, relative above 1

    def complaint(self, allowed: float = ALLOWED) -> str:
        if self.not_finite:
            return f"{self.not_finite:.0f} numbers are not finite"
        if not self.worst <= allowed:
            return f"error {self.worst:.3f} of the sum of P |v|"
        if not self.error <= 0.04 * self.bound + 1e-6:
            return f"error in norm {self.error / self.bound:.4f} of the sum of P |v|"
        if self.wrongly_seen or not self.out_of_nothing == 0:
            return f"{self.wrongly_seen:.0f} rows see keys or not, out {self.out_of_nothing:.3g} where no key is seen"
        return "" if self.lse <= 3e-3 else f"lse: error {self.lse:.3g}"


def check(p: Problem, scales: bool = True, dtype: torch.dtype = torch.bfloat16, allowed: float = ALLOWED) -> None:
    """p in float8, with random scales, against fp64."""
    complaint = Deviations(*deviations(p, None, scales, dtype).tolist()).complaint(allowed)
    assert not complaint, complaint


def deviations(p: Problem, config: Config | None, scales: bool = True, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``Deviations`` on the device; nothing waits for it if p is the problem of ``config``."""
    q, k, v = (t.to(FLOAT8) for t in (p.q, p.k, p.v))
    options = {name: x for name, x in p.options.items() if name not in ("deterministic", "dropout_p")}
    packed = "cu_seqlens_q" in options
    batch = options["cu_seqlens_q"].numel() - 1 if packed else q.shape[0]
    generator = torch.Generator("cuda").manual_seed(batch)
    descales = [torch.rand(batch, k.shape[-2], generator=generator, device="cuda") + 0.5 for _ in range(3)]
    names = ("q_descale", "k_descale", "v_descale") if scales else ()
    given = dict(zip(names, descales, strict=False))
    with flash_ext.use_path("sm90"), poison():
        assert "e4m3" in flash_ext.explain(q, k, v, **options, **given).kernel
        call = flash_ext.flash_attn_varlen_func if packed else flash_ext.forward
        out, lse = call(q, k, v, **options, **given, return_lse=True, out_dtype=dtype)
    assert out.dtype == dtype

    exact = [t.double() for t in (q, k, v)]
    if scales:
        starts = [options.get("cu_seqlens_q")] + [options.get("cu_seqlens_k")] * 2
        rows = [t.shape[0] if packed else 0 for t in exact]
        exact = [scaled(*row) for row in zip(exact, descales, starts, rows, strict=True)]
    rows = slice(None, p.rows) if packed else slice(None)
    wanted, wanted_lse, bound = exact_results(*exact, p) if config is None else closed_form(*exact, p, config)
    out, wanted, bound = (t[rows].transpose(-2, -3) for t in (out.double(), wanted, bound))
    lse, wanted_lse = (t[..., rows] for t in (lse, wanted_lse))
    error = (out - wanted).abs()
    nothing = wanted_lse == -math.inf
    # In 14 bits each product of q.k is off by up to 2**-13 of the largest that their sum was on the way. Sums of normal
    # numbers, cut in such a way, were off by 0.0035 to 0.008 sqrt(head_dim) at most (13 or 12 bits behind the leading
    # one, 5 million sums each of 256 products), times the factors of q and k.
    scale = options["softmax_scale"] if options.get("softmax_scale") is not None else q.shape[-1] ** -0.5
    factors = descales[0].amax() * descales[1].amax() if scales else 1
    rounding = 2**-7 * abs(scale) * math.sqrt(q.shape[-1]) * factors
    beyond = ((lse - wanted_lse).abs() - rounding).clamp_min(0)
    error_of_lse = (beyond / wanted_lse.abs().clamp_min(1)).masked_fill(nothing, 0)
    nothing_in_out = out.abs() * nothing[..., None]
    # Where one key rules, P of 256, the others' are below e4m3's normal numbers: each off by 2**-10 at most.
    keys = options["max_seqlen_k"] if packed else k.shape[1]
    floor = 2**-16 * math.sqrt(keys)  # six times what they usually add up to
    numbers = [
        (~torch.isfinite(out)).sum().double(),
        (error / (bound + floor / ALLOWED)).max(),
        error.norm(),
        bound.norm(),
        (nothing != (lse == -math.inf)).sum().double(),
        nothing_in_out.max(),
        error_of_lse.max(),
    ]
    return torch.stack(numbers)


def exact_results(q: Tensor, k: Tensor, v: Tensor, p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and the sum of P |v| by plain attention in fp64."""
    unknown = ("deterministic", "dropout_p", "max_seqlen_q", "max_seqlen_k")
    told = {name: x for name, x in p.options.items() if name not in unknown}
    if told.get("sinks") is not None:
        told["sinks"] = told["sinks"].double()
    out, lse = reference.attention(q, k, v, **told)
    return out, lse, reference.attention(q, k, v.abs(), **told)[0]


def closed_form(q: Tensor, k: Tensor, v: Tensor, p: Problem, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """The same, faster."""
    results = ClosedForm(config, Problem(q, k, torch.cat([v, v.abs()], dim=-1), p.options)).results(
        torch.float64, False
    )
    out, bound = results["out"].split(v.shape[-1], dim=-1)
    return out, results["lse"], bound


def float8_problem(config: Config) -> Problem | None:
    """The problem without what has no float8 kernel; None where the head dims have none."""
    p = config.problem("cuda")
    p.options = {name: x for name, x in p.options.items() if name not in ("alibi_slopes", "attn_bias", "dropout_p")}
    return p if p.q.shape[-1] % 16 == p.v.shape[-1] % 16 == 0 else None


def scaled(t: Tensor, descale: Tensor, cu_seqlens: Tensor | None, rows: int) -> Tensor:
    """``rows`` of t if packed."""
    factors = descale.double().repeat_interleave(t.shape[-2] // descale.shape[1], 1)  # (batch, heads)
    if cu_seqlens is None:
        return t * factors[:, None, :, None]
    row = torch.arange(rows, device=t.device, dtype=cu_seqlens.dtype)  # the last segment's factor for those behind it
    segment = torch.bucketize(row, cu_seqlens[1:-1], right=True)
    return t * factors[segment][:, :, None]
