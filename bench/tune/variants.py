"""Lists of kernel variants, such as fwd_sm80.txt beside this file:

    # name       | row of csrc/instances.h              | macros, each -DFLASH_TUNE_<NAME>=<number>
    base         | fwd sm80 bf16 128 full dense plain   |
    n64_stages3  | fwd sm80 bf16 128 full dense plain   | BLOCK_N=64 STAGES=3

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
    macros: tuple[str, ...]

    def defines(self) -> list[str]:
        return [f"-DFLASH_TUNE_{macro}" for macro in self.macros]


def parse(text: str) -> list[Variant]:
    variants = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#")[0].strip()
        if not line:
            continue
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 3:
            raise ValueError(f"line {number} must be 'name | row | macros', got {raw!r}")
        name, row_name, macros = fields
        for macro in macros.split():
            # Scalars only: nvcc splits the value of a -D at commas.
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*=-?\w+", macro):
                raise ValueError(f"line {number}: a macro must be NAME=number, got {macro!r}")
        variants.append(Variant(name, row_name, tuple(macros.split())))
    names = [variant.name for variant in variants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"names must be unique, got {', '.join(sorted(twice))} more than once")
    return variants


def read(path: Path) -> list[Variant]:
    return parse(path.read_text())
