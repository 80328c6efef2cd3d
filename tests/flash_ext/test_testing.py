"""The rule itself: it has to pass what is exact enough and to catch what is not."""

from __future__ import annotations

import math

import pytest
import torch

from flash_ext import testing
from flash_ext.extension import _C
from flash_ext.testing import Problem, check, failures, poison


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


def test_check_catches_a_wrong_option():
    x = torch.randn(1, 32, 2, 16)
    problem = Problem(x, x, x, {"causal": True})
    check(problem, "cpu")
    wrong = problem.run("cpu")
    problem.options = {"causal": False}
    exact = problem.reference()
    assert failures(wrong, exact, exact, torch.float32)


def test_draws_are_judged_together():
    def problem(seed):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, n, 2, 16, dtype=torch.float16) for n in (40, 2, 2))
        return Problem(q, k, v)

    draws = [problem(seed) for seed in range(12)]
    testing.check_draws(draws, "cpu")
    draws[3].options = {"softmax_scale": math.nan}
    with pytest.raises(ValueError, match="softmax_scale"):
        testing.check_draws(draws, "cpu")


def test_poison_is_lifted():
    with poison():
        assert all(t.isnan().all() for t in _C.empty_results(torch.zeros(1, 2, 3, 4), 4, torch.float32))
        float8 = torch.zeros(5, 3, 4).to(torch.float8_e4m3fn)
        out, lse = _C.empty_results(float8, 8, torch.float16)
        assert out.dtype == torch.float16 and out.shape == (5, 3, 8) and out.isnan().all()
        assert lse.dtype == torch.float32 and lse.shape == (3, 5) and lse.isnan().all()
    _C.poison(0.0)
    assert not _C.empty_results(torch.zeros(1, 2, 3, 4), 4, torch.float32)[0].any()
    _C.poison(None)


def test_self_check_passes_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(testing, "available_paths", lambda: ["cpu"])
    problems = list(testing.self_check_problems("cpu"))[::5]
    monkeypatch.setattr(testing, "self_check_problems", lambda device: iter(problems))
    assert testing.main() == 0
    assert "all ok" in capsys.readouterr().out


def test_self_check_fails_loudly(monkeypatch, capsys):
    def fail(*_):
        raise AssertionError("wrong")

    monkeypatch.setattr(testing, "available_paths", lambda: ["cpu"])
    monkeypatch.setattr(testing, "check", fail)
    monkeypatch.setattr(testing, "self_check_problems", lambda device: iter([("one", None)]))
    assert testing.main() == 1
    assert "FAILED: wrong" in capsys.readouterr().out
