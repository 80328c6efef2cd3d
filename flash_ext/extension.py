"""``flash_ext._C``, its table of kernels, and the path that a context asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from . import jit
from .dispatch import PATHS, Key


class _Extension:
    """``flash_ext._C``, loaded on first use: importing flash_ext needs neither a build nor a compiler."""

    def __getattr__(self, name: str):
        value = getattr(jit.extension(), name)
        setattr(self, name, value)
        return value


_C = _Extension()

chosen_path: ContextVar[str] = ContextVar("flash_ext_path", default="")


@contextmanager
def use_path(path: str) -> Iterator[None]:
    """Serve every call in this context by ``path``; a call that it cannot serve raises ``NotImplementedError``.

    ``path``: "reference" (torch operators, any device, also float64), "cpu", "simt" (portable CUDA), "sm80", "sm90".
    Holds for this thread (and for the tasks that it starts), and for the backward passes of the calls made in it. A
    compiled function keeps the path under which it was traced.
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}; got {path!r}")
    token = chosen_path.set(path)
    try:
        yield
    finally:
        chosen_path.reset(token)


@torch.compiler.assume_constant_result
def current_path() -> str:
    """Also in calls that are compiled."""
    return chosen_path.get()


@cache
def table() -> list[Key]:
    return [Key(*row) for row in _C.instances()]


@cache
def capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)
