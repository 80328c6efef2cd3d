"""Toolkits, programs and machines made of small files, so that every error of a build can be provoked anywhere."""

from pathlib import Path

import pytest

from build_tools.shared import build


@pytest.fixture
def write_program():
    """write_program(path, shell script) -> path, executable."""

    def write(path: Path, script: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture
def make_toolkit(tmp_path, write_program):
    """make_toolkit("13.0") -> folder with bin/nvcc and include/cuda_runtime_api.h."""

    def make(version: str, headers: bool = True) -> Path:
        root = tmp_path / f"cuda-{version}"
        says = f'echo "#\\$ TOP={root}" >&2; echo "Cuda compilation tools, release {version}, V{version}.1"'
        write_program(root / "bin" / "nvcc", says)
        if headers:
            (root / "include").mkdir()
            (root / "include" / "cuda_runtime_api.h").touch()
        return root

    return make


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine with no toolkit and no compiler; returns the one folder on its PATH."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "VIRTUAL_ENV", "FLASH_EXT_ARCHS", "MAX_JOBS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(build, "usual_roots", list)
    return folder
