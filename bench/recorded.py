"""The recorded run of a GPU, in parts: what bench/results/<gpu>.json and the README's numbers are made of.

python -m bench.recorded                          every part, into bench/results/<gpu>.json
python -m bench.recorded fwd bwd --out here.json  some of them, elsewhere (python -m bench.report --merge takes them in)

Each part is a process of its own and writes when it is done, so a run that is cut short keeps the parts before. The
libraries of a part are timed in turn (bench/NOTES.md). The order is that of interest: what may be cut off comes last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import report, results

# What python -m bench is called with. Grids are the median of three runs; the libraries are those that have been the
# fastest of their row somewhere, since each costs as much time as flash_ext.
PARTS = {
    "fwd": "fwd --case grid --libraries flash_ext fa3 cudnn --runs 3 --ms 8",
    "bwd": "bwd --case grid --seqlen 1024 4096 16384 --libraries flash_ext deterministic cudnn --runs 3 --ms 8",
    "fp8": "fp8 --runs 3 --ms 8",
    "accuracy": "accuracy --runs 3",
    "shapes": "fwd bwd --case gqa window packed cross head_dim fp16 --libraries flash_ext deterministic fa3 cudnn"
    " fa2 --runs 3 --rounds 3 --ms 5",
    "features": "fwd bwd --case feature logits --libraries flash_ext --rounds 3 --ms 4",
    "sm80_fwd": "fwd --case grid --path sm80 --libraries flash_ext fa2 --runs 3 --ms 5",
    "sm80_bwd": "bwd --case grid --seqlen 1024 4096 16384 --path sm80 --libraries flash_ext fa2 --runs 3 --ms 5",
    "sm80_shapes": "fwd bwd --case gqa packed --path sm80 --libraries flash_ext fa2 --runs 3 --ms 5",
    "host": "overhead --runs 3",
    "fp32": "fp32 --rounds 3 --ms 10",
    "generations": "generations --rounds 3 --ms 5",
    "memory": "memory --libraries flash_ext cudnn fa2 standard",
    "sustained": "fwd --case sustained --libraries flash_ext fa3 cudnn",
}
TRAINING = "training"  # examples/train_gpt.py: losses, and step time and memory as the context grows
TRAINING_STEPS = 100
ROOT = Path(__file__).parent.parent


def run(*command: str) -> int:
    # The examples import flash_ext, which need not be installed.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode


def run_part(name: str, out: Path, commit: str) -> int:
    if name != TRAINING:
        return run("-m", "bench", *PARTS[name].split(), "--out", str(out), "--commit", commit)
    with tempfile.TemporaryDirectory() as folder:
        status = run("examples/train_gpt.py", "--steps", str(TRAINING_STEPS), "--out", folder)
        if (rows := Path(folder) / "results.json").exists():
            report.merge_file(out, rows, commit)
    return status


def main(arguments: list[str] | None = None) -> int:
    names = [*PARTS, TRAINING]
    parser = argparse.ArgumentParser(
        "python -m bench.recorded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=f"of: {' '.join(names)} (default all)")
    parser.add_argument("--out", type=Path, help="instead of bench/results/<gpu>.json")
    parser.add_argument("--commit", help="recorded with the rows, where git cannot tell")
    options = parser.parse_args(arguments)
    if wrong := set(options.part) - set(names):
        parser.error(f"part must be of {', '.join(names)}, got {', '.join(sorted(wrong))}")
    out = (options.out or results.default_path()).resolve()
    commit = options.commit or results.current_commit()
    lines, failed = [], 0
    for name in options.part or names:
        start = time.monotonic()
        status = run_part(name, out, commit)
        failed += status != 0
        lines.append(f"{name:12} {time.monotonic() - start:5.0f} s" + f", exit status {status}" * (status != 0))
        print(lines[-1], flush=True)
    print("", *lines, f"recorded in {out}", sep="\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
