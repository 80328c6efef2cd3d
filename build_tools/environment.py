"""What the machine offers: the torch to build against, the host compiler, cores and memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .shared import BuildError

_PROBE = """
import json, sys, torch
from torch.utils import cpp_extension
cuda = torch.cuda.is_available()
with open("/proc/self/maps") as maps:
    cudart = {line.split()[-1] for line in maps if "libcudart.so" in line}
print("PROBE" + json.dumps({
    "python": sys.version_info[:2],
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "include": cpp_extension.include_paths(),
    "lib": cpp_extension.TORCH_LIB_PATH,
    "abi": int(torch.compiled_with_cxx11_abi()),
    "cudart": min(cudart, default=None),
    "capabilities": [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


@dataclass(frozen=True)
class Torch:
    """The facts about one installed torch that a build needs."""

    python: list[int]
    version: str
    cuda: str | None  # "13.0"; None: a CPU-only torch
    include: list[str]
    lib: str
    abi: int
    cudart: str | None  # the CUDA runtime that torch itself has loaded
    capabilities: list[list[int]]  # of the GPUs present


def find_torch() -> Torch:
    """The torch of the environment that called pip. Never installs one.

    In an isolated build this process sees only the build's requirements. The calling environment is still there: pip
    runs the same interpreter and hides its packages through PYTHONPATH; uv and `build` leave its folder in VIRTUAL_ENV.
    So torch is asked for its facts in a process of its own, which also keeps torch out of this one.
    """
    bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")}
    attempts = [(sys.executable, dict(os.environ)), (sys.executable, bare)]
    attempts += [(f"{os.environ[k]}/bin/python", bare) for k in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(k)]
    broken = ""
    for python, env in attempts:
        if not os.access(python, os.X_OK):
            continue
        result = subprocess.run([python, "-c", _PROBE], env=env, cwd="/", capture_output=True, text=True)
        facts = [line[5:] for line in result.stdout.splitlines() if line.startswith("PROBE")]
        if facts:
            torch = Torch(**json.loads(facts[0]))
            if tuple(torch.python) == sys.version_info[:2]:
                return torch
        elif "No module named 'torch'" not in result.stderr:
            said = result.stderr.strip().splitlines()
            broken = said[-1] if said else f"{python} ended with status {result.returncode}"
    raise BuildError(
        (f"torch cannot be imported in the environment that runs this build: {broken}. " if broken else "")
        + f"No torch for Python {sys.version_info[0]}.{sys.version_info[1]} was found (looked from {sys.executable}). "
        "Install torch first (pip install torch), then: pip install --no-build-isolation -e . (with setuptools, ninja)"
    )


def check_setuptools(version: str) -> None:
    """Without build isolation it is the environment's own, which may not understand pyproject.toml."""
    if int(version.split(".")[0]) < 77:
        raise BuildError(f"setuptools 77 or newer is needed, this is {version}: pip install --upgrade setuptools")


def find_compiler() -> str:
    """The C++ compiler that CXX names, else the first usual one."""
    named = os.environ.get("CXX", "")
    for name in [named] if named else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path
    what = f"CXX={named} is not a program" if named else "No C++ compiler (g++, c++, clang++) is on PATH"
    raise BuildError(f"{what}. Install one that knows C++20 (Debian: apt-get install g++) or set CXX.")


def python_include() -> str:
    include = sysconfig.get_paths()["include"]
    if not os.path.isfile(f"{include}/Python.h"):
        raise BuildError(f"{include}/Python.h is missing. Install it (Debian: apt-get install python3-dev).")
    return include


# ---- how much at once ------------------------------------------------------------------------------------------------

GIB = 1 << 30
MEMORY_PER_JOB = 2 * GIB  # the largest of our files peaks below it


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or cgroup v2's "max"
        return None


def _cgroup_folders(root: Path, own: str) -> list[Path]:
    """This process's memory groups and their parents; every one of them can limit it. cgroup v2 and v1."""
    folders = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root if controllers == "" else root / "memory"
            here = top / path.lstrip("/")
            folders += [here, *(p for p in here.parents if top in (p, *p.parents))]
    return folders


def _file_cache(folder: Path) -> int:
    """Counted as used, but given back when memory is short."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))


def free_memory(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> int:
    """Bytes that this build may use: the machine's, or less where a container limits it."""
    meminfo = (proc / "meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    groups = proc / "self" / "cgroup"
    for folder in _cgroup_folders(cgroup, groups.read_text() if groups.exists() else ""):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit_bytes, used_bytes = _read_int(folder / limit), _read_int(folder / used)
            if limit_bytes is not None and used_bytes is not None:
                free = min(free, limit_bytes - used_bytes + _file_cache(folder))
    return max(free, 0)


def parallel_jobs(files: int) -> int:
    if wanted := os.environ.get("MAX_JOBS"):
        if not wanted.strip().isdecimal():
            raise BuildError(f"MAX_JOBS={wanted} is not a number. Unset it, or set it to the most jobs at once.")
        return max(1, int(wanted))
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, free_memory() // MEMORY_PER_JOB, files))
