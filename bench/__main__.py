"""python -m bench: times flash_ext beside the other attention libraries. See bench/NOTES.md for the method.

python -m bench --runs 3 --record                 everything, the median of three runs into bench/results/<gpu>.json
python -m bench fwd bwd --case grid --head-dim 128
python -m bench --quick                           the forward grid with three libraries, in a minute
python -m bench fwd bwd --path sm80               Ampere's kernels
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from . import cases, libraries, results, table
from .runner import Options, refused, run_cases


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", nargs="*", help=f"of: {' '.join(cases.ALL)} (default all)")
    parser.add_argument("--case", nargs="+", help="only these cases, such as grid gqa window packed")
    parser.add_argument("--head-dim", nargs="+", type=int)
    parser.add_argument("--seqlen", nargs="+", type=int)
    parser.add_argument("--mask", choices=("causal", "full"), help="only one of the two")
    parser.add_argument(
        "--path", choices=libraries.PATHS, default="", help="the path of flash_ext, instead of its choice"
    )
    parser.add_argument("--libraries", nargs="+", help=f"of: {' '.join(libraries.LIBRARIES)}")
    parser.add_argument("--device", default="cuda", help="cpu times the CPU path: choose small shapes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=40, help="of one round of one library")
    parser.add_argument(
        "--runs", type=int, default=1, help="record the median of so many runs, each on inputs of its own"
    )
    parser.add_argument("--quick", action="store_true", help="grid only, flash_ext fa3 cudnn, 5 rounds of 15 ms")
    parser.add_argument("--record", action="store_true", help="merge into bench/results/<gpu>.json")
    parser.add_argument("--out", type=Path, help="merge into this file instead")
    parser.add_argument("--commit", help="recorded with the rows, where git cannot tell")
    options = parser.parse_args(arguments)
    options.work = options.work or (["fwd"] if options.quick else list(cases.ALL))
    for work in options.work:
        if work not in cases.ALL:
            parser.error(f"work must be of {', '.join(cases.ALL)}, got {work}")
    for library in options.libraries or ():
        if library not in libraries.LIBRARIES:
            parser.error(f"library must be of {', '.join(libraries.LIBRARIES)}, got {library}")
    if not any(select(options, work) for work in options.work):
        known = sorted({case.case for work in options.work for case in cases.ALL[work]})
        parser.error(f"no case is left: {' '.join(options.work)} has --case {' '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu times the CPU path")
    if options.quick:
        options.case, options.ms = options.case or ["grid"], min(options.ms, 15)
        options.libraries = options.libraries or ["flash_ext", "fa3", "cudnn"]
    return options


def select(options: argparse.Namespace, work: str) -> list[cases.Case]:
    return [
        replace(case, path=options.path)
        for case in cases.ALL[work]
        if (not options.case or case.case in options.case)
        and (not options.head_dim or case.head_dim in options.head_dim)
        and (not options.seqlen or case.seqlen in options.seqlen)
        and (not options.mask or case.causal == (options.mask == "causal"))
    ]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    path = options.out or (results.default_path() if options.record else None)
    start = time.monotonic()
    runs, verdicts = [], {}
    for seed in range(1, options.runs + 1):
        settings = Options(options.device, options.rounds, options.ms / 1e3, options.commit, seed)
        for work in options.work:
            names = options.libraries or libraries.DEFAULT_LIBRARIES[work]
            runs.append(run_cases(select(options, work), names, settings, verdicts))
            if path:  # after every part: a run that is cut short keeps what it has
                results.save(path, results.machine(), results.median_of_runs(runs))
    rows = results.median_of_runs(runs)
    print(table.render(rows), table.summary(rows), sep="\n\n")
    print(f"\n{len(rows)} rows in {time.monotonic() - start:.0f} s on {results.machine()['gpu']}")
    if path:
        print(f"recorded in {path}")
    return 1 if refused(verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
