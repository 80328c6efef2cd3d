"""cpu/bwd_cpu.cpp: what is particular to this path. (Its arithmetic: tests/host/test_bwd_cpu.cpp and tests/test_cases.py.)"""

from __future__ import annotations

import resource

import pytest
import torch

import flash_ext
from flash_ext.testing import Problem, check_draws, poison


@pytest.fixture(autouse=True)
def on_cpu_path():
    with flash_ext.use_path("cpu"):
        yield


def test_numerical_derivative() -> None:
    """Independent of any reference: the loss along a direction, in steps."""
    shapes = {"q": (1, 9, 2, 8), "k": (1, 11, 1, 8), "v": (1, 11, 1, 8), "attn_bias": (1, 2, 9, 11), "sinks": (2,)}
    leaves = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    dout, dlse = torch.randn(1, 9, 2, 8), torch.randn(1, 2, 9)

    def loss(**t: torch.Tensor) -> torch.Tensor:
        out, lse = flash_ext.forward(**t, causal=True, softcap=3.0, return_lse=True)
        return (out.double() * dout).sum() + (lse.double() * dlse).sum()

    gradients = torch.autograd.grad(loss(**leaves), list(leaves.values()))
    for name, gradient in zip(leaves, gradients, strict=True):
        direction, h = torch.randn(shapes[name]), 1e-2
        with torch.no_grad():
            ends = [loss(**{**leaves, name: leaves[name] + step * direction}) for step in (h, -h)]
        want = (ends[0] - ends[1]).item() / (2 * h)
        assert (gradient * direction).sum().item() == pytest.approx(want, rel=2e-2, abs=2e-2), name


def test_same_bits_for_any_number_of_threads() -> None:
    q, k, v = torch.randn(1, 500, 4, 24), torch.randn(1, 400, 2, 24), torch.randn(1, 400, 2, 24)
    problem = Problem(q, k, v, {"window_size": (200, 30), "attn_bias": torch.randn(1, 1, 400)})
    before, results = torch.get_num_threads(), []
    for number in (1, 2, 7, 7):
        torch.set_num_threads(number)
        results.append(problem.run("cpu"))
    torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result)


def test_every_element_is_written() -> None:
    """Keys that no query sees, and a head that is nothing but them, have a gradient of zero."""
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 300, 2, 16), torch.randn(1, 300, 2, 16)
    with poison():
        results = Problem(q, k, v, {"window_size": (3, 0)}).run("cpu")
    for name in ("dk", "dv"):
        assert (results[name][:, :293] == 0).all() and results[name].isfinite().all()


def test_memory_is_linear() -> None:
    """The score matrix alone would be 1 GiB."""
    q, k, v = (torch.randn(1, 16400, 1, 8, requires_grad=True) for _ in range(3))
    out = flash_ext.forward(q, k, v, causal=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out.sum().backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 64 * 1024 and q.grad.isfinite().all()


@pytest.mark.parametrize("seqlen_k", [2, 3, 40])
def test_exact_where_few_numbers_decide(seqlen_k: int) -> None:
    """dsinks has one number per head, and with few keys delta, taken from the rounded out, weighs most. One draw says
    little: plain attention may be exact by luck."""
    options = {"sinks": torch.tensor([-1.0, 0.5])}
    draws = []
    for seed in range(12):
        q, k, v = torch.randn(1, 60, 2, 64), *torch.randn(2, 1, seqlen_k, 2, 64)
        draws.append(Problem(q.bfloat16(), k.bfloat16(), v.bfloat16(), options, seed=seed))
    check_draws(draws, "cpu")
