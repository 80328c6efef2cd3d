"""Paths that this machine can test. Tests that need a CUDA device are marked ``gpu`` and skipped without one."""

from __future__ import annotations

import pytest
import torch

import flash_ext
from flash_ext.dispatch import CUDA_PATHS, capability_needed
from flash_ext.testing import device_of

CPU_PATHS = ("reference", "cpu")
GPU_PATHS = tuple(reversed(CUDA_PATHS))
PATHS = [*CPU_PATHS, *(pytest.param(path, marks=pytest.mark.gpu) for path in GPU_PATHS)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="I/N", help="every N-th test from the I-th on (0 to N - 1): N processes run all"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        first, step = map(int, share.split("/"))
        items[:] = items[first::step]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest):
    """Every path in turn, in use for the length of the test."""
    if request.param in GPU_PATHS:
        arch, capability = CUDA_PATHS[request.param], torch.cuda.get_device_capability()
        if why := capability_needed(arch, capability):
            pytest.skip(why)
    with flash_ext.use_path(request.param):
        yield request.param


@pytest.fixture
def device(path: str) -> str:
    return device_of(path)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
