"""Random problems against plain attention in float64; on a GPU in several processes at once.

    python tests/random_configs.py --path sm90 --count 10000 --seed 1 --jobs 12
    python tests/random_configs.py --path sm90 --config "Config(seqlen_q=65, causal=True)"     one problem again

``--count`` counts the problems that the path serves. A failure prints the line that repeats it. The exit status is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from cases import DTYPES, Config  # noqa: E402
from closed_form import ClosedForm  # noqa: E402
from screen import Float8Screen, Screen  # noqa: E402

from flash_ext.dispatch import PATHS  # noqa: E402
from flash_ext.testing import check, check_draws, device_of, poison  # noqa: E402
from flash_ext.tolerance import Results  # noqa: E402

HEAD_DIMS = (64, 64, 64, 128, 128, 128, 256, 96, 192, 8, 16, 32, 40, 72, 80, 104, 112, 160, 224)
# Of ten thousand problems it is the unluckiest that is judged again: beside twelve draws of it plain attention may still
# look better by chance, beside many not.
DRAWS = (12, 192)
AGAIN = "of them judged again by autograd"
EDGES = (64, 80, 96, 112, 128, 160, 176, 192, 256, 320, 384, 512, 1024)


def random_length(rng: random.Random, longest: int) -> int:
    """Short lengths, and lengths around the tiles' edges, where kernels go wrong; long ones are rare."""
    if rng.random() < 0.4:
        return rng.randint(1, min(40, longest))
    edge = EDGES[int(len(EDGES) * rng.random() ** 1.5)]
    return max(1, min(edge + rng.choice([-2, -1, 0, 0, 1, 2, 17]), longest))


def random_config(rng: random.Random, path: str, dtypes: list[str], longest: int) -> Config:
    def sometimes(probability: float) -> bool:
        return rng.random() < probability

    num_heads_kv = rng.choice([1, 1, 2, 3])
    num_heads = num_heads_kv * rng.choice([1, 1, 2, 3, 4, 7])
    head_dim = rng.choice(HEAD_DIMS) if sometimes(0.9) else rng.randint(1, 256)
    head_dim_v = rng.choice([0, 0, 0, 0, 0, 64, 128, rng.randint(1, 256)])
    dtype = rng.choice(dtypes)
    if path == "sm90":  # rows of 16 bytes
        head_dim, head_dim_v = (dim + 7 & ~7 for dim in (head_dim, head_dim_v))
    if path == "sm80" and dtype == "fp32":
        head_dim, head_dim_v = min(head_dim, 128), min(head_dim_v, 128)
    config = Config(
        batch=rng.choice([1, 1, 2, 3]),
        seqlen_q=random_length(rng, longest),
        seqlen_k=random_length(rng, longest),
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=sometimes(0.4),
        softmax_scale=rng.choice([0.3, 1.0, 0.0, -0.2]) if sometimes(0.2) else None,
        deterministic=sometimes(0.2),
        layout=rng.choice(["heads_first", "expanded", "odd"]) if sometimes(0.4) else "contiguous",
        lse_gradient=sometimes(0.5),
        seed=rng.randrange(2**31),
    )
    if sometimes(0.3):
        window = (rng.choice([-1, rng.randint(0, 8), rng.randint(8, 300)]), rng.choice([-1, 0, 1, rng.randint(0, 300)]))
        config = replace(config, window_size=window)
    if sometimes(0.35):
        config = with_lengths(rng, config, longest)
    if sometimes(0.4):  # the general variants
        config = replace(
            config,
            softcap=rng.choice([0.0, 0.0, 1.0, 15.0, 50.0]),
            alibi=rng.choice(["", "", "heads", "batch"]),
            # A bias that is the same for all keys of a row changes nothing: its gradient is zero but for rounding.
            bias=rng.choice(["", "", "k", "qk", "bk", "hqk", "bhqk"]),
            bias_fp32=sometimes(0.3),
            sinks=sometimes(0.3),
            dropout_p=rng.choice([0.0, 0.0, 0.0, 0.0, 0.1, 0.5]),
        )
    return config


