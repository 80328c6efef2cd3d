"""Problems that the tests of the sm_80 kernels share."""

from __future__ import annotations

import torch

from flash_ext.testing import Problem

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def problem(seqlen_q: int, seqlen_k: int, head_dim=(64, 64), heads=(2, 1), dtype=torch.bfloat16, **options) -> Problem:
    q = rand(2, seqlen_q, heads[0], head_dim[0], dtype=dtype)
    k, v = (rand(2, seqlen_k, heads[1], d, dtype=dtype) for d in head_dim)
    return Problem(q, k, v, options)
