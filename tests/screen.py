"""The rule of ``flash_ext.tolerance`` for many problems at once: the device is asked once for the errors of all of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from cases import DTYPES, Config
from float8_problems import Deviations, deviations, float8_problem
from torch import Tensor

from flash_ext.tolerance import Errors, Results, judge

CONFIGS = 32  # in one question
NUMBERS = 2**25  # or so many, whatever comes first


class _Result(NamedTuple):
    config: int
    name: str
    count: int
    error: Tensor
    error_of_plain: Tensor
    truth: Tensor


class Screen:
    """Collects results; ``complaints`` is empty for a config only if each of them keeps the rule."""

    def __init__(self) -> None:
        self.configs: list[Config] = []
        self._got: list[Results] = []
        self._results: list[_Result] = []
        self._lines: list[list[str]] = []

    @property
    def full(self) -> bool:
        return len(self.configs) >= CONFIGS or sum(r.count for r in self._results) > NUMBERS

    def add(self, config: Config, got: Results, exact: Results, plain: Results) -> None:
        lines: list[str] = []
        for name, truth in exact.items():
            if got[name].shape != truth.shape:
                lines.append(f"{name}: shape {tuple(got[name].shape)}, should be {tuple(truth.shape)}")
            elif name == "lse" and truth.numel():
                truth = truth.nan_to_num(nan=math.nan, neginf=-1e30)
                error = (got[name].nan_to_num(nan=math.nan, neginf=-1e30) - truth) / truth.abs().clamp(min=1)
                self._results.append(_Result(len(self.configs), name, truth.numel(), error, error, error))
            elif truth.numel():  # differences of 16 bit and 64 are in 64
                errors = got[name] - truth, plain[name] - truth
                self._results.append(_Result(len(self.configs), name, truth.numel(), *errors, truth))
        self.configs.append(config)
        self._got.append(got)
        self._lines.append(lines)

    def complaints(self) -> list[tuple[Config, Results, list[str]]]:
        """(config, what was got, what is wrong with it) of all that were added; begins anew."""
        configs, got, lines, results = self.configs, self._got, self._lines, self._results
        self.__init__()
        if results:
            tensors = [[getattr(r, part) for r in results] for part in ("error", "error_of_plain", "truth")]
            norms = [torch._foreach_norm(side, order) for side in tensors for order in (math.inf, 1, 2)]
            numbers = torch.stack([torch.stack(norm) for norm in norms]).T.tolist()  # waits for the device once
            for r, row in zip(results, numbers, strict=True):
                lines[r.config] += judge(r.name, _errors(r.count, *row), r.count, DTYPES[configs[r.config].dtype])
        return list(zip(configs, got, lines, strict=True))


def _errors(count, worst, total, norm, allowed_worst, allowed_total, allowed_norm, largest, _, size) -> Errors:
    """From the largest, the sum and the 2-norm of ours, plain attention's, and the truth's absolute numbers."""
    not_finite = 0 if math.isfinite(total) and math.isfinite(allowed_total) else count  # how many is not known here
    worst = math.inf if not_finite else worst
    means = total / count, allowed_total / count
    return Errors(not_finite, worst, means[0], norm, allowed_worst, means[1], allowed_norm, largest, size)


class Float8Screen:
    """The same for the forward of float8 inputs, judged by ``float8_problems``."""

    def __init__(self) -> None:
        self._deviations: dict[Config, Tensor] = {}

    @property
    def full(self) -> bool:
        return len(self._deviations) >= CONFIGS

    def look(self, config: Config) -> str:
        if (p := float8_problem(config)) is None:
            return "not served"
        self._deviations[config] = deviations(p, config)
        return "ok"

    def complaints(self) -> list[tuple[Config, None, str]]:
        configs, numbers = list(self._deviations), list(self._deviations.values())
        self.__init__()
        rows = torch.stack(numbers).tolist() if numbers else []
        return [(config, None, Deviations(*row).complaint()) for config, row in zip(configs, rows, strict=True)]
