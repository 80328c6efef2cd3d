"""The rule by which exactness is judged.

Plain attention in float64 is the truth. In 16 bit, the output and every gradient may be off by at most twice the largest
error of plain attention computed by torch in the same dtype, plus 1e-5, and in the mean by 1.35 times its mean (twice,
where fewer than 4096 numbers make the mean), plus 1e-6. In float32 the error of each, in norm, is at most 1e-5 of the
result, or twice that of plain attention in float32 where numbers cancel. The LSE is within 1e-4 of the truth, relative
above 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Results = dict[str, Tensor]  # by name: out, lse and, of a backward pass, dq, dk, dv, dattn_bias, dsinks

# What is allowed in 16 bit, in errors of plain attention, and beside them.
WORST_FACTOR, WORST_FLOOR = 2.0, 1e-5
MEAN_FACTOR, MEAN_FLOOR = 1.35, 1e-6
MEAN_FACTOR_OF_FEW, FEW = 2.0, 4096  # the mean over fewer numbers than this is itself noisy
HANDFUL = 64  # so few that plain attention may be exact by luck
# In float32: of the result's norm, or in errors of plain attention.
NORM_LIMIT, NORM_FACTOR = 1e-5, 2.0
LSE_LIMIT = 1e-4


def failures(got: Results, exact: Results, plain: Results, dtype: torch.dtype) -> list[str]:
    """What breaks the rule, one line each. ``exact``, ``plain``: plain attention in float64, and in ``dtype``."""
    lines, measured = [], {}
    for name, truth in exact.items():
        if got[name].shape != truth.shape:
            lines.append(f"{name}: shape {tuple(got[name].shape)}, should be {tuple(truth.shape)}")
        elif name == "lse" and truth.numel():
            measured[name] = _lse_error(got[name].double(), truth.double())
        elif truth.numel():
            measured[name] = _errors(got[name].double(), truth.double(), plain[name].double())
    numbers = torch.stack(list(measured.values())).tolist() if measured else []  # waits for the device once
    for name, row in zip(measured, numbers, strict=True):
        lines += judge(name, Errors(*row), exact[name].numel(), dtype)
    return lines


class Errors(NamedTuple):
    """Of one result; those of plain attention are allowed, or a multiple of them."""

    not_finite: float
    worst: float
    mean: float
    norm: float
    allowed_worst: float
    allowed_mean: float
    allowed_norm: float
    largest: float  # number of the truth
    size: float  # its norm


def _errors(x: Tensor, truth: Tensor, plain: Tensor) -> Tensor:
    error, allowed = (x - truth).abs(), (plain - truth).abs()
    of_both = [f(e) for e in (error, allowed) for f in (torch.max, torch.mean, torch.linalg.vector_norm)]
    return torch.stack([(~torch.isfinite(x)).sum().double(), *of_both, truth.abs().max(), truth.norm()])


def _lse_error(x: Tensor, truth: Tensor) -> Tensor:
    same = x == truth  # -inf among them
    error = torch.where(same, 0.0, (x - truth).abs() / truth.abs().clamp(min=1))
    return torch.nn.functional.pad(error.nan_to_num(nan=math.inf).max()[None], (1, len(Errors._fields) - 2))


def judge(name: str, errors: Errors, count: int, dtype: torch.dtype) -> list[str]:
    """What of the result ``name`` of ``count`` numbers breaks the rule."""
    if name == "lse":
        return [] if errors.worst <= LSE_LIMIT else [f"lse: error {errors.worst:.3g} above {LSE_LIMIT}"]
    if errors.not_finite:
        return [f"{name}: {errors.not_finite:.0f} of {count} are not finite"]
    lines = _judge_fp32(errors, count) if dtype == torch.float32 else _judge_16_bit(errors, count, dtype)
    return [f"{name}: {line}" for line in lines]


def _judge_fp32(errors: Errors, count: int) -> list[str]:
    # Where the truth is what large numbers leave when they cancel, fp32 comes no closer than plain attention does; where
    # nothing is left (a single key: P is 1 and its gradient 0) plain attention is exact by luck.
    floor = (2e-6 if errors.size <= 1e-6 * math.sqrt(count) else 5e-7) * math.sqrt(count)
    bound = max(NORM_LIMIT * errors.size, NORM_FACTOR * errors.allowed_norm + floor)
    return [] if errors.norm <= bound else [f"error {errors.norm:.3g} in norm above {bound:.3g}"]


def _judge_16_bit(errors: Errors, count: int, dtype: torch.dtype) -> list[str]:
    lines = []
    # The error of plain attention in one number may be small by luck: a handful may be off by a rounding of the largest.
    luck = torch.finfo(dtype).eps * errors.largest if count < HANDFUL else 0.0
    bound = WORST_FACTOR * errors.allowed_worst + WORST_FLOOR + luck
    if errors.worst > bound:
        lines.append(f"error {errors.worst:.3g} above {bound:.3g}, {WORST_FACTOR:g} times that of plain attention")
    factor = MEAN_FACTOR if count >= FEW else MEAN_FACTOR_OF_FEW
    bound = factor * errors.allowed_mean + MEAN_FLOOR + luck
    if errors.mean > bound:
        lines.append(f"mean error {errors.mean:.3g} above {bound:.3g}, {factor:g} times that of plain attention")
    return lines
