"""The C++ tests beside this file, built by CMake in build/cmake (where ``make ctest`` builds them too)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cmake"
NAMES = sorted(path.stem for path in Path(__file__).parent.glob("test_*.cpp"))


@pytest.fixture(scope="module")
def folder() -> Path:
    cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
    if cmake is None or ninja is None:
        pytest.skip("no cmake and ninja")
    configure = [cmake, "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DFLASH_EXT_CUDA=OFF"]
    build = [cmake, "--build", str(BUILD)]
    for command in (configure, build):
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    return BUILD


@pytest.mark.parametrize("name", [*NAMES, "attention"])
def test_host(name: str, folder: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([str(folder / name)], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
