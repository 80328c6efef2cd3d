"""The rule itself: it has to pass what is exact enough and to catch what is not."""

from __future__ import annotations

import math

import torch

from flash_ext.tolerance import failures


def results(dtype, error=0.0, n=8192):
    truth = torch.linspace(-1, 1, n, dtype=torch.float64)
    return {"out": (truth + error).to(dtype)}, {"out": truth}


def test_16_bit_is_measured_by_plain_attention():
    got, exact = results(torch.float64, error=1e-3)
    for allowed, bad in ((1e-3, False), (0.9e-3, False), (0.7e-3, True), (0.4e-3, True)):
        plain = {"out": exact["out"] + allowed}
        assert bool(failures(got, exact, plain, torch.bfloat16)) == bad
    one_outlier = {"out": exact["out"].clone()}
    one_outlier["out"][7] += 3e-3
    assert "2 times" in failures(one_outlier, exact, {"out": exact["out"] + 1e-3}, torch.bfloat16)[0]


def test_fp32_is_measured_in_norm():
    got, exact = results(torch.float64, error=1e-6)
    assert not failures(got, exact, exact, torch.float32)
    got, exact = results(torch.float64, error=1e-4)
    assert "norm" in failures(got, exact, exact, torch.float32)[0]


def test_lse_and_shapes():
    lse = {"lse": torch.tensor([-math.inf, 0.0, 1000.0])}
    assert not failures({"lse": torch.tensor([-math.inf, 5e-5, 1000.05])}, lse, lse, torch.bfloat16)
    for wrong in ([0.0, 0.0, 1000.0], [-math.inf, 2e-4, 1000.0], [-math.inf, 0.0, 1000.2], [math.nan, 0.0, 1000.0]):
        assert failures({"lse": torch.tensor(wrong)}, lse, lse, torch.bfloat16)
    assert "shape" in failures({"lse": torch.zeros(2)}, lse, lse, torch.bfloat16)[0]


def test_not_finite():
    got, exact = results(torch.float64)
    got["out"][5] = math.nan
    assert "not finite" in failures(got, exact, exact, torch.bfloat16)[0]