def with_lengths(rng: random.Random, config: Config, longest: int) -> Config:
    """Packed sequences, some without queries or keys, some of whose keys are not used."""

    def length() -> int:
        return 0 if rng.random() < 0.1 else random_length(rng, longest)

    pairs = [(length(), length()) for _ in range(rng.randint(1, 5))]
    if max(n for n, _ in pairs) == 0 or max(n for _, n in pairs) == 0:
        pairs.append((5, 9))
    used = tuple(rng.randint(0, n) for _, n in pairs) if rng.random() < 0.3 else ()
    return replace(config, lengths=tuple(pairs), used=used, tail=rng.choice([0, 0, 1, 70]), layout="contiguous")


def sees_one_key(config: Config) -> bool:
    """Whether half of the rows of a sequence see one key only, or two that dropout thins out, or a few of which nearly one
    alone counts, where scores are far apart: then their gradient of the scores is zero, or nearly, and what is left of it
    is rounding, which plain attention in 16 bit has none of."""
    few = 2 if config.dropout_p else 1
    if config.dropout_p and (config.softmax_scale or 0) * config.head_dim**0.5 >= 8:  # normal scores
        few = 6
    left, right = config.window_size
    right = 0 if config.causal else right
    pairs = config.lengths or ((config.seqlen_q, config.seqlen_k),)
    used = config.used or [n for _, n in pairs]

    def seen_by_rows(queries: int, keys: int) -> list[int]:
        diagonals = range(keys - queries, keys)
        ends = [
            (max(0, d - left) if left >= 0 else 0, min(keys - 1, d + right) if right >= 0 else keys - 1)
            for d in diagonals
        ]
        return [last - first + 1 for first, last in ends if last >= first]

    rows = [seen_by_rows(queries, n) for (queries, _), n in zip(pairs, used, strict=True)]
    return any(seen and 2 * sum(n <= few for n in seen) >= len(seen) for seen in rows)


def has_one_probability(config: Config) -> bool:
    """Whether all weights are one number in each sequence: its rounding is then an error of dv that nothing averages out,
    whatever the inputs, and plain attention's may happen to be the nearer one."""
    uncut = not config.causal and config.window_size == (-1, -1)
    return config.softmax_scale == 0 and uncut and not (config.bias or config.alibi)


def passes_of(config: Config, pass_: str) -> list[bool]:
    """Whether backward, in turn until the path serves it."""
    attempts = {"fwd": [False], "bwd": [True], "both": [True, False]}[pass_]
    return attempts[-1:] if sees_one_key(config) or has_one_probability(config) else attempts


def verdict_of(config: Config, path: str, pass_: str, got: Results | None = None) -> tuple[str, str]:
    """("ok" | "ok in 12 draws" (or 192) | "forward only" | "not served" | "FAILED", what is wrong); ``got``: what a run gave before,
    which another one need not repeat."""
    device = "cuda" if path == "auto" else device_of(path)
    chosen = None if path == "auto" else path
    for backward in passes_of(config, pass_) if got is None else ["dq" in got]:
        try:
            with poison():
                check(config.problem(device), chosen, backward, got)
            return ("ok" if backward or pass_ == "fwd" else "forward only"), ""
        except NotImplementedError:
            continue
        except AssertionError:
            return in_more_draws(config, device, chosen, backward, got)
        except (ValueError, TypeError, RuntimeError):
            return "FAILED", traceback.format_exc(limit=-3)
    return "not served", ""


def in_more_draws(
    config: Config, device: str, path: str | None, backward: bool, got: Results | None
) -> tuple[str, str]:
    """Whether what failed fails with other random numbers too, or was judged by a plain attention that was lucky."""
    for count in DRAWS:
        draws = [replace(config, seed=config.seed + i).problem(device) for i in range(count)]
        try:
            with poison():
                check_draws(draws, path, backward, got)
            return f"ok in {count} draws", ""
        except AssertionError as error:
            wrong = str(error)
    return "FAILED", wrong


