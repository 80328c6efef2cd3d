"""Problems on the GPU that the tests of all kernels share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from flash_ext.testing import Problem

# Of the kernels for 16 bit.
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def problem(seqlen_q: int, seqlen_k: int, head_dim=(64, 64), heads=(2, 1), dtype=torch.bfloat16, **options) -> Problem:
    q = rand(2, seqlen_q, heads[0], head_dim[0], dtype=dtype)
    k, v = (rand(2, seqlen_k, heads[1], d, dtype=dtype) for d in head_dim)
    return Problem(q, k, v, options)


def cumulated(lengths: Sequence[int], device: str = "cuda") -> torch.Tensor:
    """Where packed sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def packed_problem(
    lengths_q: list[int], lengths_k: list[int], head_dim: int, dtype=torch.bfloat16, tail: int = 0, **options
) -> Problem:
    """``tail`` rows behind the last segment hold NaN."""
    lengths = (lengths_q, 4), (lengths_k, 2), (lengths_k, 2)
    q, k, v = (rand(sum(n) + tail, heads, head_dim, dtype=dtype) for n, heads in lengths)
    for t, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        t[sum(n) :] = torch.nan
    options |= {"cu_seqlens_q": cumulated(lengths_q), "cu_seqlens_k": cumulated(lengths_k)}
    return Problem(q, k, v, {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k), **options})


# Scores that leave the reference of the first blocks behind: from block to block, at one key, or far below it.
SCORES = {
    "all large": lambda j, n: None,
    "growing to the left": lambda j, n: (n - j) / 8,
    "growing to the right": lambda j, n: j / 8,
    "one key": lambda j, n: 40.0 * (j == 13),
    "one key by little": lambda j, n: 6.5 * (j == 13),
    "first key": lambda j, n: 25.0 * (j == 0),
    "last block far below": lambda j, n: -60.0 * (j > n - 80),
    "first block far above": lambda j, n: 200.0 * (j < 64),
}


def problem_of_scores(scores: str, n: int, head_dim: tuple[int, int], **options) -> Problem:
    """``n`` queries and keys, with what ``SCORES[scores]`` says added to the scores of every key."""
    p = problem(n, n, head_dim, **options)
    offsets = SCORES[scores](torch.arange(n, device="cuda").float(), n)
    if offsets is None:
        p.q, p.k = p.q * 10, p.k * 10
    else:  # q[0] = 1 adds k[0] * scale to every score of the key
        p.q[..., 0] = 1
        p.k[..., 0] = (offsets * math.sqrt(head_dim[0]))[None, :, None].to(p.k.dtype)
    return p
