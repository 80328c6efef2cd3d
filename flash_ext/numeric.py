"""The numbers of a call, of whatever type that means one; what does not is named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import torch
from torch import Tensor

_UNBOUNDED = 2**31 - 1  # a window bound this large cuts nothing in any tensor
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which kernels take numbers


def number(name: str, value: float) -> float:
    """A float that float32 holds. Of numpy's numbers too; not of a tensor, whose value the host would have to wait for."""
    if not isinstance(value, (int, float, torch.SymFloat)) and not _is_one(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not abs(value) <= _LARGEST:  # NaN too
        raise ValueError(f"{name} must be finite in float32, got {value}")
    return value


def flag(name: str, value: bool) -> bool:
    """Not whatever Python takes for true, such as a text."""
    if not isinstance(value, (int, torch.SymBool)) and not _is_one(value, "__bool__") or value not in (0, 1):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _is_one(value: object, conversion: str) -> bool:
    """Whether it is one thing that converts: not a tensor, whose value the host would have to wait for."""
    return hasattr(value, conversion) and not hasattr(value, "__len__")


def integer(name: str, value: int) -> int:
    """An int of any size; a symbolic one of torch.compile stays as it is."""
    if isinstance(value, (int, torch.SymInt)):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, float) and value.is_integer():
        return int(value)  # the cache of checked calls takes it for the int that it equals
    if isinstance(value, (Tensor, float)) or not hasattr(value, "__index__"):
        got = "a tensor (take .item() once, outside the loop)" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} must be an int, got {got}")
    return value.__index__()


def length(name: str, value: int) -> int:
    """A number of rows: from 0 to 2**31 - 1."""
    value = integer(name, value)
    if value < 0 or value > _UNBOUNDED:
        raise ValueError(f"{name} must be in 0 ... 2**31 - 1, got {value}")
    return value


def window(window_size: tuple[int, int]) -> tuple[int, int]:
    """(left, right), each -1 or from 0 to 2**31 - 1."""
    try:
        if isinstance(window_size, (Set, Mapping)):  # of two that are in no order
            raise TypeError
        left, right = window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be a pair of ints (left, right), got {window_size!r}") from None
    left, right = integer("window_size", left), integer("window_size", right)
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be ints of at least 0, or -1 for unbounded; got {window_size!r}")
    return min(left, _UNBOUNDED), min(right, _UNBOUNDED)
