"""Every kernel of the table on problems of two or three tiles, for compute-sanitizer.

    compute-sanitizer --tool memcheck  --kernel-name kns=flash python tests/sanitize.py
    compute-sanitizer --tool synccheck --kernel-name kns=flash python tests/sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kns=flash python tests/sanitize.py --path sm90 --dtype bf16

The line printed before a problem says what the tool's next reports are about (bench/NOTES.md explains those that
racecheck has for sm90). Results are not judged here, only that they are finite; every tensor is an allocation of its
own, so that memcheck sees the end of each.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from cases import Config  # noqa: E402

import flash_ext  # noqa: E402
from flash_ext.dispatch import CUDA_PATHS, DType, Pass, Variant  # noqa: E402
from flash_ext.extension import table  # noqa: E402
from flash_ext.testing import Problem  # noqa: E402

PATHS = {arch: path for path, arch in CUDA_PATHS.items()}
NAMES = {DType.F32: "fp32", DType.F16: "fp16", DType.BF16: "bf16", DType.E4M3: "e4m3"}
# Of queries and keys, and of packed sequences, two of them half empty: two or three tiles. What racecheck follows costs it
# seconds, and the portable kernels use shared memory for everything; their tiles are smaller too.
SIZES = {"simt": (70, 100), "sm80": (150, 280), "sm90": (150, 280)}
LENGTHS = {
    "simt": ((20, 70), (0, 20), (1, 0), (66, 90)),
    "sm80": ((70, 130), (0, 20), (1, 0), (130, 200)),
    "sm90": ((70, 130), (0, 20), (1, 0), (130, 200)),
}


def kernels(wanted: argparse.Namespace) -> Iterator[tuple[str, str, Config, Variant]]:
    """(path, dtype, config without a mask or a feature, variant) of every forward row that was asked for."""
    for row in table():
        path, dtype = PATHS[row.arch], NAMES.get(row.dtype)
        chosen = path in wanted.path and dtype in wanted.dtype and (row.head_dim in wanted.head_dim)
        if row.pass_ == Pass.FWD and chosen:
            drawn_as = "bf16" if dtype == "e4m3" else dtype
            config = Config(1, *SIZES[path], 2, 1, row.head_dim, row.head_dim_v % row.head_dim, drawn_as)
            yield path, dtype, config, row.variant


def configs(path: str, config: Config, variant: Variant) -> Iterator[Config]:
    lengths = LENGTHS[path]
    used = tuple(n * 2 // 3 for _, n in lengths)
    if variant != Variant.GENERAL:
        yield replace(config, seqlen_k=config.seqlen_k - 20)
        yield replace(config, window_size=(70, 20))
        yield replace(config, causal=True, deterministic=True)
        yield replace(config, lengths=lengths, causal=True, tail=3)
        yield replace(config, lengths=lengths, used=used, deterministic=True)
    if variant != Variant.PLAIN:
        features = replace(config, softcap=8.0, alibi="heads", bias="hqk", sinks=True)
        yield replace(features, causal=True, dropout_p=0.2)
        for alone in ("softcap", "alibi", "bias") if path == "sm90" else ():  # which have loops of their own
            yield replace(config, **{alone: getattr(features, alone)}, causal=True)
        if path == "sm90":
            yield replace(config, dropout_p=0.2, causal=True)
        yield replace(features, lengths=lengths, causal=True, bias="k")
        yield replace(features, deterministic=True, window_size=(70, 20))


def in_float8(problem: Problem) -> Problem:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (problem.q, problem.k, problem.v))
    return replace(problem, q=q, k=k, v=v, options=problem.options | {"dropout_p": 0.0})


def run(problem: Problem, path: str, backward: bool) -> None:
    """Inputs come from host memory, so that nearly all kernels that the tool sees are ours."""

    def there(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    options = {name: there(x) for name, x in problem.options.items()}
    problem = replace(problem, q=there(problem.q), k=there(problem.k), v=there(problem.v), options=options)
    results = problem.run(path, backward)
    torch.cuda.synchronize()
    for name, x in results.items():
        x = x.cpu()
        assert torch.isfinite(x[x != -torch.inf] if name == "lse" else x).all(), f"{name} is not finite"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", nargs="+", default=list(CUDA_PATHS), choices=list(CUDA_PATHS))
    parser.add_argument("--dtype", nargs="+", default=list(NAMES.values()), choices=list(NAMES.values()))
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 96, 128, 192, 256])
    parser.add_argument("--pass", dest="pass_", default="bwd", choices=["fwd", "bwd"], help="bwd: forward and backward")
    wanted = parser.parse_args()
    count = 0
    for path, dtype, base, variant in kernels(wanted):
        for config in configs(path, base, variant):
            print(f"{path} {dtype} {config}", flush=True)
            problem = config.problem("cpu")
            if dtype == "e4m3":
                run(in_float8(problem), path, backward=False)
            else:
                run(problem, path, wanted.pass_ == "bwd")
            count += 1
    print(f"{count} problems ran on {', '.join(wanted.path)}, flash_ext {flash_ext.__version__}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
