"""Kernels compiled on first use, and the extension itself where none was installed.

``jit.load(row)`` compiles one row of the kernel table through ``torch.utils.cpp_extension`` and puts it into the
running registry. Results stay in torch's extension cache. To build everything into a module of your own::

    from torch.utils.cpp_extension import load
    from flash_ext import jit

    module = load(name="my_flash", sources=jit.sources(), extra_cflags=jit.cflags(), extra_cuda_cflags=jit.cuda_flags())

``FLASH_EXT_JIT=0`` in the environment switches compiling on first use off.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import _build
from ._build import BuildError

__all__ = [
    "BuildError",
    "can_run",
    "cflags",
    "cuda_flags",
    "extension",
    "facts",
    "is_ready",
    "load",
    "prepare",
    "sources",
]

_lock = threading.RLock()
_loaded: dict[int, str] = {}  # row -> library that was compiled for it


# ---- building everything with torch.utils.cpp_extension --------------------------------------------------------------


def sources() -> list[str]:
    """Every C++ and CUDA file of the extension."""
    return [str(path) for path in (*_build.cpp_sources(), *_build.kernel_sources())]


def cflags() -> list[str]:
    return _build.cxx_flags()


def cuda_flags() -> list[str]:
    """Flags for nvcc, its architectures among them; also points torch at the toolkit.

    torch's own choice knows sm_90 but not sm_90a, in which every wgmma kernel would be empty.
    """
    importlib.import_module("torch.utils.cpp_extension").CUDA_HOME = str(_toolkit().root)
    return [*_build.nvcc_flags(), *_build.gencode(_build.architectures(_capabilities()))]


def _capabilities() -> list[tuple[int, int]]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def _toolkit() -> _build.Toolkit:
    if torch.version.cuda is None:
        raise BuildError(f"torch {torch.__version__} is a CPU-only build. Install a CUDA build of torch.")
    toolkit = _find_toolkit(torch.version.cuda, *map(os.environ.get, ("CUDA_HOME", "CUDA_PATH", "PATH")))
    if toolkit is None:
        raise BuildError("No CUDA toolkit (nvcc, cuda_runtime_api.h) was found. Install one, or set CUDA_HOME to it.")
    return toolkit


@functools.cache  # it runs nvcc
def _find_toolkit(torch_cuda: str, *environment: str | None) -> _build.Toolkit | None:
    return _build.find_toolkit(torch_cuda)


def _compile(name: str, toolkit: _build.Toolkit | None = None, **options: Any) -> Any:
    checkout = hashlib.sha256(str(_build.CSRC).encode()).hexdigest()[:8]  # two source trees do not share a cache entry
    with _tools(toolkit) as cpp_extension:
        try:
            return cpp_extension.load(name=f"flash_ext_{checkout}_{name}", **options)
        except RuntimeError as error:
            raise BuildError(f"{name} did not compile: {error}") from error


@contextmanager
def _tools(toolkit: _build.Toolkit | None) -> Iterator[ModuleType]:
    """torch.utils.cpp_extension with ninja on PATH and with this toolkit; for the user everything stays as it was."""
    path = os.environ.get("PATH")
    os.environ["PATH"] = os.pathsep.join([*([path] if path else []), str(Path(_build.find_ninja()).parent)])
    cpp_extension = importlib.import_module("torch.utils.cpp_extension")
    cuda_home = cpp_extension.CUDA_HOME
    if toolkit is not None:
        # torch's own guess is the folder above the nvcc on PATH, which for a wrapper script has no headers.
        cpp_extension.CUDA_HOME = str(toolkit.root)
    try:
        yield cpp_extension
    finally:
        cpp_extension.CUDA_HOME = cuda_home
        if path is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = path


# ---- the extension ---------------------------------------------------------------------------------------------------


@functools.cache
def facts() -> dict[str, Any]:
    """What the installed extension was built with; empty where none is installed."""
    path = Path(__file__).with_name("_build_facts.json")
    return json.loads(path.read_text()) if path.is_file() and _is_installed() else {}


def _is_installed() -> bool:
    return importlib.util.find_spec("flash_ext._C") is not None


@functools.cache
def extension() -> ModuleType:
    """``flash_ext._C``: the installed one; in a source tree without one, its CPU part and table, compiled now."""
    with _lock:
        return _import_installed() if _is_installed() else _compile_base()


def _import_installed() -> ModuleType:
    built_with, running = f"torch {facts().get('torch', '(unknown)')}", f"torch {torch.__version__}"
    try:
        module = importlib.import_module("flash_ext._C")
    except ImportError as error:
        why = f"{error}. Rebuild it: {_build.REBUILD}"
        raise ImportError(
            f"flash_ext._C, built against {built_with}, cannot be loaded with {running}: {why}"
        ) from error
    if facts() and built_with != running:
        message = f"flash_ext._C was built against {built_with}, this is {running}. Rebuild it: {_build.REBUILD}"
        warnings.warn(message, stacklevel=3)
    return module


def _compile_base() -> ModuleType:
    if os.environ.get("FLASH_EXT_JIT") == "0":
        raise ImportError(f"flash_ext._C is not built, and FLASH_EXT_JIT=0. Build it: {_build.REBUILD}")
    _say("flash_ext: not installed; compiling its binding and CPU part (once, under a minute)")
    files = [str(path) for path in _build.cpp_sources()]
    return _compile("C", sources=files, extra_cflags=cflags(), with_cuda=False)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- single rows -----------------------------------------------------------------------------------------------------


def can_run(row: int, capability: tuple[int, int]) -> bool:
    """Whether this row is built for such a device, or could be compiled for it on first use."""
    return is_ready(row, capability) or _why_no_jit() is None


def prepare(row: int, device: int) -> None:
    """Make sure that `row` can be launched on CUDA device `device`; dispatch calls it once per row and device."""
    capability = torch.cuda.get_device_capability(device)
    if is_ready(row, capability):
        return
    if why := _why_no_jit():
        gpu, number = torch.cuda.get_device_name(device), f"{capability[0]}{capability[1]}"
        built = ", ".join(facts().get("archs", [])) or "no GPU"
        raise RuntimeError(
            f"No kernel image of '{extension().row_name(row)}' for {gpu} (sm_{number}): this build is for {built}, and "
            f"{why} Rebuild on this machine, or with FLASH_EXT_ARCHS={number}: {_build.REBUILD}"
        )
    load(row)


def load(row_or_key: int | Sequence[int]) -> int:
    """Compile one row of the kernel table for the GPUs present and put it in the running registry; returns the row.

    A key is the eight numbers of a row as ``extension().instances()`` lists them, or a ``dispatch.Key``.
    """
    module = extension()
    table = module.instances()
    row = row_or_key
    if not isinstance(row, int):
        if not isinstance(row, Sequence) or not all(isinstance(x, int) for x in row):
            raise TypeError(f"row must be an int, or a key of eight of them; got {row!r}")
        key = tuple(map(int, row))
        if key not in table:
            raise ValueError(f"key must be a row of the kernel table, got {key}")
        row = table.index(key)
    if not 0 <= row < len(table):
        raise ValueError(f"row must be in 0 ... {len(table) - 1}, got {row}")
    if facts() and facts()["contract"] != _build.contract():
        # The new library would read parameters and table rows where the old one did not write them.
        raise BuildError(f"csrc/ has changed since flash_ext._C was built. Rebuild it: {_build.REBUILD}")
    with _lock:
        if row not in _loaded:
            _loaded[row] = _compile_row(row)
            module.override_row(row, _loaded[row])
            if not module.is_built(row):
                raise BuildError(f"none of {[f.name for f in _sources_of(row)]} registers '{module.row_name(row)}'")
    return row


def is_ready(row: int, capability: tuple[int, int]) -> bool:
    """Whether this row is built for such a device."""
    module = extension()
    if not module.is_built(row):
        return False
    if row in _loaded or not facts():  # compiled on this machine, by `load` or the tuner
        return True
    archs = _build.archs_of(_sources_of(row)[0], facts()["archs"])
    return any(_build.runs_on(arch, capability) for arch in archs)


@functools.cache
def _why_no_jit() -> str | None:
    if os.environ.get("FLASH_EXT_JIT") == "0":
        return "FLASH_EXT_JIT=0 forbids compiling it now."
    try:
        _toolkit(), _build.find_ninja()
    except BuildError as error:
        return str(error)
    return None


@functools.cache  # every new kind of call asks
def _sources_of(row: int) -> list[Path]:
    return _build.sources_of_row(extension().row_name(row))


def _compile_row(row: int) -> str:
    name, toolkit, kernels = extension().row_name(row), _toolkit(), _sources_of(row)
    wanted = _build.architectures(_capabilities())
    archs = _build.archs_of(kernels[0], wanted)
    if not archs:
        raise BuildError(f"'{name}' has no source for {', '.join(wanted) or 'any GPU: FLASH_EXT_ARCHS=none'}")
    _say(f"flash_ext: compiling '{name}' for {', '.join(archs)} (once, about 15 s)")
    # Without -fno-gnu-unique the loader would merge this library's registry with that of the next one.
    own = [f"-DFLASH_EXT_ROW={row}"]
    unique = ["-fno-gnu-unique"] if "clang" not in os.environ.get("CXX", "") else []
    return _compile(
        f"row{row}_{re.sub(r'[^0-9a-zA-Z]', '_', '_'.join(archs))}",
        toolkit,
        sources=[str(_build.CSRC / "variant.cpp"), *map(str, kernels)],
        extra_cflags=[*cflags(), *own, *unique],
        extra_cuda_cflags=[*_build.nvcc_flags(), *_build.gencode(archs), *own, *(f"-Xcompiler={f}" for f in unique)],
        extra_ldflags=[f"-L{toolkit.root}/lib"],  # where a toolkit from pip keeps the runtime
        is_python_module=False,
    )
