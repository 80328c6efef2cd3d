"""attn/mask.h as users see it: which keys every query sees, for all small windows. (All tiles: tests/host/test_mask.cpp.)"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import flash_ext


def visible(seqlen_q: int, seqlen_k: int, left: int, right: int) -> Tensor:
    """(seqlen_q, seqlen_k)"""
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    return ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))


@pytest.fixture
def check(device: str, dtype: torch.dtype, close):
    """Queries of zero weigh all keys that they see alike."""

    def run(seqlen_q: int, seqlen_k: int, window: tuple[int, int], causal: bool = False) -> None:
        q = torch.zeros(1, seqlen_q, 1, 16, device=device, dtype=dtype)
        k, v = (torch.randn(1, seqlen_k, 1, 16, device=device).to(dtype) for _ in range(2))
        out, lse = flash_ext.forward(q, k, v, window_size=window, causal=causal, return_lse=True)
        seen = visible(seqlen_q, seqlen_k, window[0], 0 if causal else window[1]).to(device)
        count = seen.sum(1)
        where = f"seqlens {seqlen_q} {seqlen_k} window {window} causal {causal}"
        assert close(lse[0, 0], count.double().log(), lse=True), where
        mean = seen.double() @ v[0, :, 0].double() / count.clamp(min=1)[:, None]
        assert close(out[0, :, 0], mean), where

    return run


def test_all_small_windows(check) -> None:
    for seqlen_q, seqlen_k in itertools.product((1, 2, 5), (1, 3, 6)):
        for left, right in itertools.product((-1, 0, 1, 3, 7), repeat=2):
            check(seqlen_q, seqlen_k, (left, right))


@pytest.mark.parametrize("seqlen_q", [63, 64, 65, 200])
@pytest.mark.parametrize("seqlen_k", [64, 129, 200])
def test_windows_around_tiles(check, seqlen_q: int, seqlen_k: int) -> None:
    for window in ((-1, -1), (0, 0), (63, -1), (64, 0), (65, 64), (-1, 1), (500, 0), (10, 500)):
        for causal in (False, True):
            check(seqlen_q, seqlen_k, window, causal)
