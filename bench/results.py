"""Recorded results: bench/results/<gpu>.json, rows merged by identity, one row per line so that diffs can be read.

A row has one map from library to number, named by its unit: flash_ext and its peers. Other ways of flash_ext through the
same call (deterministic, another path) stand in a map of their own, `own`, in the same unit: nobody's peers.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

from .cases import Case
from .libraries import OURS

RESULTS = Path(__file__).parent / "results"
UNITS = ("tflops", "us", "seconds", "mib", "rmse")
# What names a row: everything else of it is a result or tells where it came from.
IDENTITY = (
    "work",
    "case",
    "dtype",
    "head_dim",
    "head_dim_v",
    "causal",
    "batch",
    "seqlen",
    "seqlen_k",
    "num_heads",
    "num_heads_kv",
    "window_size",
    "feature",
    "inputs",
    "path",
    "archs",  # of a build
)
# Of the fields of a case, those that every row has; the others are written where they say something.
ALWAYS = ("work", "case", "dtype", "head_dim", "causal", "batch", "seqlen", "num_heads", "num_heads_kv")


def case_fields(case: Case) -> dict:
    row = {name: getattr(case, name) for name in ALWAYS}
    if case.head_dim_v != case.head_dim:
        row["head_dim_v"] = case.head_dim_v
    if case.seqlen_k != case.seqlen:
        row["seqlen_k"] = case.seqlen_k
    if case.window_size != (-1, -1):
        row["window_size"] = list(case.window_size)
    if case.lengths:
        row["lengths"] = list(case.lengths)
    if case.feature:
        row["feature"] = case.feature
    if case.inputs != "normal":
        row["inputs"] = case.inputs
    if case.path:
        row["path"] = case.path
    return row


def make_row(case: Case, unit: str, values: dict[str, float], arch_path: str, commit: str | None = None) -> dict:
    """The row of `case` with the number of each library in `unit`; `arch_path`: the path that flash_ext took."""
    numbers = {name: rounded(value) for name, value in values.items()}
    own = {name: value for name, value in numbers.items() if name in OURS and name != "flash_ext"}
    row = {**case_fields(case), **stamp(commit), "arch_path": arch_path}
    row[unit] = {name: value for name, value in numbers.items() if name not in own}
    return {**row, "own": own} if own else row


def stamp(commit: str | None = None) -> dict[str, str]:
    """What was measured, and when."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"commit": commit or current_commit(), "date": now}


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def identity(row: dict) -> tuple:
    values = [row.get(name) for name in IDENTITY]
    if row.get("case") == "generations":  # the same shape once per path
        values.append(row.get("arch_path"))
    return tuple(tuple(v) if isinstance(v, list) else v for v in values)


def unit_of(row: dict) -> str:
    return next(unit for unit in UNITS if unit in row)


def values_of(row: dict) -> dict[str, float]:
    """Everything that was timed together: flash_ext, its peers, its own other ways."""
    numbers = row[unit_of(row)]
    ours = {name: value for name, value in numbers.items() if name == "flash_ext"}
    return {**ours, **row.get("own", {}), **numbers}


def median_of_runs(runs: list[list[dict]]) -> list[dict]:
    """One row per identity: the median of each library over the runs that have it."""
    by_identity: dict[tuple, list[dict]] = {}
    for rows in runs:
        for row in rows:
            by_identity.setdefault(identity(row), []).append(row)
    merged = []
    for rows in by_identity.values():
        medians = {name: _medians([row.get(name, {}) for row in rows]) for name in (unit_of(rows[0]), "own")}
        merged.append({**rows[-1], "runs": len(rows), **{name: values for name, values in medians.items() if values}})
    return merged


def _medians(maps: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in maps for name in values)
    return {name: rounded(statistics.median(v[name] for v in maps if name in v)) for name in names}


def merge(recorded: list[dict], fresh: list[dict]) -> list[dict]:
    """`fresh` rows take the place of recorded ones with the same identity. Libraries timed only before are dropped:
    numbers of two runs must not stand side by side."""
    rows = {identity(row): row for row in recorded}
    for row in fresh:
        rows[identity(row)] = row
    return list(rows.values())


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def save(path: Path, machine: dict, rows: list[dict]) -> None:
    """Writes the machine's fields and the rows, merged with what `path` holds already."""
    recorded = load(path)["rows"] if path.exists() else []
    lines = ",\n".join("  " + json.dumps(row) for row in merge(recorded, rows))
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in machine.items() if key != "rows")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')


def machine() -> dict:
    """What the rows of one file share."""
    if not torch.cuda.is_available():
        return {"gpu": "cpu", "driver": None, "cuda": None, "torch": torch.__version__}
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def default_path() -> Path:
    """bench/results/h200.json for an NVIDIA H200."""
    name = machine()["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "_")
    return RESULTS / f"{name}.json"


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(command)


def current_commit() -> str:
    return _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]) or "unknown"


def _first_line(command: list[str]) -> str | None:
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None
