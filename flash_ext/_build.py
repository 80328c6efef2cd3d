"""Toolkit, architectures, source files and flags of a build: what setup.py, the JIT and the benchmarks share.

Standard library only. setup.py loads this file by its path, where neither torch nor flash_ext can be imported.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# An installed wheel carries the sources inside the package, the source tree beside it.
CSRC = _HERE / "csrc" if (_HERE / "csrc").is_dir() else _HERE.parent / "csrc"

OLDEST_NVCC = (12, 6)
CPU_ONLY = "FLASH_EXT_ARCHS=none builds the CPU part alone"
REBUILD = "pip install --no-build-isolation -v -e .   (in the source tree)"


class BuildError(RuntimeError):
    """One readable message that ends with the way out."""


# ---- tools -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    root: Path
    version: tuple[int, int]

    @property
    def nvcc(self) -> Path:
        return self.root / "bin" / "nvcc"

    def __str__(self) -> str:
        return f"CUDA {self.version[0]}.{self.version[1]} at {self.root}"


def _has_headers(root: Path) -> bool:
    # Headers, not the nvcc binary, tell a toolkit: an nvcc on PATH may be a script that calls one elsewhere.
    places = [root / "include", *root.glob("targets/*/include")]
    return any((place / "cuda_runtime_api.h").is_file() for place in places)


def _inspect(root: Path) -> Toolkit | None:
    nvcc = root / "bin" / "nvcc"
    if not nvcc.is_file() or not _has_headers(root):
        return None
    result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True)
    release = re.search(r"release (\d+)\.(\d+)", result.stdout)
    return Toolkit(root, (int(release[1]), int(release[2]))) if release else None


def _roots_behind(nvcc: str) -> Iterator[Path]:
    """Where the nvcc on PATH lives: what it says itself (it may be a wrapper script), else its own folder's parent."""
    result = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", result.stderr, re.MULTILINE)
    if top:
        yield Path(top[1].strip())
    yield Path(nvcc).resolve().parent.parent
    yield Path(nvcc).parent.parent


def usual_roots() -> Iterator[Path]:
    yield Path("/usr/local/cuda")
    numbered = glob.glob("/usr/local/cuda-*")
    yield from (Path(p) for p in sorted(numbered, key=lambda p: [int(n) for n in re.findall(r"\d+", p)], reverse=True))
    yield Path("/opt/cuda")
    if conda := os.environ.get("CONDA_PREFIX"):
        yield Path(conda)
    yield from sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/cu*"), reverse=True)  # nvidia-cuda-nvcc


def _roots() -> Iterator[Path]:
    """Folders that may be a toolkit, best guess first."""
    if nvcc := shutil.which("nvcc"):
        yield from _roots_behind(nvcc)
    yield from usual_roots()


def find_toolkit(torch_cuda: str | None) -> Toolkit | None:
    """The toolkit to compile with, None where there is none. `torch_cuda`: torch.version.cuda, e.g. "13.0"."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        found = [_inspect(Path(named))]
        if found == [None]:
            others = [t.root for root in _roots() if (t := _inspect(root))]
            raise BuildError(
                f"CUDA_HOME={named} is not a CUDA toolkit: it has no bin/nvcc or no include/cuda_runtime_api.h. "
                + (f"Set CUDA_HOME to {others[0]}, or unset it." if others else "Unset it, or install one.")
            )
    else:
        found = [t for root in _roots() if (t := _inspect(root.resolve()))]
    if not found:
        return None
    major = int(torch_cuda.split(".")[0]) if torch_cuda else None
    for toolkit in found:
        if toolkit.version >= OLDEST_NVCC and major in (None, toolkit.version[0]):
            return toolkit
    have = "; ".join(dict.fromkeys(map(str, found)))
    if major and all(t.version[0] != major for t in found):
        raise BuildError(
            f"torch is built for CUDA {torch_cuda}, but the toolkit is {have}. The major versions must agree: "
            f"install a CUDA {major} toolkit and set CUDA_HOME to it, or a torch for CUDA {found[0].version[0]}; {CPU_ONLY}."
        )
    raise BuildError(
        f"The toolkit is too old: {have}; at least {OLDEST_NVCC[0]}.{OLDEST_NVCC[1]} is needed. Install a newer one and "
        f"set CUDA_HOME to it; {CPU_ONLY}."
    )


def find_ninja() -> str:
    """Also that of a virtual environment that was not activated."""
    path = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if path is None:
        raise BuildError("ninja is not on PATH. Install it: pip install ninja")
    return path


# ---- architectures ---------------------------------------------------------------------------------------------------


def architectures(capabilities: list[tuple[int, int]]) -> list[str]:
    """What to compile for, e.g. ["80+ptx", "90a"]: FLASH_EXT_ARCHS, else the GPUs present, else A100 and H100.

    wgmma exists in sm_90a alone, so 90 always means 90a. "80@90" is the code of sm_80 for a GPU of sm_90: what older GPUs
    run, tested on a newer one.
    """
    text = os.environ.get("FLASH_EXT_ARCHS", "")
    if text.strip().lower() == "none":
        return []
    if text.strip():
        archs = [
            word.lower().replace(".", "").removeprefix("sm_") for word in re.split(r"[;,\s]+", text.strip()) if word
        ]
        for arch in archs:
            if not re.fullmatch(r"\d{2,3}([af]?(\+ptx)?|@\d{2,3})", arch):
                raise BuildError(
                    f"FLASH_EXT_ARCHS={text!r}: {arch!r} is no architecture. Write '80;90a', '80+PTX' or 'none'."
                )
    elif capabilities:
        archs = [f"{major}{minor}" for major, minor in sorted(set(capabilities))]
    else:
        archs = ["80+ptx", "90a"]
    return list(dict.fromkeys("90a" if arch == "90" else arch for arch in archs))


def _number(arch: str) -> int:
    return int(re.match(r"\d+", arch)[0])


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on later minor versions of its major one, 90a on 9.0 alone, PTX on everything later."""
    arch = arch.rpartition("@")[2]  # the GPU of "80@90"
    number, device = _number(arch), capability[0] * 10 + capability[1]
    if arch.endswith("+ptx"):
        return device >= number
    return device == number if arch.endswith("a") else device // 10 == number // 10 and device >= number


