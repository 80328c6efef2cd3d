"""Memory that a backward pass takes beside its results: one copy of dq in fp32 (on Ampere of dk and dv too, where blocks
share heads), and little more. Asked of the kernels' host code, so it needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_ext.dispatch import CUDA_PATHS, DType, Key, Pass, Variant
from flash_ext.extension import _C, table

DTYPES = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16}
MIB = 2**20


def rows(path: str) -> list[tuple[int, Key]]:
    found = [(row, key) for row, key in enumerate(table()) if key.pass_ == Pass.BWD and key.arch == CUDA_PATHS[path]]
    found = [(row, key) for row, key in found if _C.is_built(row)]
    if not found:
        pytest.skip("no kernels in this build")
    return found


def shaped(key: Key, rows: tuple[int, ...], heads: int, heads_kv: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of these sizes, in the memory of one number."""
    one = torch.zeros(1, dtype=DTYPES[key.dtype])
    dims = (heads, key.head_dim), (heads_kv, key.head_dim), (heads_kv, key.head_dim_v)
    return tuple(one.expand(*rows, *d) for d in dims)


def workspace(row: int, key: Key, tensors: tuple[Tensor, Tensor, Tensor], **options) -> int:
    told = _C.Options()
    for name, value in (options | {"softcap": float(key.variant == Variant.GENERAL)}).items():
        setattr(told, name, value)
    return _C.bwd_workspace(row, *tensors, told)


def one_copy(tensors: tuple[Tensor, Tensor, Tensor]) -> int:
    """In fp32: of dq, and of dk and dv where heads are grouped."""
    q, k, v = tensors
    grouped = q.shape[-2] != k.shape[-2]
    return 4 * (q.numel() + grouped * (k.numel() + v.numel()))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", CUDA_PATHS)
def test_one_copy_and_a_few_mib(path, deterministic):
    """16384 tokens, 2048 wide or 32 heads on 8, as they are timed."""
    for row, key in rows(path):
        for seqlen in (512, 1024, 4096, 16384):
            for heads, heads_kv in ((2048 // key.head_dim, 2048 // key.head_dim), (32, 8), (32, 1)):
                tensors = shaped(key, (16384 // seqlen, seqlen), heads, heads_kv)
                beyond = workspace(row, key, tensors, deterministic=deterministic) - one_copy(tensors)
                assert beyond <= 8 * MIB, f"{_C.row_name(row)}: {beyond / MIB:.1f} MiB beyond one copy"


@pytest.mark.parametrize("path", CUDA_PATHS)
def test_packed_sequences_begin_a_tile_each(path):
    starts = torch.arange(0, 16384 + 1, 1024, dtype=torch.int32)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1024, "max_seqlen_k": 1024}
    for row, key in rows(path):
        tensors = shaped(key, (16384,), 2048 // key.head_dim, 2048 // key.head_dim)
        tiles = 4 * starts.numel() * 64 * 2048
        assert workspace(row, key, tensors, **lengths) - one_copy(tensors) <= tiles + 2 * MIB, _C.row_name(row)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", CUDA_PATHS)
def test_linear_in_the_length(path, deterministic):
    """Beside the copy, a few numbers for every row of every head: up to 128k keys at most 16 bytes."""
    for row, key in rows(path):
        for seqlen in (4096, 131072):
            tensors = shaped(key, (1, seqlen), 16, 16)
            beyond = workspace(row, key, tensors, deterministic=deterministic) - one_copy(tensors)
            assert beyond <= 16 * seqlen * 16 + 2 * MIB, f"{_C.row_name(row)}, {seqlen} keys: {beyond / MIB:.1f} MiB"
