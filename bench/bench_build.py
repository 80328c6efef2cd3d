"""python -m bench.bench_build: seconds per file, and registers, spills and shared memory per kernel.

python -m bench.bench_build                   compile every kernel file alone, one after another, and print the table
python -m bench.bench_build --files 'sm80/*'  these files (FLASH_EXT_ARCHS="86;89" chooses the architectures)
python -m bench.bench_build --rows '*'        seconds that jit.load takes for each row whose name matches, on this machine's cores
python -m bench.bench_build --record          any of them, recorded in bench/results/build.json
python -m bench.bench_build --check           no compiling: fail if the build just made spills or serialises wgmma
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from build_tools import ninja_build
from build_tools.shared import build

# The kernels that may spill, and how many bytes: patterns of "file kernel architecture". All others are hot: not one byte.
MAY_SPILL = {
    # General variants: softcap, ALiBi, bias, sinks and dropout need registers beside the accumulators.
    "sm90/* *Traits<*, true>> *": 128,
    # Of the backward, each option alone: half of it is the helper's, once in a step. The loop for any of them together
    # and the pairs' spill more (bench/NOTES.md says what they cost).
    "sm90/bwd_* *Traits<*, true, *>> *": 512,
    "sm90/bwd_* *Traits<*, true, 0>> *": 1400,
    "sm80/* *Traits<*, true, *>> *": 320,
    # Between tiles of keys, not in a step of them.
    "sm90/bwd_sm90_d128.cu *": 8,
    "sm90/bwd_sm90_d256.cu *": 4,
    "simt/*_simt_tf32.cu *": 64,
    # Large tiles, where the GPU's shared memory makes the small one run.
    "sm80/fwd_sm80_d256.cu *Traits<*, false, false>> sm_8[069]": 24,
    "sm80/fwd_sm80_d256.cu *Traits<*, false, false>> sm_120": 32,
    "sm80/bwd_sm80_d128.cu *Traits<*, false, false>> sm_8[69]": 36,
    "sm80/bwd_sm80_d128.cu *Traits<*, false, false>> sm_120": 4,
    "sm80/bwd_sm80_d256.cu *Traits<*, false, false>> sm_120": 8,
    # This one does run there. Nothing has been timed on these GPUs yet.
    "sm80/bwd_sm80_d64.cu *Traits<*, false, false>> sm_8[69]": 12,
}


@dataclass(frozen=True)
class Kernel:
    """What ptxas -v says about one kernel on one architecture."""

    name: str  # demangled
    arch: str
    registers: int
    stack: int  # bytes
    spill_stores: int
    spill_loads: int
    shared: int  # bytes of static shared memory; the tiles are allocated at the launch


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# C7510 and its like: ptxas waits after every wgmma, because a register of one in flight is touched or none is left.
_ADVICE = re.compile(r"\((C75\d\d)\).*?function '(\w+)'")


def demangle(names: list[str]) -> list[str]:
    for tool in ("cu++filt", "c++filt"):
        try:
            result = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return result.stdout.splitlines()
    return names


def parse_log(text: str) -> list[Kernel]:
    found = []
    for block in re.split(r"(?=ptxas info\s+: Compiling entry function)", text):
        entry, stack, used = _ENTRY.search(block), _STACK.search(block), _USED.search(block)
        if entry and stack and used:
            numbers = (int(used[1]), *map(int, stack.groups()), int(used[2] or 0))
            found.append((entry[1], entry[2], numbers))
    names = demangle([name for name, _, _ in found])
    return [Kernel(short(name), arch, *numbers) for name, (_, arch, numbers) in zip(names, found, strict=True)]


def short(name: str) -> str:
    """Without return type, namespaces and parameters: fwd_sm90_kernel<Traits<...>>."""
    depth, end = 0, len(name)
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and not name.startswith("(anonymous", i):
            end = i
            break
    name = re.sub(r"\(anonymous namespace\)::|flash::|^void |\((?:bool|int|flash::[\w:]+)\)", "", name[:end])
    return name.replace("> >", ">>")


def serialised(text: str) -> list[tuple[str, str]]:
    """(kernel, what ptxas says) for each kernel in which it waits after every wgmma."""
    found = [(match[2], match[1]) for match in _ADVICE.finditer(text)]
    names = demangle([name for name, _ in found])
    return [(short(name), advice) for name, (_, advice) in zip(names, found, strict=True)]


def logs(folder: Path) -> Iterator[tuple[str, str]]:
    """(csrc-relative file, what nvcc said) of every kernel file of a build."""
    for path in sorted(folder.glob("*/*.cu.o.log")):
        yield str(path.relative_to(folder)).removesuffix(".o.log"), path.read_text()


def problems(folder: Path) -> list[str]:
    found = []
    for file, text in logs(folder):
        found += [f"{file} {name}: {advice}" for name, advice in serialised(text)]
        for k in parse_log(text):
            where = f"{file} {k.name} {k.arch}"
            allowed = max((most for pattern, most in MAY_SPILL.items() if fnmatch(where, pattern)), default=0)
            if k.spill_stores > allowed:
                found.append(f"{where}: spills {k.spill_stores} bytes at {k.registers} registers, allowed {allowed}")
    return found


def check() -> int:
    facts = json.loads((build.CSRC.parent / "flash_ext" / ninja_build.FACTS).read_text())
    if not facts["archs"]:
        print(f"no kernels in this build: {facts['cpu_only_because']}")
        return 0
    folder = Path(facts["folder"])
    found = problems(folder)
    print(*found, sep="\n")
    print(f"{sum(1 for _ in logs(folder))} kernel files for {', '.join(facts['archs'])}: {len(found)} problems")
    return 1 if found else 0


def cpu_seconds_of_children() -> float:
    """Processor time, which other work on the machine does not lengthen; one nvcc keeps one core busy."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, pattern: str = "*") -> list[dict]:
    """Compile each kernel file alone; one row per file."""
    plan = ninja_build.make_plan()
    if not plan.archs:
        sys.exit(f"cannot compile kernels: {plan.why}")
    rows = []
    for source in plan.kernels:
        file = str(source.relative_to(build.CSRC))
        if not fnmatch(file, pattern):
            continue
        log = folder / f"{file}.o.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        archs = build.archs_of(source, plan.archs)
        command = [str(plan.toolkit.nvcc), *build.nvcc_flags(), "-Xptxas=-v", *build.gencode(archs)]
        start = cpu_seconds_of_children()
        result = subprocess.run([*command, "-c", str(source), "-o", str(log)[:-4]], capture_output=True, text=True)
        seconds = cpu_seconds_of_children() - start
        if result.returncode != 0:
            sys.exit(result.stdout + result.stderr)
        log.write_text(result.stdout + result.stderr)
        kernels = parse_log(log.read_text())
        rows.append(
            {
                "work": "build",
                "case": file,
                "arch_path": source.parent.name,
                "archs": archs,
                "kernels": len(kernels),
                "registers": max((k.registers for k in kernels), default=0),
                "spills": sum(k.spill_stores + k.spill_loads for k in kernels),
                "per_kernel": per_kernel(kernels),
                "seconds": {"flash_ext": round(seconds, 1)},
            }
        )
        print_row(rows[-1])
    return rows


