"""What a user sees when a build cannot be: setup.py ends with one readable message, not with a traceback."""

import os
import re
import subprocess
import sys

import pytest

from build_tools.shared import ROOT

# setup.py as pip calls it, on a machine that `change` makes out of this one.
SCRIPT = """
import runpy, sys
sys.path.insert(0, ".")
from build_tools import environment, ninja_build
from build_tools.shared import build
build.usual_roots = list
{change}
sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", {folder!r}, "--build-temp", {folder!r}]
runpy.run_path("setup.py", run_name="__main__")
"""
NO_TORCH = 'environment._PROBE = "raise ModuleNotFoundError(\\"No module named \'torch\'\\")"'
SOME_TORCH = (
    "ninja_build.find_torch = lambda: environment.Torch([3, 11], '2.14', '13.0', [], '/torch/lib', 1, None, [])"
)


def message(change: str, folder: str, **env: str) -> str:
    usual = {name: value for name, value in os.environ.items() if name not in ("CUDA_HOME", "CUDA_PATH", "CXX")}
    command = [sys.executable, "-c", SCRIPT.format(change=change, folder=folder)]
    result = subprocess.run(command, cwd=ROOT, env={**usual, **env}, capture_output=True, text=True)
    assert result.returncode != 0 and "Traceback" not in result.stderr, result.stderr
    *_, last = result.stderr.strip().splitlines()
    assert last.startswith("flash_ext was not built: ")
    return last


def test_torch_missing(tmp_path):
    assert "Install torch first (pip install torch), then: pip install --no-build-isolation" in message(
        NO_TORCH, str(tmp_path)
    )


def test_no_compiler(tmp_path, bare_machine):
    assert "No C++ compiler (g++, c++, clang++) is on PATH. Install one" in message(SOME_TORCH, str(tmp_path))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("", "CUDA_HOME=/nowhere is not a CUDA toolkit"),
        ("12.8", "torch is built for CUDA 13.0, but the toolkit is CUDA 12.8"),
    ],
)
def test_wrong_toolkit(version, words, tmp_path, bare_machine, make_toolkit, write_program):
    write_program(bare_machine / "g++", "")
    root = str(make_toolkit(version)) if version else "/nowhere"
    assert words in message(SOME_TORCH, str(tmp_path), CUDA_HOME=root, FLASH_EXT_ARCHS="90a")


def test_nvcc_too_old(tmp_path, bare_machine, make_toolkit, write_program):
    write_program(bare_machine / "g++", "")
    older_torch = SOME_TORCH.replace("13.0", "12.6")
    assert "too old: CUDA 12.1" in message(older_torch, str(tmp_path), CUDA_HOME=str(make_toolkit("12.1")))


@pytest.mark.parametrize(("name", "value"), [("FLASH_EXT_ARCHS", "hopper"), ("MAX_JOBS", "many")])
def test_wrong_environment_variable(name, value, tmp_path, bare_machine, write_program):
    write_program(bare_machine / "g++", "")
    assert value in message(SOME_TORCH, str(tmp_path), **{name: value})


def test_setup_fetches_nothing():
    """No network, no git, no submodules: what it builds is in the tree, and torch in the environment."""
    files = [ROOT / "setup.py", ROOT / "flash_ext" / "_build.py", *(ROOT / "build_tools").glob("*.py")]
    for path in files:
        assert not re.search(r"\b(urllib|http\w*|socket|requests|git|curl|wget)\b", path.read_text()), path.name
    assert not (ROOT / ".gitmodules").exists()
