"""Compiles variants into libraries of their own, which know neither torch nor each other. A library holds one row of the
kernel table; flash_ext's override_row puts it in place of the row's own."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from bench import bench_build
from build_tools.environment import find_compiler
from build_tools.shared import build

from .variants import Variant

PRINT_TABLE = """
#include <iostream>
#include "api.h"
int main() {
  for (const flash::Key& key : flash::kInstances) std::cout << flash::to_string(key) << "\\n";
}
"""
# Each library must keep its own copy of the registry.
SEPARATE = ["-Xcompiler=-fvisibility=hidden", "-Xcompiler=-fno-gnu-unique"]


def row_numbers() -> dict[str, int]:
    """The kernel table of this source tree, by name."""
    with tempfile.TemporaryDirectory() as folder:
        main, program = Path(folder, "table.cpp"), Path(folder, "table")
        main.write_text(PRINT_TABLE)
        sources = [str(main), str(build.CSRC / "api.cpp")]
        # api.cpp also calls the CPU path, which the table does not need.
        flags = ["-std=c++20", f"-I{build.CSRC}", "-Wl,--unresolved-symbols=ignore-all"]
        subprocess.run([find_compiler(), *flags, *sources, "-o", str(program), "-ldl"], check=True)
        lines = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    return {name: row for row, name in enumerate(lines)}


def build_all(variants: list[Variant], out: Path, arch: str, jobs: int) -> list[dict]:
    """Builds them all and writes out/manifest.json, which also says what ptxas made of each variant."""
    out.mkdir(parents=True, exist_ok=True)
    rows = row_numbers()
    unknown = [variant.row_name for variant in variants if variant.row_name not in rows]
    if unknown:
        raise ValueError(f"not in the kernel table: {unknown[0]!r}; it has\n" + "\n".join(rows))
    toolkit = build.find_toolkit(None)
    if toolkit is None:
        raise RuntimeError("no CUDA toolkit was found; set CUDA_HOME")

    def one(variant: Variant) -> dict:
        return build_one(variant, rows[variant.row_name], out, str(toolkit.nvcc), arch)

    with ThreadPoolExecutor(jobs) as pool:
        entries = list(pool.map(one, variants))
    (out / "manifest.json").write_text(json.dumps(entries, indent=1) + "\n")
    return entries


def build_one(variant: Variant, row: int, out: Path, nvcc: str, arch: str) -> dict:
    library, log = out / f"{variant.name}.so", out / f"{variant.name}.log"
    flags = [*build.nvcc_flags(), *build.gencode([arch]), *SEPARATE, "-Xptxas=-v", "-shared"]
    sources = map(str, (build.CSRC / "variant.cpp", *build.sources_of_row(variant.row_name)))
    command = [nvcc, *flags, f"-DFLASH_EXT_ROW={row}", *variant.defines(), *sources, "-o", str(library)]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    text = result.stdout + result.stderr
    log.write_text(" ".join(command) + "\n" + text)
    entry = {**asdict(variant), "row": row, "library": library.name, "seconds": round(seconds, 1)}
    if result.returncode != 0:
        return {**entry, "library": None, "problem": text.strip().splitlines()[:5]}
    subprocess.run(["strip", str(library)], check=True)
    kernels = bench_build.parse_log(text)
    return {
        **entry,
        "registers": max((kernel.registers for kernel in kernels), default=0),
        "spill_bytes": sum(kernel.spill_stores + kernel.spill_loads for kernel in kernels),
        "advice": bench_build.serialised(text),
    }


def report(entries: list[dict]) -> str:
    lines = []
    for entry in entries:
        if entry["library"] is None:
            lines.append(f"{entry['name']}: does not compile: {' '.join(entry['problem'])[:300]}")
            continue
        spills = f", SPILLS {entry['spill_bytes']} bytes" if entry["spill_bytes"] else ""
        advice = f", {len(entry['advice'])} times wgmma serialised" if entry["advice"] else ""
        lines.append(f"{entry['name']}: {entry['registers']} registers{spills}{advice}, {entry['seconds']} s")
    return "\n".join(lines)


def default_jobs() -> int:
    return os.cpu_count() or 1
