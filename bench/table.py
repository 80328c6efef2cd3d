"""Results as text: a block per case with one column per sequence length, and the ratios to the best peer."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .results import identity, unit_of, values_of

DECIMALS = {"tflops": 0, "us": 1, "seconds": 3, "mib": 0, "rmse": 5}
LESS_IS_BETTER = ("us", "seconds", "mib", "rmse")


@dataclass
class Ratio:
    row: dict
    value: float  # > 1: flash_ext is better than the best peer
    peer: str


def ratio_to_best_peer(row: dict) -> Ratio | None:
    unit = unit_of(row)
    peers = {name: value for name, value in row[unit].items() if name != "flash_ext"}
    ours = row[unit].get("flash_ext")
    if not peers or ours is None:
        return None
    if unit in LESS_IS_BETTER:
        peer = min(peers, key=peers.get)
        return Ratio(row, peers[peer] / ours, peer)
    peer = max(peers, key=peers.get)
    return Ratio(row, ours / peers[peer], peer)


def label(row: dict) -> str:
    """Names a row but for its sequence length."""
    parts = [row["work"], row["case"], row["dtype"], f"d{row['head_dim']}"]
    if "head_dim_v" in row:
        parts[-1] += f"/{row['head_dim_v']}"
    if row["num_heads_kv"] != row["num_heads"]:
        parts.append(f"heads {row['num_heads']}/{row['num_heads_kv']}")
    parts += [row[name] for name in ("feature", "inputs") if name in row]
    if "path" in row:
        parts.append(f"on {row['path']}")
    if "seqlen_k" in row:
        parts.append(f"seqlen_k {row['seqlen_k']}")
    if "window_size" in row:
        return " ".join([*parts, "window {},{}".format(*row["window_size"])])
    return " ".join([*parts, "causal" if row["causal"] else "full"])


def one_line(row: dict) -> str:
    unit = unit_of(row)
    values = [f"{name} {number(value, unit)}" for name, value in values_of(row).items()]
    ratio = ratio_to_best_peer(row)
    best = [f"x best peer {ratio.value:.3f}"] if ratio else []
    return "  ".join([f"{label(row)} {short(row['seqlen'])} [{unit}, {row['arch_path']}]", *values, *best])


def short(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def number(value: float, unit: str) -> str:
    return f"{value:.{DECIMALS[unit]}f}" if value >= 10 or unit != "tflops" else f"{value:.2g}"


def render(rows: list[dict]) -> str:
    generations = [row for row in rows if row["case"] == "generations"]
    blocks: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["case"] != "generations":
            blocks.setdefault((label(row), unit_of(row)), []).append(row)
    texts = [_block(name, unit, block) for (name, unit), block in blocks.items()]
    return "\n\n".join([*texts, render_generations(generations)] if generations else texts)


GENERATIONS = ("standard", "simt", "sm80", "sm90", "fp8")


def generation_values(rows: list[dict], work: str, head_dim: int, causal: bool, seqlen: int) -> dict[str, float]:
    """One shape through every path, as far as it was measured; fp8 only forward."""
    values = {}
    for row in rows:
        if (row["head_dim"], row["causal"], row["seqlen"]) != (head_dim, causal, seqlen):
            continue
        if row["work"] == work:
            values[row["arch_path"]] = row["tflops"]["flash_ext"]
            values.update({name: value for name, value in row["tflops"].items() if name == "standard"})
        elif row["work"] == "fp8" and work == "fwd":
            values["fp8"] = row["tflops"]["flash_ext"]
    return {name: values[name] for name in GENERATIONS if name in values}


def render_generations(rows: list[dict]) -> str:
    """One line per shape, one column per generation."""
    cells = [["the same shape through every path [tflops]", *GENERATIONS]]
    shapes = sorted(
        {(row["work"], row["head_dim"], row["causal"], row["seqlen"]) for row in rows if row["work"] != "fp8"}
    )
    for work, head_dim, causal, seqlen in sorted(shapes, key=lambda shape: shape[0] != "fwd"):
        values = generation_values(rows, work, head_dim, causal, seqlen)
        numbers = [number(values[name], "tflops") if name in values else "-" for name in GENERATIONS]
        cells.append([f"{work} d{head_dim} {'causal' if causal else 'full'} {short(seqlen)}", *numbers])
    return align(cells)


def shares(rows: list[dict]) -> list[tuple[dict, str, float]]:
    """What a feature, unusual scores or another way of flash_ext (deterministic, another path) leave of the speed of the
    same call without it, in the same run: (row, way or "", share)."""
    speeds = {identity(row): row["tflops"]["flash_ext"] for row in rows if "flash_ext" in row.get("tflops", {})}
    found = []
    for row in rows:
        ours = speeds.get(identity(row))
        base = {name: value for name, value in row.items() if name not in ("feature", "inputs")}
        if ours and identity(row) != identity(base) and identity(base) in speeds:
            found.append((row, "", ours / speeds[identity(base)]))
        found += [(row, way, value / ours) for way, value in row.get("own", {}).items() if ours]
    return found


def _block(name: str, unit: str, rows: list[dict]) -> str:
    rows = sorted(rows, key=lambda row: row["seqlen"])
    libraries = list(dict.fromkeys(library for row in rows for library in values_of(row)))
    cells = [["", *(short(row["seqlen"]) for row in rows)]]
    for library in libraries:
        values = [values_of(row).get(library) for row in rows]
        cells.append([library, *("-" if value is None else number(value, unit) for value in values)])
    ratios = [ratio_to_best_peer(row) for row in rows]
    if any(ratios):
        cells.append(["x best peer", *(f"{r.value:.2f}" if r else "-" for r in ratios)])
    return f"{name} [{unit}]\n" + align(cells)


def align(cells: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(lines)


def is_below(ratio: Ratio) -> bool:
    """In the digits that are printed."""
    return round(ratio.value, 3) < 1


def ratios_by_case(rows: list[dict]) -> dict[tuple[str, str, str], list[Ratio]]:
    """Of each (work, case, path): the ratios to the best peer, where there is something to compare with."""
    groups: dict[tuple, list[Ratio]] = {}
    for row in rows:
        ratio = ratio_to_best_peer(row)
        if ratio and row["case"] != "generations":
            groups.setdefault((row["work"], row["case"], row.get("path", "")), []).append(ratio)
    return groups


def through_cudnn(rows: list[dict], peers: list[dict]) -> list[Ratio]:
    """Ratios to the best of several libraries of which cuDNN alone was timed beside flash_ext. The others are read through
    their own ratio to cuDNN in `peers`, rows of another run on such a card."""
    of_peers = {identity(row): row["tflops"] for row in peers}
    found = []
    for row in rows:
        ours, theirs = row.get("tflops", {}), of_peers.get(identity(row))
        if theirs and {"flash_ext", "cudnn"} <= ours.keys():
            peer = max(theirs, key=theirs.get)
            found.append(Ratio(row, ours["flash_ext"] / ours["cudnn"] * theirs["cudnn"] / theirs[peer], peer))
    return found


def summary_cells(rows: list[dict]) -> list[list[str]]:
    """Per work and case: geometric mean and lowest of the ratios to the best peer. Empty where there is nothing to compare."""
    cells = [["flash_ext / best peer", "cells", "geomean", "below 1", "lowest", "where (against)"]]
    for (work, case, path), ratios in ratios_by_case(rows).items():
        low = min(ratios, key=lambda ratio: ratio.value)
        where = f"{label(low.row)} {short(low.row['seqlen'])} ({low.peer})"
        mean = statistics.geometric_mean(ratio.value for ratio in ratios)
        name = f"{work} {case}" + (f" on {path}" if path else "")
        below = str(sum(map(is_below, ratios)))
        cells.append([name, str(len(ratios)), f"{mean:.3f}", below, f"{low.value:.3f}", where])
    return cells if len(cells) > 1 else []


def share_cells(rows: list[dict]) -> list[list[str]]:
    cells = [
        [f"{label(row)} {short(row['seqlen'])} {way}".rstrip(), f"{share:.2f}"] for row, way, share in shares(rows)
    ]
    return [["share of the plain call's speed", ""], *cells] if cells else []


def summary(rows: list[dict]) -> str:
    cells = summary_cells(rows) or [["no row has both flash_ext and a peer"]]
    return "\n\n".join(align(part) for part in (cells, share_cells(rows)) if part)
