"""python -m bench.report: ratios of flash_ext to the best peer from recorded results, and the README's plots.

python -m bench.report                         tables of bench/results/h200.json
python -m bench.report --plots docs/plots      and the plots
python -m bench.report --merge fresh.json      first take the rows of another file in
"""

from __future__ import annotations

import argparse
from pathlib import Path

from . import plots, results, table


def merge_file(into: Path, path: Path, commit: str | None = None) -> None:
    """Takes the rows of `path` into `into`; `commit` is that of rows which do not say theirs (default: the current one)."""
    fresh = results.load(path)
    machine = results.load(into) if into.exists() else {"gpu": fresh["gpu"]}
    if machine["gpu"] != fresh["gpu"]:
        raise ValueError(f"{path} was measured on {fresh['gpu']}, {into} on {machine['gpu']}")
    rows = [{"commit": commit or results.current_commit(), **row} for row in fresh["rows"]]
    results.save(into, {**machine, **fresh}, rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", default=results.RESULTS / "h200.json")
    parser.add_argument("--work", nargs="+", help="only these, such as fwd bwd")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="files of the same GPU to take rows from")
    parser.add_argument("--plots", type=Path, help="draw into this folder")
    options = parser.parse_args(arguments)

    for path in options.merge:
        merge_file(options.file, path)
    data = results.load(options.file)
    # The rows of the training example also hold curves; its own plots show them.
    rows = [row for row in data["rows"] if "loss" not in row and (not options.work or row["work"] in options.work)]
    print(", ".join(f"{key} {value}" for key, value in data.items() if key != "rows"))
    print(f"\n{table.render(rows)}\n\n{table.summary(rows)}")
    if options.plots:
        print(*plots.draw_all(data, options.plots), sep="\n")


if __name__ == "__main__":
    main()
