"""Problems that the tests of the portable kernels share. Their fp32 rows for tensor cores belong to the path sm80."""

from __future__ import annotations

import torch

from flash_ext.testing import Problem

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# (path, dtype, (head_dim, head_dim_v)): every kernel once, and value dims of their own
KERNELS = [
    *(("simt", dtype, (d, d)) for dtype in (FP32, FP16, BF16) for d in (64, 128, 256)),
    *(("sm80", FP32, (d, d)) for d in (64, 128)),
    ("simt", FP32, (40, 200)),
    ("sm80", FP32, (128, 32)),
]


def rand(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def problem(seqlen_q: int, seqlen_k: int, head_dim=(64, 64), heads=(2, 1), dtype=FP32, **options) -> Problem:
    q = rand(2, seqlen_q, heads[0], head_dim[0], dtype=dtype)
    k, v = (rand(2, seqlen_k, heads[1], d, dtype=dtype) for d in head_dim)
    return Problem(q, k, v, options)
