"""Minutes of forward and backward passes of random problems on several streams at once: every result has to be the first
one again, and nothing may hang (run it under ``timeout``).

    timeout 180 python tests/soak.py --seconds 120 --path auto
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from random_configs import random_config, verdict_of  # noqa: E402

from flash_ext.dispatch import CUDA_PATHS  # noqa: E402
from flash_ext.testing import Problem  # noqa: E402

STREAMS = 4
POOL = 16  # problems that are in turn
IN_FLIGHT = 24  # calls between two looks at their results


@dataclass
class Entry:
    problem: Problem
    first: dict[str, torch.Tensor]

    def complaint(self, again: dict[str, torch.Tensor]) -> str:
        """Forward results are the same bit by bit; gradients too where that was asked for, else up to rounding."""
        for name, x in again.items():
            if torch.equal(x, self.first[name]):
                continue
            exact = name in ("out", "lse") or self.problem.options["deterministic"]
            difference, size = (x - self.first[name]).double().norm().item(), self.first[name].double().norm().item()
            if exact or not difference <= 5e-3 * size + 1e-3:
                return f"{name} differs by {difference:.3g} of {size:.3g} in norm"
        return ""


def entries(rng: random.Random, path: str | None) -> Iterator[Entry]:
    """Problems that the path serves; right on their first run, with nothing beside them."""
    while True:
        config = random_config(rng, path or "auto", ["bf16", "fp16"], 1100)
        verdict, why = verdict_of(config, path or "auto", "both")
        assert verdict != "FAILED", f"{config}: {why}"
        problem = config.problem("cuda")
        if verdict.startswith("ok"):
            yield Entry(problem, problem.run(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default="auto", choices=["auto", *CUDA_PATHS])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    path = None if args.path == "auto" else args.path
    fresh = entries(rng, path)
    pool = [next(fresh) for _ in range(POOL)]
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    begin = reported = time.monotonic()
    calls = 0
    while time.monotonic() - begin < args.seconds:
        in_flight = []
        torch.cuda.synchronize()
        for _ in range(IN_FLIGHT):
            entry, stream = rng.choice(pool), rng.choice(streams)
            with torch.cuda.stream(stream):
                in_flight.append((entry, entry.problem.run(path)))
        torch.cuda.synchronize()
        calls += IN_FLIGHT
        for entry, results in in_flight:
            if complaint := entry.complaint(results):
                print(f"after {calls} calls: {complaint}: {entry.problem.options}, q {tuple(entry.problem.q.shape)}")
                return 1
        pool[rng.randrange(POOL)] = next(fresh)
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(f"{calls} calls in {reported - begin:.0f} s", flush=True)
    print(f"{args.path}: {calls} forward and backward passes on {STREAMS} streams, every result as the first time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
