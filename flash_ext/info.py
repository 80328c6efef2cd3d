"""python -m flash_ext.info: what is installed and what would run, to paste into a bug report."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path

import torch

from . import __version__, _build, jit


def lines() -> list[str]:
    return [*_versions(), *_devices(), *_extension()]


def _versions() -> list[str]:
    return [
        f"flash_ext   {__version__} in {Path(__file__).parent}",
        f"torch       {torch.__version__} (CUDA {torch.version.cuda})",
        f"Python      {platform.python_version()} on {platform.platform()}",
        f"CPU         {_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} torch threads",
    ]


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(": ")[1] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["device      none (torch.cuda.is_available() is False)"]
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        memory = f"{p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors"
        found.append(f"device {i}    {p.name}, sm_{p.major}{p.minor}, {memory}")
    return found


def _extension() -> list[str]:
    try:
        module = jit.extension()
    except Exception as error:  # whatever it is, it belongs into the report
        return [f"extension   {error}"]
    facts = jit.facts()
    found = [f"extension   {module.__file__}"]
    if facts:
        found += [
            f"built with  torch {facts['torch']}, {facts['toolkit'] or 'no CUDA toolkit'}",
            f"built for   {', '.join(facts['archs']) or 'the CPU alone: ' + facts['cpu_only_because']}",
        ]
    return [*found, f"toolkit now {_toolkit_now()}", *_kernels(module)]


def _toolkit_now() -> str:
    if torch.version.cuda is None:
        return "not looked for: torch is a CPU-only build"
    try:
        return (
            f"{_build.find_toolkit(torch.version.cuda) or 'none'} (kernels that are missing are compiled on first use)"
        )
    except _build.BuildError as error:
        return str(error)


def _kernels(module) -> list[str]:
    """Rows of the table by pass and architecture, and every row that this build lacks."""
    rows = [(module.row_name(row), module.is_built(row)) for row in range(len(module.instances()))]
    total = Counter(" ".join(name.split()[:2]) for name, _ in rows)
    built = Counter(" ".join(name.split()[:2]) for name, is_built in rows if is_built)
    found = [f"kernels     {sum(built.values())} of {len(rows)} in this build"]
    for group in sorted(total):
        found.append(f"  {group:10} {built[group]:3} of {total[group]}")
    missing = [name for name, is_built in rows if not is_built]
    if built and missing:
        found += ["not built", *(f"  {name}" for name in missing)]
    return found


if __name__ == "__main__":
    print(*lines(), sep="\n")
