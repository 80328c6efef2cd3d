"""What a build needs from the machine, each absence with its message; and how much it does at once."""

import sys

import pytest

from build_tools import environment, ninja_build
from build_tools.environment import GIB, Torch
from build_tools.shared import BuildError, build

CUDA_TORCH = Torch([3, 11], "2.14.1+cu130", "13.0", [], "/torch/lib", 1, None, [])
CPU_TORCH = Torch([3, 11], "2.14.1+cpu", None, [], "/torch/lib", 1, None, [])


def test_torch_missing_in_an_isolated_build(monkeypatch):
    monkeypatch.setattr(environment, "_PROBE", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    with pytest.raises(BuildError, match=r"Install torch first .*pip install --no-build-isolation -e \."):
        environment.find_torch()


def test_torch_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setattr(environment, "_PROBE", "raise ImportError('libcudnn.so.9: cannot open shared object file')")
    with pytest.raises(BuildError, match=r"cannot be imported .* libcudnn\.so\.9"):
        environment.find_torch()


def test_a_probe_that_dies_without_a_word_says_so(monkeypatch):
    monkeypatch.setattr(environment, "_PROBE", "import os; os._exit(7)")
    with pytest.raises(BuildError, match="cannot be imported .* ended with status 7"):
        environment.find_torch()


def test_torch_is_found_from_an_isolated_build(monkeypatch, tmp_path):
    # pip hides the caller's packages by a sitecustomize on PYTHONPATH; the caller's torch is still the one to use.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    import torch

    assert environment.find_torch().version == torch.__version__


def test_setuptools_too_old():
    environment.check_setuptools("77.0.3")
    with pytest.raises(BuildError, match=r"77 or newer .* this is 65\.5\.0: pip install --upgrade setuptools"):
        environment.check_setuptools("65.5.0")


def test_no_compiler(bare_machine):
    with pytest.raises(BuildError, match=r"No C\+\+ compiler .* apt-get install g\+\+"):
        environment.find_compiler()


def test_cxx_that_does_not_exist(bare_machine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX=no-such-compiler is not a program"):
        environment.find_compiler()


def test_python_headers_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BuildError, match=r"Python\.h is missing.*python3-dev"):
        environment.python_include()


def test_ninja_may_lie_beside_python(bare_machine, write_program, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(BuildError, match="pip install ninja"):
        build.find_ninja()
    ninja = write_program(tmp_path / "ninja", "")
    assert build.find_ninja() == str(ninja)


# ---- what will be built ----------------------------------------------------------------------------------------------


@pytest.fixture
def plan_with(bare_machine, write_program, monkeypatch):
    write_program(bare_machine / "g++", "")

    def make(torch: Torch) -> ninja_build.Plan:
        monkeypatch.setattr(ninja_build, "find_torch", lambda: torch)
        return ninja_build.make_plan()

    return make


def test_without_nvcc_the_cpu_part_is_built_and_the_install_says_so(plan_with):
    plan = plan_with(CUDA_TORCH)
    lines = []
    ninja_build.announce(plan, lines.append)
    assert plan.kernels == [] and plan.archs == []
    assert "the CPU part alone: no CUDA toolkit" in lines[0]


def test_cpu_only_torch_builds_the_cpu_part(plan_with, make_toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("13.0")))
    plan = plan_with(CPU_TORCH)
    assert plan.toolkit is None and "CPU-only" in plan.why


def test_announcement_names_files_jobs_and_minutes(plan_with, make_toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit("13.0")))
    lines = []
    plan = plan_with(CUDA_TORCH)
    ninja_build.announce(plan, lines.append)
    assert "CUDA kernels for 80+ptx, 90a with CUDA 13.0" in lines[0]
    assert f"{len(build.cpp_sources()) + len(plan.kernels)} files" in lines[1] and len(plan.kernels) > 20
    assert "jobs" in lines[1] and "min" in lines[1]


# ---- how much at once ------------------------------------------------------------------------------------------------


def machine(tmp_path, available_gib, groups, files):
    """A /proc and a /sys/fs/cgroup with these contents."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available_gib << 20} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    for name, text in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(text)
    return environment.free_memory(cgroup, proc)


def test_memory_of_the_machine(tmp_path):
    assert machine(tmp_path, 64, "", {}) == 64 * GIB


def test_memory_limit_of_a_cgroup_v2_container(tmp_path):
    files = {"a/b/memory.max": "max", "a/memory.max": str(8 * GIB), "a/memory.current": str(5 * GIB)}
    files["a/memory.stat"] = f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n"  # given back when memory is short
    assert machine(tmp_path, 64, "0::/a/b\n", files) == 5 * GIB


def test_memory_limit_of_a_cgroup_v1_container(tmp_path):
    files = {"memory/c/memory.limit_in_bytes": str(6 * GIB), "memory/c/memory.usage_in_bytes": str(2 * GIB)}
    assert machine(tmp_path, 64, "4:memory:/c\n3:cpu:/\n", files) == 4 * GIB


def test_memory_limit_seen_from_inside_a_container(tmp_path):
    # The group's path is the host's; inside, its files lie at the top.
    files = {"memory.max": str(4 * GIB), "memory.current": "0"}
    assert machine(tmp_path, 64, "0::/docker/123\n", files) == 4 * GIB


@pytest.mark.parametrize(
    ("free", "cores", "files", "jobs"), [(64, 8, 99, 8), (5, 8, 99, 2), (0, 8, 99, 1), (64, 8, 3, 3)]
)
def test_jobs_are_limited_by_memory_cores_and_files(monkeypatch, free, cores, files, jobs):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(environment, "free_memory", lambda: free * GIB)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda _: range(cores))
    assert environment.parallel_jobs(files) == jobs


def test_max_jobs_decides(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert environment.parallel_jobs(100) == 3
