"""The README's plots, drawn from recorded results."""

from __future__ import annotations

import runpy
from pathlib import Path

from .table import generation_values, short

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "flash_ext": "#d62728",
    "fa3": "#1f77b4",
    "fa4": "#9467bd",
    "cudnn": "#2ca02c",
    "fa2": "#ff7f0e",
    "efficient": "#8c564b",
    "math": "#bcbd22",
    "standard": "#7f7f7f",
}
NAMES = {
    "flash_ext": "flash_ext",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN (torch SDPA)",
    "fa2": "FlashAttention-2 (torch)",
    "efficient": "memory-efficient (torch SDPA)",
    "math": "math (torch SDPA)",
    "standard": "standard attention",
}
GENERATIONS = {
    "standard": "standard",
    "simt": "simt\n(portable)",
    "sm80": "sm80\n(Ampere)",
    "sm90": "sm90\n(Hopper)",
    "fp8": "sm90\nfp8",
}


def draw_all(data: dict, out: Path) -> list[Path]:
    """Draws what the rows allow."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    out.mkdir(parents=True, exist_ok=True)
    rows = data["rows"]
    drawn = []
    for work, title in (("fwd", "Forward, bf16"), ("bwd", "Backward, bf16"), ("fp8", "Forward, fp8 (e4m3)")):
        grid = [row for row in rows if row["work"] == work and row["case"] == "grid" and "path" not in row]
        if grid:
            drawn.append(draw_grid(plt, grid, f"{title}, {data['gpu']}", out / f"{work}.png"))
    generations = [row for row in rows if row["case"] == "generations"]
    if generations:
        drawn.append(draw_generations(plt, generations, data["gpu"], out / "generations.png"))
    training = runpy.run_path(str(ROOT / "examples" / "plots.py"))
    return drawn + training["draw"](rows, out)


def draw_grid(plt, rows: list[dict], title: str, path: Path) -> Path:
    """A panel per head_dim and mask, a line per library over sequence length."""
    head_dims = sorted({row["head_dim"] for row in rows})
    masks = sorted({row["causal"] for row in rows})
    figure, axes = plt.subplots(
        len(masks), len(head_dims), figsize=(4 * len(head_dims), 3.2 * len(masks)), squeeze=False, layout="constrained"
    )
    for i, causal in enumerate(masks):
        for j, head_dim in enumerate(head_dims):
            panel = [row for row in rows if row["causal"] == causal and row["head_dim"] == head_dim]
            draw_panel(axes[i][j], sorted(panel, key=lambda row: row["seqlen"]))
            axes[i][j].set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}", fontsize=10)
        axes[i][0].set_ylabel("TFLOP/s")
    handles = {
        label: handle for row in axes for a in row for handle, label in zip(*a.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def draw_panel(axes, rows: list[dict]) -> None:
    for name in NAMES:
        points = [(i, row["tflops"][name]) for i, row in enumerate(rows) if name in row["tflops"]]
        if points:
            width = 2.4 if name == "flash_ext" else 1.4
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                linewidth=width,
                color=COLOURS[name],
                label=NAMES[name],
            )
    axes.set_xticks(range(len(rows)), [short(row["seqlen"]) for row in rows])
    axes.set_ylim(bottom=0)


def draw_generations(plt, rows: list[dict], gpu: str, path: Path) -> Path:
    """A panel per shape, a bar per generation: the same maths, faster hardware paths."""
    panels = sorted({(row["head_dim"], row["causal"], row["seqlen"]) for row in rows if row["work"] != "bwd"})
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns, 2.8 * lines), squeeze=False, sharey=True, layout="constrained"
    )
    flat = [a for line in axes for a in line]
    for a, (head_dim, causal, seqlen) in zip(flat, panels, strict=False):
        values = generation_values(rows, "fwd", head_dim, causal, seqlen)
        bars = a.bar(range(len(values)), values.values(), color=[_bar_colour(name) for name in values])
        a.bar_label(bars, fmt="%.0f", fontsize=8)
        a.set_xticks(range(len(values)), [GENERATIONS[name] for name in values], fontsize=7)
        a.set_title(f"head_dim {head_dim}, {'causal' if causal else 'full'}, {short(seqlen)}", fontsize=9)
    for a in flat[len(panels) :]:
        a.set_visible(False)
    for line in axes:
        line[0].set_ylabel("TFLOP/s")
    figure.suptitle(f"Forward, one shape through every path, {gpu}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _bar_colour(name: str) -> str:
    return COLOURS["standard"] if name == "standard" else COLOURS["flash_ext"]
