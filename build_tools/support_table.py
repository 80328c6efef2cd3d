"""python -m build_tools.support_table [--write]: the README's table of kernels, from the table in csrc/instances.h."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .shared import ROOT

README = ROOT / "README.md"
BEGIN, END = "<!-- support table: make format writes it -->", "<!-- end of support table -->"

PASSES = ("forward", "backward", "bias gradient")
ARCHS = ("`simt` (any GPU)", "`sm80` (Ampere and later)", "`sm90` (Hopper)")
DTYPES = ("fp32", "fp16", "bf16", "fp8 e4m3")
MASKS = ("none", "causal", "window", "all")
LAYOUTS = ("dense", "packed", "dense and packed")
VARIANTS = ("plain", "softcap, ALiBi, bias, sinks, dropout", "plain and softcap, ALiBi, bias, sinks, dropout")


def table(instances: Sequence[Sequence[int]]) -> str:
    """Rows that differ only in dtype and head dims share a line."""
    dims: dict[tuple, dict[int, list[str]]] = {}
    for pass_, arch, dtype, qk, v, mask, layout, variant in instances:
        text = str(qk) if qk == v else f"{qk}/{v}"
        found = dims.setdefault((-arch, pass_, mask, layout, variant), {}).setdefault(dtype, [])
        found += [] if text in found else [text]
    lines = ["| path | pass | dtype | head_dim up to | masks | layout | options |", "|---|---|---|---|---|---|---|"]
    for (arch, pass_, mask, layout, variant), by_dtype in sorted(dims.items()):
        for served in dict.fromkeys(map(tuple, by_dtype.values())):
            dtypes = ", ".join(DTYPES[d] for d, listed in sorted(by_dtype.items()) if tuple(listed) == served)
            cells = (
                ARCHS[-arch],
                PASSES[pass_],
                dtypes,
                ", ".join(served),
                MASKS[mask],
                LAYOUTS[layout],
                VARIANTS[variant],
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def current_readme(instances: Sequence[Sequence[int]]) -> str:
    """The README with its table as it should be."""
    before, rest = README.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(instances)}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    from flash_ext import jit

    instances = jit.extension().instances()
    if "--write" in sys.argv:
        README.write_text(current_readme(instances))
    else:
        print(table(instances))


if __name__ == "__main__":
    main()
