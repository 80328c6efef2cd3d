"""What random configurations report: nothing where the rule is kept, and every way in which a kernel goes wrong."""

from __future__ import annotations

import functools
import math
import sys

import pytest
import random_configs
import torch
from cases import Config
from closed_form import ClosedForm
from screen import Screen

from flash_ext.testing import Problem

CONFIGS = (
    Config(2, 130, 150, 2, 1),
    Config(1, 90, 140, 4, 2, causal=True, dtype="fp16", head_dim_v=32),
    Config(1, 64, 64, 2, 2, dtype="fp32", bias="hqk", sinks=True),
    Config(1, 64, 64, 4, 2, lengths=((100, 70), (0, 9), (33, 80)), tail=5, causal=True),
)


def a_wrong_tile(x):
    x[..., 8:16] = x[..., 8:16].roll(1, -3 if x.dim() > 3 else 0)


def a_wrong_row(x):
    x.select(-3, x.shape[-3] // 2).mul_(1.1)


def a_row_left_out(x):
    x.select(-3, x.shape[-3] - 6).zero_()  # behind it a packed tail is zero anyway


def one_number_that_is_nan(x):
    x.flatten()[-1:].fill_(math.nan)


def one_infinite_number(x):
    x.flatten()[:1].fill_(math.inf)


def a_rounding_too_much(x):
    x.mul_(1 + 2.0**-6 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)))


WRONG = [a_wrong_tile, a_wrong_row, a_row_left_out, one_number_that_is_nan, one_infinite_number, a_rounding_too_much]


@functools.cache
def results(config: Config) -> tuple[dict, dict, dict]:
    """The CPU's, exact and plain ones."""
    problem = config.problem("cpu")
    closed = ClosedForm(config, problem)
    return problem.run("cpu"), closed.results(torch.float64, True), closed.results(problem.q.dtype, True)


def screened(config: Config, change) -> list[str]:
    """What the screen says of the CPU's results after ``change``."""
    got, exact, plain = results(config)
    got = {name: x.clone(memory_format=torch.contiguous_format) for name, x in got.items()}
    change(got)
    screen = Screen()
    screen.add(config, got, exact, plain)
    ((judged, _, lines),) = screen.complaints()
    assert judged == config and not screen.configs
    return lines


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_right_results_pass(config):
    assert screened(config, lambda got: None) == []


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_wrong_results_are_found(config, wrong):
    for name in ("out", "dq", "dk", "dv"):
        lines = screened(config, lambda got, name=name: wrong(got[name]))
        assert any(line.startswith(f"{name}:") for line in lines), name


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_wrong_lse_and_sums_are_found(config):
    for value in (1e-2, -math.inf, math.inf, math.nan):
        assert "lse" in screened(config, lambda got, value=value: got["lse"].flatten()[50:51].add_(value))[0]
    assert "shape" in screened(config, lambda got: got.update(lse=got["lse"][..., 1:]))[0]
    for name in {"dsinks", "dattn_bias"} if config.sinks else ():
        assert name in screened(config, lambda got, name=name: got[name].mul_(1.01))[0]


def test_results_of_many_configs_are_told_apart():
    screen = Screen()
    for i in range(6):
        got, exact, plain = results(CONFIGS[i % 4])
        screen.add(CONFIGS[i % 4], got | {"dk": got["dk"] * 1.1} if i == 3 else got, exact, plain)
    assert [bool(lines) for _, _, lines in screen.complaints()] == [i == 3 for i in range(6)]


def run(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["random_configs.py", "--path", "cpu", "--longest", "40", *arguments])
    return random_configs.main()


def test_counts_what_was_served(monkeypatch, capsys):
    assert run(monkeypatch, "--count", "12", "--seed", "3") == 0
    counted = capsys.readouterr().out
    assert "FAILED" not in counted and "cpu both seed 3" in counted


def test_a_failure_prints_how_to_repeat_it(monkeypatch, capsys):
    right = Problem.run

    def wrong(self, path=None, backward=True):
        results = right(self, path, backward)
        if self.q.shape[-2] == 1:
            results["out"].flatten()[:1].fill_(math.nan)
        return results

    monkeypatch.setattr(Problem, "run", wrong)
    config = "Config(seqlen_q=30, num_heads=1, num_heads_kv=1, seed=5)"
    assert run(monkeypatch, "--config", config) == 1
    said = capsys.readouterr().out
    assert f'--path cpu --pass both --config "{config}"\n    out: ' in said and "not finite" in said
    assert run(monkeypatch, "--config", config.replace("=1", "=2")) == 0


def test_what_a_call_raises_is_a_failure(monkeypatch, capsys):
    def broken(self, path=None, backward=True):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Problem, "run", broken)
    assert run(monkeypatch, "--count", "4", "--failures", "2") == 1
    assert capsys.readouterr().out.count("RuntimeError: no such kernel\n") == 2


def test_what_goes_wrong_once_is_a_failure(monkeypatch, capsys):
    """Right when it is run again: no reason to let it pass."""
    right, calls = Problem.run, []

    def wrong_once(self, path=None, backward=True):
        results = right(self, path, backward)
        if not calls:
            results["dk"].flatten()[3:4].add_(0.5)
        calls.append(self)
        return results

    monkeypatch.setattr(Problem, "run", wrong_once)
    assert run(monkeypatch, "--config", "Config(seqlen_q=30, num_heads=1, num_heads_kv=1, seed=5)") == 1
    assert "dk: error" in capsys.readouterr().out


@pytest.mark.parametrize(
    "config",
    [
        Config(seqlen_q=9, seqlen_k=9, window_size=(0, 0)),
        Config(seqlen_q=1, seqlen_k=82, window_size=(0, -1)),
        Config(seqlen_q=2, seqlen_k=2, causal=True),
        Config(seqlen_q=40, seqlen_k=2, dropout_p=0.1),
        Config(lengths=((64, 100), (8, 1))),
        Config(seqlen_q=40, seqlen_k=40, softmax_scale=0.0, dropout_p=0.1),
    ],
    ids=str,
)
def test_gradients_that_are_rounding_only_are_not_judged(config):
    assert random_configs.passes_of(config, "both") == [False]


@pytest.mark.parametrize(
    "config",
    [
        Config(seqlen_q=9, seqlen_k=9, window_size=(1, 0)),
        Config(seqlen_q=3, seqlen_k=82, window_size=(0, -1)),
        Config(seqlen_q=3, seqlen_k=3, causal=True),
        Config(seqlen_q=40, seqlen_k=2),
        Config(lengths=((64, 100), (8, 2))),
        Config(seqlen_q=40, seqlen_k=40, softmax_scale=0.0, causal=True),
    ],
    ids=str,
)
def test_gradients_are_judged(config):
    assert random_configs.passes_of(config, "both") == [True, False]
