"""What a training run leaves behind: the lines that it prints, and rows in the format of bench/results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
from gpt import GPT

import flash_ext


@dataclass
class Run:
    losses: list[float]  # of every step
    seconds: float  # of a step, the median
    peak_mib: float | None  # on a GPU
    held_out: float | None = None


def differences(curves: dict[str, list[float]]) -> dict[str, float]:
    """How far each loss curve gets from standard attention's."""
    standard = curves["standard"]
    return {
        name: max(abs(a - b) for a, b in zip(losses, standard, strict=True))
        for name, losses in curves.items()
        if name != "standard"
    }


def describe_losses(runs: dict[str, Run]) -> str:
    lines = []
    for name, run in runs.items():
        memory = f", peak memory {run.peak_mib / 1024:.2f} GiB" if run.peak_mib else ""
        losses = f"training loss {run.losses[-1]:.4f}, held-out loss {run.held_out:.4f} nats per byte"
        lines.append(f"{name:9}  {losses}, {run.seconds * 1e3:.1f} ms a step{memory}")
    steps = len(runs["flash_ext"].losses)
    apart = differences({name: run.losses for name, run in runs.items()})
    apart = ", ".join(f"{name}'s by {value:.2g}" for name, value in apart.items())
    return "\n".join([*lines, f"Over {steps} steps the loss curves differ from standard attention's at most: {apart}."])


def describe_context(context: int, runs: dict[str, Run], names: list[str]) -> str:
    cells = []
    for name in names:
        run = runs.get(name)
        memory = f", {run.peak_mib / 1024:.2f} GiB" if run and run.peak_mib else ""
        cells.append(f"{name} {run.seconds * 1e3:.1f} ms{memory}" if run else f"{name} out of memory")
    return f"context {context}: " + "; ".join(cells)


def loss_rows(setup, runs: dict[str, Run]) -> list[dict]:
    shape = shape_of(setup, setup.batch, setup.context)
    curves = {
        "loss": {name: [round(loss, 5) for loss in run.losses] for name, run in runs.items()},
        "loss_difference": differences({name: run.losses for name, run in runs.items()}),
        "held_out": {name: run.held_out for name, run in runs.items()},
    }
    return rows_of(shape, "loss", runs, curves)


def context_rows(setup, context: int, runs: dict[str, Run]) -> list[dict]:
    return rows_of(shape_of(setup, setup.batch_at(context), context), "context", runs, {})


def rows_of(shape: dict, case: str, runs: dict[str, Run], more: dict) -> list[dict]:
    rows = [
        {"work": "train", "case": case, **shape, **more, "seconds": {name: run.seconds for name, run in runs.items()}}
    ]
    peaks = {name: run.peak_mib for name, run in runs.items() if run.peak_mib}
    return [*rows, {"work": "memory", "case": case, **shape, "mib": peaks}] if peaks else rows


def shape_of(setup, batch: int, context: int) -> dict:
    """The fields that all rows share."""
    config = setup.config
    dtype = torch.bfloat16 if setup.dtype == "bf16" else torch.float32
    q = torch.empty(1, 128, config.num_heads, config.head_dim, device=setup.device, dtype=dtype)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "arch_path": flash_ext.explain(q, q, q, causal=True).path,
        "dtype": setup.dtype,
        "head_dim": config.head_dim,
        "causal": True,
        "batch": batch,
        "seqlen": context,
        "num_heads": config.num_heads,
        "num_heads_kv": config.num_heads,
        "num_layers": config.num_layers,
        "parameters": parameters_of(config),
    }


def parameters_of(config) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config, attend=None).parameters())


def write(rows: list[dict], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    results = out / "results.json"
    results.write_text(json.dumps({"gpu": gpu, "torch": torch.__version__, "rows": rows}) + "\n")
    return results


def draw_plots(rows: list[dict], out: Path) -> list[Path]:
    """None where matplotlib is not installed."""
    try:
        from plots import draw
    except ImportError:
        return []
    return draw(rows, out)
