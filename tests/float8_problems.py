"""How the results of float8 inputs are judged."""

from __future__ import annotations

import math

import torch
from cases import Config

import flash_ext
from flash_ext import reference
from flash_ext.testing import Problem, poison

FLOAT8 = torch.float8_e4m3fn


def check(p: Problem, scales: bool = True, dtype: torch.dtype = torch.bfloat16, allowed: float = 0.14) -> None:
    """p in float8, with random scales, against fp64.

    Rounding P to 3 bits moves an output by at most 2**-4 of the sum of P |v|, and its denominator by as much. Tensor cores
    add up q.k with 14 bits: scores in the hundreds are off by 0.1, and P by as much.
    """
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
        exact = [scaled(*row) for row in zip(exact, descales, starts, strict=True)]
    told = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
    if told.get("sinks") is not None:
        told["sinks"] = told["sinks"].double()
    wanted, wanted_lse = reference.attention(*exact, **told)
    bound, _ = reference.attention(*exact[:2], exact[2].abs(), **told)
    rows = slice(None, int(options["cu_seqlens_q"][-1])) if packed else slice(None)
    out, wanted, bound = (t[rows] for t in (out, wanted, bound))
    lse, wanted_lse = (t[..., rows] for t in (lse, wanted_lse))
    error = (out.double() - wanted).abs()
    assert torch.isfinite(out).all()
    assert (error <= allowed * bound + 1e-6).all(), f"{(error / bound).max().item():.3f} of the sum of P |v|"
    assert error.norm() <= 0.04 * bound.norm() + 1e-6, f"{(error.norm() / bound.norm()).item():.4f}"
    seen = wanted_lse != -math.inf
    assert torch.equal(seen, lse != -math.inf) and not out.transpose(-2, -3)[~seen].any()
    assert ((lse - wanted_lse).abs() <= 3e-3 * wanted_lse.abs().clamp_min(1))[seen].all()


def float8_problem(config: Config) -> Problem | None:
    """The problem without what has no float8 kernel; None where the head dims have none."""
    p = config.problem("cuda")
    p.options = {name: x for name, x in p.options.items() if name not in ("alibi_slopes", "attn_bias", "dropout_p")}
    return p if p.q.shape[-1] % 16 == p.v.shape[-1] % 16 == 0 else None


def scaled(t: torch.Tensor, descale: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    factors = descale.double().repeat_interleave(t.shape[-2] // descale.shape[1], 1)  # (batch, heads)
    if cu_seqlens is None:
        return t * factors[:, None, :, None]
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    rows = factors.repeat_interleave(lengths, 0)
    rows = torch.cat([rows, rows.new_ones(t.shape[0] - len(rows), rows.shape[1])])
    return t * rows[:, :, None]
