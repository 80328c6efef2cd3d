"""Every case of ``cases.py`` and ``behaviours.py`` on every path; what a path may leave to another one is written here."""

from __future__ import annotations

import behaviours
import cases
import pytest
import torch

import flash_ext
from flash_ext import dispatch
from flash_ext.testing import Problem, check, poison

IN_FLOAT32 = ("lse_alone_has_a_gradient", "merged_halves_equal_the_whole")  # Hopper's kernels are for 16 and 8 bit


def must_serve(path: str, problem: Problem) -> bool:
    """Forward and backward. Said apart from the table of kernels, so that rows which get lost there are missed."""
    if path in ("reference", "cpu"):
        return True
    dims = (problem.q.shape[-1], problem.v.shape[-1])
    if path == "simt":
        return max(dims) <= 256
    if problem.q.dtype == torch.float32:
        return path == "sm80" and max(dims) <= 128
    return max(dims) <= 256 and (path == "sm80" or all(dim % 8 == 0 for dim in dims))


def check_what_is_served(problem: Problem, path: str) -> str:
    """Why the path has no kernel for a problem that it may leave to another one; "" where it has one."""
    try:
        check(problem, path)
    except NotImplementedError as error:
        assert not must_serve(path, problem), error
        return str(error)
    return ""


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str, path: str, device: str) -> None:
    on_gpu, on_cpu = cases.CASES[name]
    problem = (on_gpu if device == "cuda" else on_cpu).problem(device)
    with poison():
        if why := check_what_is_served(problem, path):
            pytest.skip(why)


@pytest.mark.parametrize("name", behaviours.BEHAVIOURS)
def test_behaviour(name: str, path: str, device: str) -> None:
    try:
        with poison():
            behaviours.BEHAVIOURS[name](device)
    except NotImplementedError as error:
        assert path == "sm90" and name in IN_FLOAT32, error
        pytest.skip(str(error))


@pytest.mark.parametrize("gpu_path", dispatch.CUDA_PATHS)
def test_the_table_has_what_must_be_served(gpu_path: str, monkeypatch) -> None:
    """Without a GPU: what dispatch would choose on a Hopper one where everything is built."""

    def choose(call, table, can_run, row_name, path):
        return dispatch.choose(call._replace(capability=(9, 0)), table, lambda row: True, row_name, path)

    monkeypatch.setattr("flash_ext.plan.choose", choose)
    monkeypatch.setattr("flash_ext.jit.is_ready", lambda *_: True)
    for name, (_, on_cpu) in cases.CASES.items():
        problem = on_cpu.problem("cpu")
        try:
            with flash_ext.use_path(gpu_path):
                choice = flash_ext.explain(problem.q, problem.k, problem.v, **problem.options)
        except NotImplementedError as error:
            assert not must_serve(gpu_path, problem), f"{name}: {error}"
        else:
            assert must_serve(gpu_path, problem) and not isinstance(choice.backward, str), name