def look(config: Config, args: argparse.Namespace, screen: Screen | Float8Screen) -> str:
    """Leaves the results to ``screen`` and returns how they count if it finds nothing; "not served"; or what was raised."""
    try:
        with poison():
            if args.float8:
                return screen.look(config)
            problem = config.problem("cuda" if args.path == "auto" else device_of(args.path))
            for backward in passes_of(config, args.pass_):
                try:
                    got = problem.run(None if args.path == "auto" else args.path, backward)
                except NotImplementedError:
                    continue
                closed = ClosedForm(config, problem)
                exact, plain = (closed.results(dtype, backward) for dtype in (torch.float64, problem.q.dtype))
                screen.add(config, got, exact, plain)
                return "ok" if backward or args.pass_ == "fwd" else "forward only"
    except (AssertionError, ValueError, TypeError, RuntimeError, NotImplementedError):
        return traceback.format_exc(limit=-3)
    return "not served"


def served(configs: Iterator[Config], args: argparse.Namespace) -> Counter[str]:
    """Judges configs until ``args.count`` were served, or too many failed, or time is over: many with one look at the
    device, and one by one what does not keep the rule there."""
    counts: Counter[str] = Counter()
    screen = Float8Screen() if args.float8 else Screen()
    waiting: dict[Config, str] = {}
    begin = time.monotonic()

    def failed(config: Config, why: str) -> None:
        counts["FAILED"] += 1
        why = why.strip().replace("\n", "\n    ")
        float8 = " --float8" * args.float8
        print(f'--path {args.path} --pass {args.pass_}{float8} --config "{config}"\n    {why}', flush=True)

    def settle() -> None:
        for config, got, complaint in screen.complaints():
            verdict, why = waiting.pop(config), complaint
            if complaint and args.float8:
                verdict = "FAILED"
            elif complaint:
                counts[AGAIN] += 1
                verdict, why = verdict_of(config, args.path, args.pass_, got)
            if verdict == "FAILED":
                failed(config, why)
            else:
                counts[verdict] += 1

    try:
        for config in configs:
            verdict = look(config, args, screen)
            if verdict in ("ok", "forward only"):
                waiting[config] = verdict
            elif verdict == "not served":
                counts[verdict] += 1
            else:
                failed(config, verdict)
            done = counts.total() - counts["not served"] - counts[AGAIN] + len(waiting)
            enough = done >= args.count or counts["FAILED"] >= args.failures
            if enough or time.monotonic() - begin > args.seconds:
                break
            if screen.full:
                settle()
        settle()
    except KeyboardInterrupt:
        print("interrupted")
    except RuntimeError as error:  # of the device: nothing can run after it, and any of these may be the one
        print(f"{error}\n    one of:", *waiting, sep="\n    ", flush=True)
        counts["FAILED"] += 1
    return counts


def job(args: argparse.Namespace, number: int) -> Counter[str]:
    """One of ``args.jobs`` equal parts, with random numbers of its own."""
    rng = random.Random(f"{args.seed} {number}")
    configs = (random_config(rng, args.path, args.dtypes, args.longest) for _ in iter(int, 1))
    part = argparse.Namespace(**{**vars(args), "count": -(-args.count // args.jobs)})
    return served(configs, part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, choices=["auto", *PATHS], help="auto: the choice on a GPU")
    parser.add_argument("--pass", dest="pass_", default="both", choices=["fwd", "bwd", "both"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: what the path has")
    parser.add_argument("--float8", action="store_true", help="inputs in e4m3: --path sm90 --pass fwd")
    parser.add_argument("--longest", type=int, default=600, help="of any sequence")
    parser.add_argument("--failures", type=int, default=20, help="stop a process after so many")
    parser.add_argument("--config", help="one problem, as a failure prints it")
    args = parser.parse_args()
    args.dtypes = args.dtypes or ["bf16", "bf16", "fp16"] + ["fp32"] * (args.path != "sm90")

    begin = time.monotonic()
    if args.config:
        counts = served(iter([eval(args.config, {"Config": Config})]), args)
    elif args.jobs == 1:
        counts = job(args, 0)
    else:
        os.environ["OMP_NUM_THREADS"] = "1"  # of each process
        with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
            counts = sum(pool.map(job, [args] * args.jobs, range(args.jobs)), Counter())
    rate = (counts.total() - counts[AGAIN]) / max(time.monotonic() - begin, 1e-9)
    print(f"{args.path} {args.pass_} seed {args.seed}: {dict(counts)}, {rate:.0f} per second", flush=True)
    return min(counts["FAILED"], 1)


if __name__ == "__main__":
    sys.exit(main())
