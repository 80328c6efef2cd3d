"""Random problems against plain attention in float64, hundreds per second on a GPU.

    python tests/random_configs.py --path sm90 --count 2000 --seed 1
    python tests/random_configs.py --path sm90 --config "Config(seqlen_q=65, causal=True)"     one problem again

A failure prints the line that repeats it. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from cases import Config  # noqa: E402

from flash_ext.dispatch import PATHS  # noqa: E402
from flash_ext.testing import check, device_of, poison  # noqa: E402


def random_length(rng: random.Random, longest: int) -> int:
    """Short lengths, and lengths around the tiles' edges, where kernels go wrong."""
    if rng.random() < 0.4:
        return rng.randint(1, min(40, longest))
    edge = rng.choice([64, 80, 96, 112, 128, 160, 176, 192, 256, 320, 384, 512, 1024])
    return max(1, min(edge + rng.choice([-2, -1, 0, 0, 1, 2, 17]), longest))


def random_config(rng: random.Random, dtypes: list[str], longest: int) -> Config:
    def sometimes(probability: float) -> bool:
        return rng.random() < probability

    num_heads_kv = rng.choice([1, 1, 2, 3])
    num_heads = num_heads_kv * rng.choice([1, 1, 2, 3, 4, 7])
    head_dim = rng.choice(
        [64, 64, 128, 128, 256, 96, 192, 8, 16, 32, 40, 72, 80, 104, 112, 160, 224, rng.randint(1, 256)]
    )
    dtype = rng.choice(dtypes)
    config = Config(
        batch=rng.choice([1, 1, 2, 3]),
        seqlen_q=random_length(rng, longest),
        seqlen_k=max(8, random_length(rng, longest)),
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=rng.choice([0, 0, 0, 0, 64, 128, rng.randint(1, 256)]),
        dtype=dtype,
        causal=sometimes(0.4),
        softmax_scale=rng.choice([None, None, None, 0.3, 1.0]),
        deterministic=sometimes(0.2),
        layout=rng.choice(["contiguous"] * 4 + ["heads_first", "expanded", "odd"]),
        lse_gradient=sometimes(0.5),
        seed=rng.randrange(2**31),
    )
    # Rows of very few keys are left out: there the gradient of the scores is a difference of numbers that cancel.
    if sometimes(0.3):
        window = (rng.choice([-1, rng.randint(8, 300)]), rng.choice([-1, 0, 1, rng.randint(0, 300)]))
        config = replace(config, window_size=window)
    if sometimes(0.35):
        pairs = [
            tuple(0 if sometimes(0.1) else max(low, random_length(rng, longest)) for low in (1, 8))
            for _ in range(rng.randint(1, 5))
        ]
        used = tuple(rng.randint(min(n, 8), n) for _, n in pairs) if sometimes(0.3) else ()
        config = replace(config, lengths=tuple(pairs), used=used, tail=rng.choice([0, 0, 1, 70]), layout="contiguous")
        if max(n for n, _ in pairs) == 0 or max(n for _, n in pairs) == 0:
            config = replace(config, lengths=((5, 9), *pairs), used=(8, *used) if used else ())
    if sometimes(0.4):  # the general variants
        config = replace(
            config,
            softcap=rng.choice([0.0, 0.0, 1.0, 15.0, 50.0]),
            alibi=rng.choice(["", "", "heads", "batch"]),
            # A bias that is the same for all keys of a row changes nothing: its gradient is zero but for rounding.
            bias=rng.choice(["", "", "k", "qk", "bk", "hqk", "bhqk"]),
            bias_fp32=sometimes(0.3),
            sinks=sometimes(0.3),
        )
        if config.window_size == (-1, -1) and not config.lengths and config.seqlen_k >= 16:
            config = replace(config, dropout_p=rng.choice([0.0, 0.1, 0.5]))
    return config


def verdict_of(config: Config, path: str, pass_: str) -> tuple[str, str]:
    """("ok" | "forward only" | "not served" | "FAILED", what is wrong)."""
    problem = config.problem("cuda" if path == "auto" else device_of(path))
    attempts = {"fwd": [False], "bwd": [True], "both": [True, False]}[pass_]
    for backward in attempts:
        try:
            with poison():
                check(problem, None if path == "auto" else path, backward)
            return ("ok" if backward or pass_ == "fwd" else "forward only"), ""
        except NotImplementedError:
            continue
        except AssertionError as error:
            return "FAILED", str(error)
        except (ValueError, TypeError, RuntimeError):
            return "FAILED", traceback.format_exc(limit=-3)
    return "not served", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, choices=["auto", *PATHS], help="auto: the choice on a GPU")
    parser.add_argument("--pass", dest="pass_", default="both", choices=["fwd", "bwd", "both"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "bf16", "fp16", "fp32"])
    parser.add_argument("--longest", type=int, default=600, help="of any sequence")
    parser.add_argument("--failures", type=int, default=20, help="stop after so many")
    parser.add_argument("--config", help="one problem, as a failure prints it")
    args = parser.parse_args()

    rng = random.Random(args.seed)
    configs = (random_config(rng, args.dtypes, args.longest) for _ in range(args.count))
    if args.config:
        configs = [eval(args.config, {"Config": Config})]
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for config in configs:
        try:
            verdict, why = verdict_of(config, args.path, args.pass_)
        except KeyboardInterrupt:
            print("interrupted in", config)
            break
        counts[verdict] += 1
        if verdict == "FAILED":
            why = why.strip().replace("\n", "\n    ")
            print(f'--path {args.path} --pass {args.pass_} --config "{config}"\n    {why}', flush=True)
            if "CUDA error" in why or "illegal" in why:  # nothing can run after it
                break
        if counts["FAILED"] >= args.failures or time.monotonic() - begin > args.seconds:
            break
    rate = sum(counts.values()) / max(time.monotonic() - begin, 1e-9)
    print(f"{args.path} {args.pass_} seed {args.seed}: {dict(counts)}, {rate:.0f} per second", flush=True)
    return min(counts["FAILED"], 1)


if __name__ == "__main__":
    sys.exit(main())
