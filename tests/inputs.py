"""Small inputs in host memory, for tests of what surrounds the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    """A leaf, (2, 9, 4, 16) where no shape is given."""
    return torch.randn(shape or (2, 9, 4, 16), dtype=dtype, requires_grad=grad)


def make_qkv(dtype: torch.dtype = torch.float32, q=(2, 5, 4, 16), k=(2, 7, 2, 16)) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of these shapes; v has k's."""
    return torch.randn(q).to(dtype), torch.randn(k).to(dtype), torch.randn(k).to(dtype)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of ``inputs``, for the same gradient everywhere in ``out``."""
    return torch.autograd.grad(out, inputs, torch.ones_like(out) * 0.5)
