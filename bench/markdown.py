"""What the README and docs/measured.md show of recorded results, as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from . import table
from .table import Ratio

# (work, case, path): the rows that the README shows.
HEADLINES = {
    ("fwd", "grid", ""): "forward, bf16",
    ("bwd", "grid", ""): "backward, bf16",
    ("bwd", "grid", "through cuDNN"): "backward, bf16, FA3 and FA4 through cuDNN",
    ("fp8", "grid", ""): "forward, float8",
    ("fp32", "grid", ""): "forward, fp32",
    ("bwd", "fp32", ""): "backward, fp32",
    ("fwd", "grid", "sm80"): "forward, bf16, Ampere's kernels",
    ("bwd", "grid", "sm80"): "backward, bf16, Ampere's kernels",
}
NAMES = {"fa2": "FA2", "fa3": "FA3", "fa4": "FA4", "cudnn": "cuDNN", "efficient": "memory-efficient", "sdpa": "SDPA"}
FEATURES = {"softcap": "softcap 30", "alibi": "ALiBi", "bias": "bias", "sinks": "sinks", "dropout": "dropout"}


def lines(cells: list[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([head, "|---" * len(cells[0]) + "|", *rest])


def names(libraries: Iterable[str]) -> str:
    return ", ".join(NAMES.get(name, name) for name in dict.fromkeys(libraries))


def where(ratio: Ratio) -> str:
    row = ratio.row
    return f"head_dim {row['head_dim']} {'causal' if row['causal'] else 'full'} {table.short(row['seqlen'])}"


def speeds(rows: list[dict], peers: list[dict]) -> str:
    """The grids against the best peer of each cell, and every cell in which that one is faster."""
    groups = table.ratios_by_case(rows) | {("bwd", "grid", "through cuDNN"): table.through_cudnn(rows, peers)}
    found = {name: groups[key] for key, name in HEADLINES.items() if groups.get(key)}
    cells = [["", "against the best of", "cells", "runs", "geometric mean", "lowest"]]
    for name, ratios in found.items():
        low = min(ratios, key=lambda ratio: ratio.value)
        cells.append(
            [
                name,
                names(ratio.peer for ratio in ratios),
                str(len(ratios)),
                str(min(ratio.row.get("runs", 1) for ratio in ratios)),
                f"{statistics.geometric_mean(ratio.value for ratio in ratios):.3f}",
                f"{low.value:.3f} ({where(low)}, {names([low.peer])})",
            ]
        )
    parts = [lines(cells), slower(found)]
    return "\n\n".join(part for part in parts if part)


def slower(found: dict[str, list[Ratio]]) -> str:
    """The cells in which another library is faster."""
    below = {name: [ratio for ratio in ratios if table.is_below(ratio)] for name, ratios in found.items()}
    cells = [[name, ", ".join(f"{where(r)} {r.value:.3f}" for r in ratios)] for name, ratios in below.items() if ratios]
    return lines([["slower than the best in", ""], *cells]) if cells else ""


def features(rows: list[dict]) -> str:
    """What each feature leaves of the speed of the same call without it; deterministic gradients at other head dims too."""
    columns = [(work, head_dim, head_dim) for work in ("fwd", "bwd") for head_dim in (64, 128)]
    shares: dict[tuple, list[float]] = {}
    for row, way, share in table.shares(rows):
        name = way or row.get("feature", "")
        if row["dtype"] == "bf16" and "path" not in row:
            dims = row["head_dim"], row.get("head_dim_v", row["head_dim"])
            shares.setdefault((name, row["work"], *dims), []).append(share)
    cells = [["", "forward, head_dim 64", "128", "backward, head_dim 64", "128"]]
    for name, title in (FEATURES | {"deterministic": "deterministic gradients"}).items():
        values = [shares.get((name, *column), []) for column in columns]
        if any(values):
            cells.append([title, *map(span, values)])
    if len(cells) == 1:
        return ""
    more = [
        f"{head_dim if head_dim == head_dim_v else f'{head_dim}/{head_dim_v}'} {span(values)}"
        for (name, work, head_dim, head_dim_v), values in sorted(shares.items())
        if name == "deterministic" and (work, head_dim, head_dim_v) not in columns
    ]
    others = [f"Deterministic gradients at other head dims: {', '.join(more)}."] if more else []
    return "\n\n".join([lines(cells), *others])


def span(values: list[float]) -> str:
    if not values:
        return "–"
    low, high = (f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"


def exactness(rows: list[dict]) -> str:
    """bf16 errors beside those of the others, and the losses of the training example."""
    sentences = []
    of_bf16 = [row["rmse"] for row in rows if (row["work"], row["case"]) == ("accuracy", "bf16")]
    if of_bf16:
        fused = [name for name in ("fa3", "cudnn", "fa2") if name in of_bf16[0]]
        more = [e["flash_ext"] / min(e[name] for name in fused) for e in of_bf16]
        plain = sorted(e["standard"] / e["flash_ext"] for e in of_bf16)
        sentences.append(
            f"The bf16 forward's root mean square error against fp64 is {span(more)} times that of the most exact of "
            f"{names(fused)}; plain attention's is {plain[0]:.2g} to {plain[-1]:.2g} times flash_ext's."
        )
    for row in rows:
        if "loss_difference" in row:
            apart = {name: f"{value:.2g}" for name, value in row["loss_difference"].items()}
            size = f"{row['parameters'] / 1e6:.0f} million parameters, " if "parameters" in row else ""
            theirs = f"; SDPA's do by {apart['sdpa']}" if "sdpa" in apart else ""
            sentences.append(
                f"In training ({size}{len(row['loss']['flash_ext'])} steps), {row['dtype']} losses differ from standard "
                f"attention's by at most {apart['flash_ext']}{theirs}."
            )
    return " ".join(sentences)


def machine(data: dict) -> str:
    commits = ", ".join(dict.fromkeys(row["commit"] for row in data["rows"] if "commit" in row))
    return f"{data['gpu']}, driver {data['driver']}, CUDA {data['cuda']}, torch {data['torch']}; commit {commits}"


def everything(rows: list[dict]) -> str:
    """All ratios, and all shares."""
    return "\n\n".join(lines(cells) for cells in (table.summary_cells(rows), table.share_cells(rows)) if cells)
