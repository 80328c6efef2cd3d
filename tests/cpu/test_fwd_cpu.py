"""cpu/fwd_cpu.cpp: what is particular to this path. (Its arithmetic: tests/host/test_fwd_cpu.cpp and tests/test_cases.py.)"""

from __future__ import annotations

import resource

import pytest
import torch

import flash_ext
from flash_ext.testing import Problem, check


@pytest.fixture(autouse=True)
def on_cpu_path():
    with flash_ext.use_path("cpu"):
        yield


@pytest.fixture
def threads():
    """Sets torch's number of threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), (3, 300), (257, 17), (512, 512)])
def test_any_head_dim(dtype: torch.dtype, head_dim: int, head_dim_v: int) -> None:
    q, k = torch.randn(1, 70, 4, head_dim).to(dtype), torch.randn(1, 90, 2, head_dim).to(dtype)
    check(Problem(q, k, torch.randn(1, 90, 2, head_dim_v).to(dtype), {"causal": True}))


def test_same_bits_for_any_number_of_threads(threads) -> None:
    q, k, v = (torch.randn(2, 300, 3, 40) for _ in range(3))
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append(flash_ext.forward(q, k, v, causal=True, return_lse=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_inputs_are_unchanged_and_nan_is_not_hidden() -> None:
    q, k, v = (torch.randn(1, 80, 1, 16) for _ in range(3))
    copies = [t.clone() for t in (q, k, v)]
    flash_ext.forward(q, k, v)
    assert all(torch.equal(t, copy) for t, copy in zip((q, k, v), copies, strict=True))
    q[0, 3] = torch.nan
    out = flash_ext.forward(q, k, v)
    assert out[0, 3].isnan().all() and out[0, [0, 2, 4, 79]].isfinite().all()


def test_memory_is_linear() -> None:
    """The score matrix alone would be 2 GiB."""
    q, k, v = (torch.randn(1, 23000, 1, 8) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = flash_ext.forward(q, k, v, causal=True)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 64 * 1024 and out.isfinite().all()
