"""Draws what train_gpt.py measured.    python examples/plots.py runs/train_gpt/results.json docs/plots"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only, no window
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator

COLOURS = {"flash_ext": "#d62728", "sdpa": "#1f77b4", "standard": "#7f7f7f"}
NAMES = {"flash_ext": "flash_ext", "sdpa": "torch SDPA", "standard": "standard attention"}


def draw(rows: list[dict], out: Path) -> list[Path]:
    plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    curves = [row for row in rows if "loss" in row]
    if curves:
        drawn.append(draw_loss(curves[-1], out / "train_loss.png"))
    steps = [row for row in rows if row["work"] == "train" and row["case"] == "context"]
    memory = [row for row in rows if row["work"] == "memory" and row["case"] == "context"]
    if steps and memory:
        drawn.append(draw_contexts(steps, memory, out / "train_context.png"))
    return drawn


def draw_loss(row: dict, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, losses in row["loss"].items():
        # flash_ext narrow on top of wide lines, so that all are seen where they agree.
        width, alpha, above = {"flash_ext": (1.2, 1, 3), "sdpa": (3, 0.5, 2), "standard": (6, 0.4, 1)}[name]
        axes.plot(losses, label=NAMES[name], color=COLOURS[name], linewidth=width, alpha=alpha, zorder=above)
    axes.set(xlabel="step", ylabel="training loss (nats per byte)")
    apart = (f"{NAMES[name]} {value:.2g}" for name, value in row["loss_difference"].items())
    axes.set_title(f"Largest distance from standard attention: {', '.join(apart)} ({row['dtype']})", fontsize=10)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_contexts(steps: list[dict], memory: list[dict], path: Path) -> Path:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_lines(left, steps, "seconds", 1)
    left.set(
        xlabel="context (bytes)", ylabel="seconds per training step", title="Step time, batch x context at least 32k"
    )
    draw_lines(right, memory, "mib", 1 / 1024)
    right.set(xlabel="context (bytes)", ylabel="peak memory (GiB)", title="Peak memory")
    left.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def draw_lines(axes, rows: list[dict], unit: str, scale: float) -> None:
    rows = sorted(rows, key=lambda row: row["seqlen"])
    for name in COLOURS:
        points = [(row["seqlen"], row[unit][name] * scale) for row in rows if name in row[unit]]
        if points:
            wide = {"linewidth": 1.6, "zorder": 3} if name == "flash_ext" else {"linewidth": 4, "alpha": 0.6}
            axes.plot(*zip(*points, strict=True), marker="o", label=NAMES[name], color=COLOURS[name], **wide)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks([row["seqlen"] for row in rows], [f"{row['seqlen'] // 1024}k" for row in rows])


if __name__ == "__main__":
    for drawn_path in draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2])):
        print(drawn_path)
