"""Problems that the tests of the portable kernels share. Their fp32 rows for tensor cores belong to the path sm80."""

from __future__ import annotations

from functools import partial

import problems
import torch

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# (path, dtype, (head_dim, head_dim_v)): every kernel once, and value dims of their own
KERNELS = [
    *(("simt", dtype, (d, d)) for dtype in (FP32, FP16, BF16) for d in (64, 128, 256)),
    *(("sm80", FP32, (d, d)) for d in (64, 128)),
    ("simt", FP32, (40, 200)),
    ("sm80", FP32, (128, 32)),
]


rand = partial(problems.rand, dtype=FP32)
problem = partial(problems.problem, dtype=FP32)
