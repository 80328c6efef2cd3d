"""Which kernel runs a call: a pure function from a description of the call to a row of the kernel table.

Nothing here touches torch or CUDA, so every decision can be tested without a GPU. The table is ``csrc/instances.h``,
read through ``_C.instances()``; the enumerations below carry the numbers of the C++ ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Pass(IntEnum):
    FWD = 0
    BWD = 1
    DBIAS = 2


class Arch(IntEnum):
    SIMT = 0
    SM80 = 1
    SM90 = 2


class DType(IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2
    E4M3 = 3


class Mask(IntEnum):
    FULL = 0
    CAUSAL = 1
    LOCAL = 2
    ANY = 3


class Layout(IntEnum):
    DENSE = 0
    PACKED = 1
    ANY = 2


class Variant(IntEnum):
    PLAIN = 0
    GENERAL = 1
    ANY = 2


CUDA_PATHS = {"sm90": Arch.SM90, "sm80": Arch.SM80, "simt": Arch.SIMT}  # fastest first
PATHS = ("reference", "cpu", *reversed(CUDA_PATHS))


class Key(NamedTuple):
    """A row of the table (head dims are the largest served), or what a call asks of it (then without ANY)."""

    pass_: Pass
    arch: Arch
    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: Mask
    layout: Layout
    variant: Variant


class Call(NamedTuple):
    """What the choice depends on, and nothing else."""

    pass_: Pass
    dtype: DType | None  # None: float64, which no kernel computes in
    head_dim: int
    head_dim_v: int
    mask: Mask
    layout: Layout
    variant: Variant  # that its scores and probabilities need
    sinks: bool
    aligned: bool  # rows of q, k, v and the result are multiples of 16 bytes: what the Hopper copy engine needs
    capability: tuple[int, int] | None  # of the CUDA device; None: tensors in host memory


@dataclass(frozen=True)
class Choice:
    """The path that serves a call, with its row of the table, and why each faster path was passed over."""

    path: str
    row: int  # -1: this path has no rows
    kernel: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()


def serves(row: Key, key: Key) -> bool:
    """Mirror of ``flash::serves`` in ``csrc/instances.h``."""
    return (
        row.pass_ == key.pass_
        and row.arch == key.arch
        and row.dtype == key.dtype
        and key.head_dim <= row.head_dim
        and key.head_dim_v <= row.head_dim_v
        and row.mask in (key.mask, Mask.ANY)
        and row.layout in (key.layout, Layout.ANY)
        and row.variant in (key.variant, Variant.ANY)
    )


def mask_of(window_left: int, window_right: int) -> Mask:
    """The mask of a normalised window, in which -1 is unbounded."""
    if window_left < 0:
        return Mask.FULL if window_right < 0 else Mask.CAUSAL if window_right == 0 else Mask.LOCAL
    return Mask.LOCAL


def normalise_window(causal: bool, window_size: Sequence[int], seqlen_q: int, seqlen_k: int) -> tuple[int, int]:
    """The window with causal folded in and every bound that cuts nothing replaced by -1.

    Query 0 lies on diagonal ``seqlen_k - seqlen_q``, the last one on ``seqlen_k - 1``: a left bound below ``seqlen_k -
    1`` or a right bound below ``seqlen_q - 1`` cuts something. In packed calls both are the longest segments'.
    """
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left >= seqlen_k - 1:
        left = -1
    if right >= seqlen_q - 1:
        right = -1
    return left, right


def capability_needed(arch: Arch, capability: tuple[int, int]) -> str | None:
    """What a GPU lacks for this path, None if nothing."""
    if arch == Arch.SM90 and capability[0] != 9:
        return f"needs compute capability 9.x, the device has {capability[0]}.{capability[1]}"
    if arch == Arch.SM80 and capability < (8, 0):
        return f"needs compute capability 8.0 or later, the device has {capability[0]}.{capability[1]}"
    return None


def _sinks_are_general(call: Call, arch: Arch) -> bool:
    """Mirror of ``needs_general`` in ``csrc/api.cpp``: the Hopper kernels for 16 bit take sinks in every variant."""
    return call.sinks and call.pass_ == Pass.FWD and (arch != Arch.SM90 or call.dtype == DType.E4M3)


def _find_row(call: Call, arch: Arch, table: Sequence[Key], can_run: Callable[[int], bool]) -> tuple[int, str]:
    """(row, "") or (-1, why not)."""
    if call.dtype is None:
        return -1, "computes in float32, float16 or bfloat16, not in float64"
    variant = Variant.GENERAL if _sinks_are_general(call, arch) else call.variant
    key = Key(call.pass_, arch, call.dtype, call.head_dim, call.head_dim_v, call.mask, call.layout, variant)
    rows = [i for i, row in enumerate(table) if serves(row, key)]
    for i in rows:
        if can_run(i):
            return i, ""
    if rows:
        return -1, "has a kernel for this call, but not in this build"
    wanted = (
        f"{key.pass_.name.lower()}, {key.dtype.name.lower()}, head_dim {key.head_dim}, head_dim_v {key.head_dim_v}, "
        f"{key.mask.name.lower()}, {key.layout.name.lower()}, {key.variant.name.lower()}"
    )
    return -1, f"has no kernel for ({wanted})"


def choose(
    call: Call,
    table: Sequence[Key],
    can_run: Callable[[int], bool],
    row_name: Callable[[int], str],
    path: str | None = None,
) -> Choice:
    """The fastest path that serves ``call``, or ``path`` if one was chosen explicitly.

    ``can_run(row)``: whether the row is built for the device or can be compiled for it. Raises ``NotImplementedError``
    if there is none; its message says why not, path by path.
    """
    if path == "reference":
        return Choice("reference", -1, "torch operators", "chosen with use_path")
    if call.capability is None:
        if path not in (None, "cpu"):
            raise NotImplementedError(f"path '{path}' computes on CUDA tensors; q is in host memory")
        if call.dtype in (None, DType.E4M3):
            hint = "; use_path('reference') takes float64" if call.dtype is None else ""
            raise NotImplementedError(f"path 'cpu' computes in float32, float16 or bfloat16{hint}")
        kernel = "fwd_cpu" if call.pass_ == Pass.FWD else "bwd_cpu"
        return Choice("cpu", -1, kernel, "chosen with use_path" if path else "tensors are in host memory")
    if path == "cpu":
        raise NotImplementedError("path 'cpu' computes on tensors in host memory; q is on a CUDA device")

    passed_over = []
    for name, arch in CUDA_PATHS.items():
        if path not in (None, name):
            continue
        why = capability_needed(arch, call.capability)
        if why is None and arch == Arch.SM90 and not call.aligned:
            why = "needs head_dim in multiples of 16 bytes (8 numbers in 16 bit) for the copy engine"
        if why is None:
            row, why = _find_row(call, arch, table, can_run)
            if row >= 0:
                reason = "chosen with use_path" if path else "the fastest path that serves this call"
                return Choice(name, row, row_name(row), reason, tuple(passed_over))
        passed_over.append((name, why))
    raise NotImplementedError("no path serves this call: " + "; ".join(f"{name} {why}" for name, why in passed_over))
