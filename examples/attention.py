"""Three ways to compute the same causal attention: (q, k, v) -> out, each (batch, seqlen, num_heads, head_dim)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from gpt import Attend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_ext.forward(q, k, v, causal=True)


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole score matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, num_heads, seqlen, head_dim)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's; inside ``best_of_torch`` by its best kernel."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def best_of_torch(device: torch.device) -> AbstractContextManager:
    """On a GPU cuDNN's kernel, or torch's own FlashAttention-2 where that does not run. For whole steps: entering costs
    host time."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


ATTENTION: dict[str, Attend] = {
    "flash_ext": flash_attention,
    "sdpa": sdpa_attention,
    "standard": standard_attention,
}
