"""python -m bench.tune: build a list of kernel variants here, measure them all in one command on the GPU.

python -m bench.tune build bench/tune/fwd_sm80.txt --out build/tune
python -m bench.tune measure build/tune --seqlen 1024 4096 16384 --peers cudnn fa3 --keep tune.json
python -m bench.tune show tune.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

DEFAULT_OUT = Path("build/tune")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the variants of a list")
    build.add_argument("list", type=Path, nargs="+")
    build.add_argument("--out", type=Path, default=DEFAULT_OUT)
    build.add_argument("--arch", default="90a")
    build.add_argument("--jobs", type=int, default=0, help="compilers at once (default: one per core)")
    measure = commands.add_parser("measure", help="check and time a build on this machine's GPU")
    measure.add_argument("folder", type=Path, nargs="?", default=DEFAULT_OUT)
    measure.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096, 16384])
    measure.add_argument("--peers", nargs="*", default=[], help="libraries of python -m bench")
    measure.add_argument("--rounds", type=int, default=5)
    measure.add_argument("--ms", type=float, default=15)
    measure.add_argument("--module", type=Path, help="an extension other than flash_ext's own")
    measure.add_argument("--deterministic", action="store_true", help="backward: deterministic calls too, as NAME+det")
    measure.add_argument("--keep", type=Path, help="write the numbers to this file")
    show = commands.add_parser("show", help="print the table of a measurement that was kept")
    show.add_argument("file", type=Path)
    options = parser.parse_args(arguments)

    if options.command == "build":
        return run_build(options)
    from . import measure as m

    if options.command == "show":
        print(m.render(json.loads(options.file.read_text())))
        return 0
    found = m.measure(
        options.folder, options.seqlen, options.peers, options.rounds, options.ms, options.module, options.deterministic
    )
    if options.keep:
        options.keep.write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + m.render(found))
    return 1 if any(one["refused"] for one in found) else 0


def run_build(options: argparse.Namespace) -> int:
    from .build import build_all, default_jobs, report
    from .variants import read

    variants = [variant for path in options.list for variant in read(path)]
    entries = build_all(variants, options.out, options.arch, options.jobs or default_jobs())
    print(report(entries))
    return 1 if any(entry["library"] is None for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
