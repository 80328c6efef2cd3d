"""attn/score.h as users see it: with one key, the LSE is the score."""

from __future__ import annotations

import math

import pytest
import torch

import flash_ext


def score(q: torch.Tensor, k: torch.Tensor, **options) -> torch.Tensor:
    """Of every query for its one key. q: (seqlen_q, head_dim), k: (head_dim)"""
    q, k = q[None, :, None], k[None, None, None]
    return flash_ext.forward(q, k, torch.ones_like(k), return_lse=True, **options)[1][0, 0]


@pytest.fixture
def inputs(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(50, 32, device=device) * 10).to(dtype), torch.randn(32, device=device).to(dtype)


@pytest.fixture
def zeros(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(50, 32, device=device, dtype=dtype), torch.zeros(32, device=device, dtype=dtype)


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 1000.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, -0.5, 0.0])
def test_scale_then_softcap(inputs, close, softcap: float, scale: float) -> None:
    q, k = inputs
    want = (q.double() @ k.double()) * scale
    if softcap:
        want = softcap * torch.tanh(want / softcap)
    assert close(score(q, k, softmax_scale=scale, softcap=softcap), want, lse=True)


def test_alibi_counts_from_the_bottom_right(zeros, close, device: str) -> None:
    got = score(*zeros, alibi_slopes=torch.tensor([0.25], device=device))
    diagonal = torch.arange(50, device=device) + 1 - 50
    assert close(got, -0.25 * diagonal.abs(), lse=True)


def test_bias_is_added_after_softcap(inputs, close, device: str) -> None:
    q, k = inputs
    bias = torch.randn(50, 1, device=device) * 100
    want = 2 * torch.tanh((q.double() @ k.double()) / 2) + bias[:, 0].double()
    assert close(score(q, k, softmax_scale=1.0, softcap=2.0, attn_bias=bias), want, lse=True)


def test_ends_of_the_range(zeros, close, device: str) -> None:
    """The lowest finite number is a score like any other; -inf is none."""
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([lowest, -math.inf, 1e30], device=device)[torch.arange(50, device=device) % 3, None]
    assert close(score(*zeros, attn_bias=bias), bias[:, 0], lse=True)
