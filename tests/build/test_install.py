"""A wheel built in isolation, as pip does by default: against this environment's torch, with the sources for the JIT inside."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

from build_tools.shared import ROOT

OFFLINE = (
    "No matching distribution found for setuptools",
    "Could not find a version",
    "Failed to establish a new connection",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", str(folder), str(ROOT)]
    env = {**os.environ, "FLASH_EXT_ARCHS": "none"}
    result = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    output = result.stdout + result.stderr
    if result.returncode != 0 and any(text in output for text in OFFLINE):
        pytest.skip("pip cannot get setuptools and ninja for an isolated build here")
    assert result.returncode == 0, output
    assert f"against torch {torch.__version__}" in output
    assert "NO CUDA kernels: FLASH_EXT_ARCHS=none" in output  # the install says so
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_carries_extension_facts_and_sources(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("flash_ext/_C.") and name.endswith(".so") for name in names)
    assert {"flash_ext/_build_facts.json", "flash_ext/csrc/instances.h", "flash_ext/csrc/binding.cpp"} <= set(names)
    assert {"flash_ext/py.typed", "flash_ext/_C.pyi"} <= set(names)
    assert any(name.endswith(".cu") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "bench/", "build"))]


def test_wheel_does_not_ask_for_a_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert all("extra ==" in line for line in required)


def test_wheel_runs_and_knows_its_sources(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = """
import pathlib, torch, flash_ext
from flash_ext import jit
q = torch.randn(1, 8, 2, 16)
assert flash_ext.forward(q, q, q).shape == q.shape
assert jit.facts()["archs"] == [] and jit.load is not None
assert all(pathlib.Path(path).is_file() for path in jit.sources())
print(flash_ext.__file__)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.startswith(str(tmp_path)), result.stderr


def test_an_editable_install_is_found_beside_the_clone(tmp_path):
    """Where Python runs beside the clone, its folder is a candidate for the import too: only sys.path comes before that."""
    clone = tmp_path / "flash_ext"
    (clone / "flash_ext").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements-dev.txt"):
        shutil.copy(ROOT / name, clone)
    (clone / "flash_ext" / "__init__.py").write_text('__version__ = "1"\nis_package = True\n')
    script = "from setuptools.build_meta import build_editable; build_editable('wheel')"
    subprocess.run([sys.executable, "-c", script], cwd=clone, check=True, capture_output=True)
    (path,) = (clone / "wheel").glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(path).extractall(site)
    script = f"import site; site.addsitedir({str(site)!r}); import flash_ext; assert flash_ext.is_package"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
