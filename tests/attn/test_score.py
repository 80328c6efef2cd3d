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
def inputs(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(50, 32, device=device) * 10, torch.randn(32, device=device)


@pytest.mark.parametrize("softcap", [0.0, 1.0, 15.0, 1000.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, -0.5, 0.0])
def test_scale_then_softcap(path: str, inputs, softcap: float, scale: float) -> None:
    q, k = inputs
    want = (q.double() @ k.double()) * scale
    if softcap:
        want = softcap * torch.tanh(want / softcap)
    got = score(q, k, softmax_scale=scale, softcap=softcap).double()
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_alibi_counts_from_the_bottom_right(path: str, device: str) -> None:
    q, k = torch.zeros(50, 32, device=device), torch.zeros(32, device=device)
    got = score(q, k, alibi_slopes=torch.tensor([0.25], device=device))
    diagonal = torch.arange(50, device=device) + 1 - 50
    assert torch.allclose(got, -0.25 * diagonal.abs().float())


def test_bias_is_added_after_softcap(path: str, device: str, inputs) -> None:
    q, k = inputs
    bias = torch.randn(50, 1, device=device) * 100
    got = score(q, k, softmax_scale=1.0, softcap=2.0, attn_bias=bias).double()
    want = 2 * torch.tanh((q.double() @ k.double()) / 2) + bias[:, 0].double()
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_ends_of_the_range(path: str, device: str) -> None:
    q, k = torch.zeros(3, 32, device=device), torch.zeros(32, device=device)
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[lowest], [-math.inf], [1e30]], device=device)
    assert score(q, k, attn_bias=bias).tolist() == bias[:, 0].tolist()
