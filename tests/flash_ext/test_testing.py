"""Problems, the check that judges them, poison and the self check."""

from __future__ import annotations

import math

import pytest
import torch

from flash_ext import testing
from flash_ext.extension import _C
from flash_ext.testing import Problem, check, poison
from flash_ext.tolerance import failures


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
