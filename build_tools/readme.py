"""python -m build_tools.readme [--write]: the README's generated parts and docs/measured.md: kernels from csrc/instances.h,
numbers and plots from bench/results and docs/plots."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .shared import ROOT

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
PLOTS = ROOT / "docs" / "plots"  # python -m bench.report --plots docs/plots
RESULTS = ROOT / "bench" / "results" / "h200.json"
PEERS = ROOT / "bench" / "results" / "h200_peers.json"  # FA3's and FA4's backward, which no wheel for this run has

PASSES = ("forward", "backward", "bias gradient")
ARCHS = ("`simt` (any GPU)", "`sm80` (Ampere and later)", "`sm90` (Hopper)")
DTYPES = ("fp32", "fp16", "bf16", "fp8 e4m3")
MASKS = ("none", "causal", "window", "all")
LAYOUTS = ("dense", "packed", "dense, packed")
VARIANTS = ("none", "softcap, ALiBi, bias, sinks, dropout", "any of them")
E4M3 = 3

README_PLOTS = ("fwd.png", "bwd.png", "train_context.png")
CAPTIONS = {
    "fwd.png": "Forward, bf16, higher is better",
    "bwd.png": "Backward, bf16, higher is better",
    "fp8.png": "Forward, fp8, higher is better",
    "generations.png": "The same maths on each generation of kernels, on one GPU",
    "train_loss.png": "Training a byte-level GPT in bf16 with flash_ext and with standard attention: the training losses",
    "train_context.png": "Step time and memory of that training as the context grows",
}


def options_of(pass_: int, arch: int, dtype: int, variant: int) -> str:
    """Backwards know sinks through the LSE; of forwards, the Hopper kernels take them in every variant (csrc/api.cpp)."""
    if dtype == E4M3:
        return ("none", "softcap, sinks", "softcap, sinks")[variant]
    plain_with_sinks = variant == 0 and (pass_ == 1 or arch == 2)
    return "sinks" if plain_with_sinks else VARIANTS[variant]


def table(instances: Sequence[Sequence[int]]) -> str:
    """Rows that differ only in dtype and head dims share a line, where they take the same options."""
    groups: dict[tuple, dict[int, list[str]]] = {}
    for pass_, arch, dtype, qk, v, mask, layout, variant in instances:
        text = str(qk) if qk == v else f"{qk}/{v}"
        key = (-arch, pass_, mask, layout, variant, options_of(pass_, arch, dtype, variant))
        dims = groups.setdefault(key, {}).setdefault(dtype, [])
        dims += [] if text in dims else [text]
    lines = ["| path | pass | dtype | head_dim up to | masks | layout | options |", "|---|---|---|---|---|---|---|"]
    in_order = sorted(groups.items(), key=lambda group: (group[0][:5], min(group[1])))
    for (arch, pass_, mask, layout, _, options), by_dtype in in_order:
        for served in dict.fromkeys(map(tuple, by_dtype.values())):
            dtypes = ", ".join(DTYPES[d] for d, dims in sorted(by_dtype.items()) if tuple(dims) == served)
            what = (ARCHS[-arch], PASSES[pass_], dtypes, ", ".join(served))
            lines.append(f"| {' | '.join((*what, MASKS[mask], LAYOUTS[layout], options))} |")
    return "\n".join(lines)


def plots(names: Sequence[str], folder: Path = PLOTS, link: str = "docs/plots") -> str:
    """The recorded plots that exist."""
    return "\n\n".join(
        f"**{CAPTIONS[name]}**\n\n![{CAPTIONS[name]}]({link}/{name})" for name in names if (folder / name).exists()
    )


def generated_parts(instances: Sequence[Sequence[int]]) -> dict[str, str]:
    """Of the README, by name."""
    from bench import markdown, results

    data, peers = results.load(RESULTS), results.load(PEERS)
    rows = data["rows"]
    measured = [f"{markdown.machine(data)}:", markdown.speeds(rows, peers["rows"]), markdown.exactness(rows)]
    return {
        "kernels": table(instances),
        "features": markdown.features(rows),
        "measured": "\n\n".join([*measured, plots(README_PLOTS)]),
    }


def replace_part(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}: written by make format -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"


def current_readme(instances: Sequence[Sequence[int]]) -> str:
    """The README with its generated parts as they should be."""
    text = README.read_text()
    for name, content in generated_parts(instances).items():
        text = replace_part(text, name, content)
    return text


MEASURED_HEAD = """# Measured

Written by `make format` from [`bench/results/{results}`](../bench/results/{results}); what was tried, and how it is measured:
[`bench/NOTES.md`](../bench/NOTES.md). {machine}.

A ratio is flash_ext's speed to that of the best other library in the same run (of time, memory and errors the inverse: above 1
flash_ext is better). `python -m bench.report` prints every library's number."""


def current_measured() -> str:
    from bench import markdown, results

    data = results.load(RESULTS)
    head = MEASURED_HEAD.format(results=RESULTS.name, machine=markdown.machine(data))
    others = [name for name in CAPTIONS if name not in README_PLOTS]
    return "\n\n".join([head, markdown.everything(data["rows"]), plots(others, link="plots")]) + "\n"


def main() -> None:
    from flash_ext import jit

    text = current_readme(jit.extension().instances())
    if "--write" in sys.argv:
        README.write_text(text)
        MEASURED.write_text(current_measured())
    else:
        print(text)


if __name__ == "__main__":
    main()
