"""Text that is on every machine: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_PERCENT = 10


class Corpus:
    """Files are held out as a whole, by a hash of their name."""

    def __init__(self, device: torch.device):
        root = Path(sysconfig.get_paths()["stdlib"])
        train, held_out = [], []
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if "site-packages" in name or "dist-packages" in name:
                continue
            (held_out if zlib.crc32(name.encode()) % 100 < HELD_OUT_PERCENT else train).append(path.read_bytes())
        if not train or not held_out:
            raise FileNotFoundError(f"no Python sources under {root}")
        self.train = as_tensor(train, device)
        self.held_out = as_tensor(held_out, device)

    def batch(self, step: int, batch: int, context: int) -> Tensor:
        """(batch, context + 1): the same for the same step, whoever asks."""
        return windows(self.train, batch, context, seed=step)

    def held_out_batch(self, batch: int, context: int) -> Tensor:
        return windows(self.held_out, batch, context, seed=-1)


def as_tensor(files: list[bytes], device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(files)), dtype=torch.uint8).to(device)


def windows(text: Tensor, batch: int, context: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (batch, 1), generator=generator).to(text.device)
    return text[starts + torch.arange(context + 1, device=text.device)].long()
