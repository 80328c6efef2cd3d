"""attn/dropout.h as users see it: what is dropped depends on seed, offset and position alone, the same on every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flash_ext
from flash_ext.call import new_rng_state
from flash_ext.testing import Problem


def philox(key: int, counter: list[np.ndarray], rounds: int = 7) -> list[np.ndarray]:
    """Philox4x32 of Salmon et al., SC 2011, in 64-bit integers."""
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    for _ in range(rounds):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def kept(seed: int, offset: int, p: float, heads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """(heads, seqlen_q, seqlen_k)"""
    head, row, col = np.meshgrid(np.arange(heads), np.arange(seqlen_q), np.arange(seqlen_k), indexing="ij")
    words = philox(seed, [row & ~8, col // 64 * 4 + col // 2 % 4, head, np.full_like(row, offset & 0xFFFFFFFF)])
    i, derived = col // 8 % 4, row // 8 % 2 * 2 + col // 32 % 2
    factor = np.array([0, 0xC8B2B839, 0xCB4E4786, 0xB965C7AF], dtype=np.uint64)[derived]
    word = np.choose(i, words) * factor + np.choose((i + derived) % 4, words)  # modulo 2^64
    bits = (word >> (16 * (col % 2)).astype(np.uint64)).astype(np.int64) & 0x7FFF
    return torch.from_numpy(bits >= int(p * 32768 + 0.5))


@pytest.fixture
def factors(device: str, dtype: torch.dtype):
    """Equal probabilities and unit values show the factor of every entry: (batch * heads, seqlen_q, seqlen_k)."""

    def run(p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        q = torch.zeros(batch, seqlen_q, heads, 64, device=device, dtype=dtype)
        k = torch.zeros(batch, seqlen_k, heads, 64, device=device, dtype=dtype)
        columns = []
        for first in range(0, seqlen_k, 64):
            unit = torch.arange(seqlen_k, device=device)[:, None] == first + torch.arange(64, device=device)
            v = unit.to(dtype)[None, :, None].expand(batch, -1, heads, -1)
            torch.manual_seed(3)
            out = flash_ext.forward(q, k, v, dropout_p=p)
            columns.append(out.permute(0, 2, 1, 3).reshape(batch * heads, seqlen_q, 64)[..., : seqlen_k - first])
        return torch.cat(columns, 2).cpu() * seqlen_k

    return run


def test_bits_are_philox(factors, close, device: str) -> None:
    p, batch, heads, seqlen_q, seqlen_k = 0.3, 2, 2, 70, 130
    got = factors(p, batch, heads, seqlen_q, seqlen_k)
    torch.manual_seed(3)
    seed, offset = new_rng_state(torch.device(device)).tolist()
    assert close(got, kept(seed, offset, p, batch * heads, seqlen_q, seqlen_k) / (1 - p))


def test_backward_drops_the_same(device: str, dtype: torch.dtype, close) -> None:
    """With equal probabilities dv is the transpose of what the forward kept."""
    q, k = (torch.zeros(1, 64, 1, 64, device=device, dtype=dtype) for _ in range(2))
    unit = torch.eye(64, device=device, dtype=dtype)[None, :, None]
    v = unit.clone().requires_grad_()
    out = flash_ext.forward(q, k, v, dropout_p=0.4)
    out.backward(unit)
    assert close(out[0, :, 0] * 64, v.grad[0, :, 0].T * 64)


def test_seeds(path: str, device: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 100, 2, 64, device=device).to(dtype) for _ in range(3))
    runs = [Problem(q, k, v, {"dropout_p": 0.5}, seed=seed).run(path, backward=False)["out"] for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