def gencode(archs: list[str]) -> list[str]:
    flags = []
    for arch in archs:
        name, _, gpu = arch.removesuffix("+ptx").partition("@")
        flags.append(f"-gencode=arch=compute_{name},code=sm_{gpu or name}")
        if arch.endswith("+ptx"):
            flags.append(f"-gencode=arch=compute_{name},code=compute_{name}")
    return flags


def archs_of(source: Path, archs: list[str]) -> list[str]:
    """Those of `archs` that this kernel file has code for; for the others it would be compiled in vain."""
    if source.parent.name == "sm90":
        return [a for a in archs if a == "90a"]
    needs_tensor_cores = source.parent.name == "sm80" or source.stem.endswith("_tf32")
    return [a for a in archs if _number(a) >= 80 or not needs_tensor_cores]


# ---- files and flags -------------------------------------------------------------------------------------------------


def cpp_sources() -> list[Path]:
    return [CSRC / "api.cpp", CSRC / "binding.cpp", *sorted((CSRC / "cpu").glob("*.cpp"))]


def kernel_sources(pattern: str = "*/*") -> list[Path]:
    return sorted(CSRC.glob(f"{pattern}.cu"))


def sources_of_row(name: str) -> list[Path]:
    """The files of a row, its kernels' first, by its name: "fwd sm90 bf16 128 causal dense plain".

    csrc/<arch>/<pass>_<arch>.cu holds the rows of that pass and architecture; with the suffix _d128 those of head dims up
    to 128, with _fp8_d128 the float8 ones, with _options a part of every general row. The fp32 rows of sm80 are the
    portable kernel on tensor cores, csrc/simt/<pass>_simt_tf32.cu. All need csrc/attn/launch.cu.
    """
    pass_, arch, dtype, dims, *others = name.split()
    head_dim, stem = int(dims.split("/")[0]), f"{arch}/{pass_}_{arch}"
    if (arch, dtype) == ("sm80", "fp32"):
        files = kernel_sources(f"simt/{pass_}_simt_tf32")
    elif dtype == "e4m3":
        files = _file_of_head_dim(f"{stem}_fp8", head_dim)
    else:
        options = kernel_sources(f"{stem}_options") if "general" in others else []
        files = kernel_sources(stem) + _file_of_head_dim(stem, head_dim) + options
    return files + kernel_sources("attn/launch")


def _file_of_head_dim(stem: str, head_dim: int) -> list[Path]:
    """The first that is large enough (head_dim_of_file in csrc/attn/launch.cuh); none where files are not by head dim."""
    files = {int(file.stem.rpartition("_d")[2]): file for file in kernel_sources(f"{stem}_d[0-9]*")}
    return [files[size] for size in sorted(files) if size >= head_dim][:1]


def contract() -> str:
    """A digest of the headers that two libraries must share to call each other."""
    digest = hashlib.sha256()
    for name in ("params.h", "instances.h", "registry.h"):
        digest.update((CSRC / name).read_bytes())
    return digest.hexdigest()[:16]


# -Wrestrict of GCC 12 is wrong about std::string's operator+ (GCC bug 105651).
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-restrict"]


def werror() -> bool:
    """Warnings are errors where the project is tested, not where a user's newer compiler knows new ones."""
    return os.environ.get("FLASH_EXT_WERROR") == "1"


def cxx_flags() -> list[str]:
    return ["-std=c++20", "-O3", f"-I{CSRC}", *WARNINGS, *(["-Werror"] if werror() else [])]


def nvcc_flags() -> list[str]:
    host = ",".join(["-fPIC", *WARNINGS])
    strict = ["-Werror=all-warnings"] if werror() else []
    return ["-std=c++20", "-O3", f"-I{CSRC}", f"-Xcompiler={host}", *strict]