def per_kernel(kernels: list[Kernel]) -> dict[str, list[int]]:
    """kernel and architecture -> registers, bytes spilled."""
    return {f"{k.name} {k.arch}": [k.registers, k.spill_stores + k.spill_loads] for k in kernels}


LOAD_ROW = """
import sys, time
from bench.bench_build import cpu_seconds_of_children
from flash_ext import jit
jit.extension()  # not part of what is timed
start = time.perf_counter()
jit.load(int(sys.argv[1]))
print(time.perf_counter() - start, cpu_seconds_of_children())
"""


def measure_rows(pattern: str) -> list[dict]:
    """Compile rows one after another as on first use, each into an empty cache."""
    from flash_ext import jit

    module, rows = jit.extension(), []
    for number in range(len(module.instances())):
        name = module.row_name(number)
        if not fnmatch(name, pattern):
            continue
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-c", LOAD_ROW, str(number)]
            env = {**os.environ, "TORCH_EXTENSIONS_DIR": cache}
            result = subprocess.run(command, env=env, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(result.stdout + result.stderr)
        wall, cpu = (round(float(word), 1) for word in result.stdout.split()[-2:])
        where = {"work": "build", "case": f"row {name}", "arch_path": name.split()[1]}
        rows.append({**where, "seconds": {"flash_ext": wall}, "cpu_seconds": cpu})
        print(f"{name:58} {wall:7.1f} {cpu:9.1f}", flush=True)
    return rows


def print_row(row: dict) -> None:
    cells = (
        row["case"],
        ",".join(row["archs"]),
        row["seconds"]["flash_ext"],
        *map(row.get, ("kernels", "registers", "spills")),
    )
    print("{:34} {:12} {:7.1f} {:8} {:10} {:7}".format(*cells), flush=True)


def print_kernels(folder: Path) -> None:
    print(f"\n{'registers':>9} {'stack':>6} {'spills':>7} {'smem':>7}  kernel")
    for file, text in logs(folder):
        print(file)
        for k in parse_log(text):
            spills = k.spill_stores + k.spill_loads
            print(f"{k.registers:9} {k.stack:6} {spills:7} {k.shared:7}  {k.arch} {k.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--files", metavar="PATTERN", default="*", help="of kernel files below csrc/")
    parser.add_argument("--rows", metavar="PATTERN")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="print every kernel too")
    options = parser.parse_args()
    if options.check:
        return check()
    if options.rows:
        print(f"{'row':58} {'seconds':>7} {'processor':>9}")
        rows = measure_rows(options.rows)
    else:
        folder = build.CSRC.parent / "build" / "bench_build"
        print(f"{'file':34} {'archs':12} {'seconds':>7} {'kernels':>8} {'registers':>10} {'spills':>7}")
        rows = measure(folder, options.files)
        total = sum(row["seconds"]["flash_ext"] for row in rows)
        print(f"{'total':34} {'':12} {total:7.1f}")
        if options.kernels:
            print_kernels(folder)
    if options.record:
        record(rows)
    return 0


def record(rows: list[dict]) -> None:
    from . import results

    stamp = results.stamp()
    results.save(results.RESULTS / "build.json", results.machine(), [{**row, **stamp} for row in rows])


if __name__ == "__main__":
    sys.exit(main())
