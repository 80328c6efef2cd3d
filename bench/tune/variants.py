"""Lists of kernel variants, such as fwd_sm80.txt beside this file:

    # name   | row of csrc/instances.h                    | fields of its tile, which the kernel's tile file explains
    base     | fwd sm80 bf16 128 any_mask any_layout plain |
    n32      | fwd sm80 bf16 128 any_mask any_layout plain | kBlockN=32 kBlocksPerSm=3

The first variant of a row is what the others are compared with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Variant:
    name: str
    row_name: str
    fields: tuple[str, ...]

    def defines(self) -> list[str]:
        """For csrc/attn/tune.h."""
        pass_, _, dtype, *_ = self.row_name.split()
        which = "FP8" if dtype == "e4m3" else "FWD" if pass_ == "fwd" else "BWD"  # the bias gradient has its tiles
        return [f"-DFLASH_TUNE_{which}={';'.join(f't.{field}' for field in self.fields)}"] if self.fields else []


def parse(text: str) -> list[Variant]:
    variants = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        columns = [column.strip() for column in line.split("|")]
        if len(columns) != 3:
            raise ValueError(f"line {number} must be 'name | row | fields', got {raw!r}")
        name, row_name, fields = columns
        for field in fields.split():
            # No commas: nvcc splits the value of a -D there.
            if not re.fullmatch(r"\w+=-?[\w:]+", field):
                raise ValueError(f"line {number}: a field must be name=value, got {field!r}")
        variants.append(Variant(name, row_name, tuple(fields.split())))
    names = [variant.name for variant in variants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"names must be unique, got {', '.join(sorted(twice))} more than once")
    return variants


def read(path: Path) -> list[Variant]:
    return parse(path.read_text())
