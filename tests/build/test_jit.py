"""Compiling on first use, and the messages where that cannot be or the extension does not load."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_ext import _build, jit

HOPPER, AMPERE = (9, 0), (8, 0)


class FakeExtension:
    """Two rows, of which the first is built."""

    def instances(self):
        return [(0, 2, 2, 128, 128, 0, 0, 0), (0, 1, 2, 128, 128, 0, 0, 0)]

    def row_name(self, row):
        return ["fwd sm90 bf16 128 full dense plain", "fwd sm80 bf16 128 full dense plain"][row]

    def is_built(self, row):
        return row == 0


@pytest.fixture
def fake_extension(monkeypatch):
    facts = {"torch": torch.__version__, "archs": ["90a"], "contract": _build.contract(), "cpu_only_because": ""}
    monkeypatch.setattr(jit, "extension", FakeExtension)
    monkeypatch.setattr(jit, "facts", lambda: facts)
    return facts


def set_jit(monkeypatch, why_not):
    monkeypatch.setattr(jit, "_why_no_jit", lambda: why_not)


def test_rows_run_where_they_are_built_or_can_be(fake_extension, monkeypatch):
    set_jit(monkeypatch, "no toolkit")
    assert jit.can_run(0, HOPPER)
    assert not jit.can_run(0, AMPERE)
    assert not jit.can_run(1, HOPPER)
    fake_extension["archs"] = ["80", "90a"]
    assert jit.can_run(0, HOPPER) and not jit.can_run(0, AMPERE)
    set_jit(monkeypatch, None)
    assert jit.can_run(1, HOPPER)


def test_no_kernel_image_for_this_gpu(fake_extension, monkeypatch):
    set_jit(monkeypatch, "FLASH_EXT_JIT=0 forbids compiling it now.")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: AMPERE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(
        RuntimeError,
        match=r"No kernel image of 'fwd sm90 .* for NVIDIA A100 \(sm_80\): .* for 90a, .*FLASH_EXT_ARCHS=80",
    ):
        jit.prepare(0, device=0)


def test_a_missing_row_is_compiled_when_it_is_first_needed(fake_extension, monkeypatch):
    set_jit(monkeypatch, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    compiled = []
    monkeypatch.setattr(jit, "load", compiled.append)
    for row in (0, 1):  # the first is there
        jit.prepare(row, device=0)
    assert compiled == [1]


def test_sources_changed_since_the_build(fake_extension):
    fake_extension["contract"] = "of an older tree"
    with pytest.raises(_build.BuildError, match="csrc/ has changed since flash_ext._C was built. Rebuild it"):
        jit.load(1)


def test_a_row_that_does_not_exist_is_named():
    rows = jit.extension().instances()
    with pytest.raises(ValueError, match=rf"row must be in 0 \.\.\. {len(rows) - 1}, got {len(rows)}"):
        jit.load(len(rows))
    with pytest.raises(ValueError, match=r"key must be a row of the kernel table, got \(0, 0, 0, 1, 1, 0, 0, 0\)"):
        jit.load((0, 0, 0, 1, 1, 0, 0, 0))
    for wrong in ("x", None, 1.5):
        with pytest.raises(TypeError, match="row must be an int, or a key"):
            jit.load(wrong)


def test_jit_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("FLASH_EXT_JIT", "0")
    assert "FLASH_EXT_JIT=0" in jit._why_no_jit.__wrapped__()


def test_flags_and_sources_for_torch_cpp_extension(monkeypatch):
    if torch.version.cuda is None or _build.find_toolkit(torch.version.cuda) is None:
        pytest.skip("needs a CUDA toolkit")
    monkeypatch.delenv("FLASH_EXT_ARCHS", raising=False)
    assert any("arch=compute_90a" in flag for flag in jit.cuda_flags()) or torch.cuda.is_available()
    from torch.utils import cpp_extension

    assert (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").is_file()
    assert all(Path(path).is_file() for path in jit.sources())
    assert any(path.endswith("binding.cpp") for path in jit.sources())


def test_compiling_leaves_the_environment_alone(monkeypatch, tmp_path):
    """ninja of a virtual environment that was not activated, and the toolkit, are found for the compilation alone."""
    from torch.utils import cpp_extension

    ninja = tmp_path / "ninja"
    ninja.touch(mode=0o755)
    toolkit = _build.Toolkit(tmp_path, (13, 0))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    seen = {}

    def load(name, **_):
        seen[name] = (shutil.which("ninja"), cpp_extension.CUDA_HOME)

    monkeypatch.setattr(cpp_extension, "load", load)
    for path in ("/nowhere", None):
        monkeypatch.setenv("PATH", path) if path else monkeypatch.delenv("PATH")
        before = dict(os.environ), cpp_extension.CUDA_HOME
        jit._compile("row", toolkit)
        assert (dict(os.environ), cpp_extension.CUDA_HOME) == before
        ((found, home),) = seen.values()
        assert home == str(tmp_path)
        assert found == str(ninja) or path is None  # then `which` looks in the system's folders
        seen.clear()
    monkeypatch.setenv("PATH", "/nowhere")
    ninja.unlink()
    with pytest.raises(_build.BuildError, match="pip install ninja"):
        jit._compile("row", toolkit)


@pytest.mark.parametrize("name", ["fwd_sm90_d64", "fwd_sm90_fp8_d64", "bwd_sm90_d64", "bwd_sm90_d192"])
def test_hopper_files_compile_for_older_gpus(name, tmp_path):
    """torch's load compiles every file for all architectures: only what the kernels' guards leave out may need sm_90."""
    toolkit = _build.find_toolkit(torch.version.cuda)
    if toolkit is None:
        pytest.skip("needs a CUDA toolkit")
    quick = ["-std=c++20", "-O1", "-Xptxas=-O0", f"-I{_build.CSRC}", *_build.gencode(["80"])]
    source, result = _build.CSRC / "sm90" / f"{name}.cu", tmp_path / "kernel.o"
    subprocess.run([str(toolkit.nvcc), *quick, "-c", str(source), "-o", str(result)], check=True)


# ---- an extension that does not load ---------------------------------------------------------------------------------


@pytest.fixture
def package_with_broken_extension(tmp_path):
    """A flash_ext whose _C wants a symbol that this torch does not have."""
    package = tmp_path / "flash_ext"
    package.mkdir()
    for name in ("_build.py", "jit.py"):
        shutil.copy(Path(jit.__file__).with_name(name), package)
    (package / "__init__.py").touch()
    (tmp_path / "csrc").symlink_to(_build.CSRC)
    (package / "_build_facts.json").write_text('{"torch": "2.9.0", "archs": ["90a"]}')
    suffix = subprocess.check_output(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"]
    )
    source = tmp_path / "broken.cpp"
    source.write_text('extern "C" int gone_since_2_9(); extern "C" int PyInit__C() { return gone_since_2_9(); }')
    library = package / f"_C{suffix.decode().strip()}"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-z,now", str(source), "-o", str(library)], check=True)
    return tmp_path


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_undefined_symbol_after_a_torch_upgrade(package_with_broken_extension):
    script = "from flash_ext import jit; jit.extension()"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=package_with_broken_extension, capture_output=True, text=True
    )
    last = result.stderr.strip().splitlines()[-1]
    assert "built against torch 2.9.0" in last and f"with torch {torch.__version__}" in last
    assert "undefined symbol: gone_since_2_9" in last and "Rebuild it: pip install" in last


# ---- one row, really compiled -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not _build.sources_of_row("fwd simt fp32 64"), reason="no kernel files")
def test_one_row_is_compiled_and_merged_into_the_registry(tmp_path):
    """It alone, with a line for who waits, and once: another process takes it from torch's cache."""
    if torch.version.cuda is None or _build.find_toolkit(torch.version.cuda) is None:
        pytest.skip("needs a CUDA toolkit")
    jit.extension()  # not part of what is timed
    script = """
import ctypes, time, flash_ext
from flash_ext import jit
module = jit.extension()
rows = range(len(module.instances()))
row = next(r for r in rows if module.row_name(r).startswith("fwd simt"))
start = time.perf_counter()
assert jit.load(row) == row and module.is_built(row)
seconds = time.perf_counter() - start
launchers_of = ctypes.CDLL(jit._loaded[row]).flash_variant_launchers
launchers_of.restype = ctypes.POINTER(ctypes.c_void_p)  # the first is the forward's
assert [r for r in rows if launchers_of(r)[0]] == [row]
print("SECONDS", seconds)
"""
    env = {
        **os.environ,
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
        "FLASH_EXT_ARCHS": "90a",
        "CUDA_HOME": "",
        "CUDA_PATH": "",
    }
    env = {name: value for name, value in env.items() if value}
    built = []
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", script], env=env, cwd=_build.CSRC.parent, capture_output=True, text=True
        )
        assert "SECONDS" in result.stdout, result.stderr
        assert "compiling 'fwd simt" in result.stderr  # the user is told what is waited for
        assert float(result.stdout.split("SECONDS")[1]) < 180  # what it takes alone is recorded (test_bench_build.py)
        built.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")})
    assert built[0] == built[1] and built[0]
