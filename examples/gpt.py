"""A small GPT over bytes: rotary positions, RMSNorm, GELU. What computes its attention is an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# (q, k, v) -> out, each (batch, seqlen, num_heads, head_dim); causal.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Config:
    num_layers: int
    num_heads: int
    head_dim: int
    vocabulary: int = 256  # bytes

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class Attention(nn.Module):
    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.heads = (config.num_heads, config.head_dim)
        self.attend = attend
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        qk, v = self.qkv(x).unflatten(-1, (3, *self.heads)).split((2, 1), dim=-3)  # (batch, seqlen, 2 | 1, *heads)
        q, k = rotate(qk, rotary).unbind(-3)  # (batch, seqlen, num_heads, head_dim) each
        out = self.attend(q, k, v.squeeze(-3))
        return self.proj(out.flatten(-2))


class Block(nn.Module):
    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config, attend)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config: Config, attend: Attend):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, seqlen) -> (batch, seqlen, vocabulary)
        x = self.embedding(tokens)
        rotary = rotary_table(tokens.shape[1], self.config.head_dim, tokens.device)
        for block in self.blocks:
            x = block(x, rotary)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:  # (batch, seqlen + 1)
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, context: int, temperature: float = 0.7) -> Tensor:
        """tokens (batch, seqlen) -> (batch, seqlen + count)."""
        for _ in range(count):
            logits = self(tokens[:, -context:])[:, -1].float()
            next_token = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens = torch.cat([tokens, next_token], dim=1)
        return tokens


def rotary_table(seqlen: int, head_dim: int, device: torch.device) -> Tensor:
    """exp(i angle), (seqlen, 1, 1, head_dim / 2) complex."""
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    angle = torch.arange(seqlen, device=device)[:, None, None, None] * frequency
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x (..., seqlen, 2, num_heads, head_dim): each pair of neighbours as a complex number, turned by its angle."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)
