"""What is timed: one `Case` is one row of the recorded results. The lists at the end are the benchmark."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
TOKENS = 16384  # batch * seqlen of the grid
WIDTH = 2048  # num_heads * head_dim of the grid
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Case:
    work: str  # fwd, bwd, fp8, fp32, accuracy, overhead, memory
    case: str  # grid, gqa, window, ...
    dtype: str = "bf16"
    head_dim: int = 128
    causal: bool = False
    batch: int = 2
    seqlen: int = 8192
    num_heads: int = 16
    num_heads_kv: int = 16
    head_dim_v: int = 0  # 0: head_dim
    seqlen_k: int = 0  # 0: seqlen
    window_size: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] = ()  # of the segments, for packed cases
    feature: str = ""  # softcap, alibi, bias, sinks, dropout
    inputs: str = "normal"  # normal, x10, ramp, huge_key, sink_key, outliers
    path: str = ""  # of flash_ext; "": the one that it chooses

    def __post_init__(self):
        object.__setattr__(self, "head_dim_v", self.head_dim_v or self.head_dim)
        object.__setattr__(self, "seqlen_k", self.seqlen_k or self.seqlen)

    @property
    def needs_grad(self) -> bool:
        return self.work == "bwd" or self.case == "training"

    @property
    def with_autograd(self) -> bool:
        return self.needs_grad or self.case == "forward_grad"

    @property
    def packed(self) -> bool:
        return bool(self.lengths)

    def pairs(self) -> float:
        """Visible (query, key) pairs of one head. Causal squares count half, as everybody counts them."""
        sizes = [(n, n) for n in self.lengths] or [(self.seqlen, self.seqlen_k)] * self.batch
        left, right = self.window_size
        if self.causal:
            right = 0
        total = 0.0
        for seqlen_q, seqlen_k in sizes:
            if left < 0 and right < 0:
                total += seqlen_q * seqlen_k
            elif left < 0 and right == 0 and seqlen_q == seqlen_k:
                total += seqlen_q * seqlen_k / 2
            else:
                total += visible_pairs(seqlen_q, seqlen_k, left, right)
        return total

    def flops(self) -> float:
        """Two matrix products forward; backward five of them, of which three are as wide as q."""
        if self.work == "bwd":
            per_pair = 2 * (3 * self.head_dim + 2 * self.head_dim_v)
        else:
            per_pair = 2 * (self.head_dim + self.head_dim_v)
        return per_pair * self.num_heads * self.pairs()


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    total = 0
    for i in range(seqlen_q):
        diagonal = i + seqlen_k - seqlen_q
        first = 0 if left < 0 else max(0, diagonal - left)
        last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, diagonal + right)
        total += max(0, last - first + 1)
    return total


@dataclass
class Inputs:
    """Dense (batch, seqlen, heads, dim), or packed (total, heads, dim) with cu_seqlens."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor  # shaped like the output
    cu_seqlens: torch.Tensor | None  # (batch + 1) int32
    options: dict  # causal, window_size and the feature's keyword, as flash_ext.forward takes them
    descale: torch.Tensor | None = None  # (batch, num_heads_kv) fp32, for e4m3


def make_inputs(case: Case, device: str | torch.device, seed: int = 1) -> Inputs:
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(rows: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
        return torch.randn(*rows, heads, dim, device=device, generator=generator)

    rows_q = (sum(case.lengths),) if case.packed else (case.batch, case.seqlen)
    rows_k = rows_q if case.packed else (case.batch, case.seqlen_k)
    q = normal(rows_q, case.num_heads, case.head_dim)
    k = normal(rows_k, case.num_heads_kv, case.head_dim)
    v = normal(rows_k, case.num_heads_kv, case.head_dim_v)
    dout = normal(rows_q, case.num_heads, case.head_dim_v)
    shape_inputs(case.inputs, q, k, v, generator)

    dtype = DTYPES[case.dtype]
    options = {"causal": case.causal, "window_size": case.window_size, **feature_options(case, device, generator)}
    cu_seqlens = None
    if case.packed:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    descale = torch.ones(case.batch, case.num_heads_kv, device=device) if case.dtype == "e4m3" else None
    dout_dtype = torch.bfloat16 if case.dtype == "e4m3" else dtype
    return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dout_dtype), cu_seqlens, options, descale)


def shape_inputs(inputs: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Inputs whose logits are large or grow: what a kernel without a running maximum must survive, at what price. And
    such as 8 bits cannot hold well."""
    seqlen_k = k.shape[-3]
    if inputs == "x10":  # logits with a standard deviation of 100
        q.mul_(10)
        k.mul_(10)
    elif inputs == "ramp":  # logits grow from the last key to the first
        k.mul_(torch.linspace(41, 1, seqlen_k, device=k.device)[:, None, None])
    elif inputs == "huge_key":  # one key in the middle outweighs all others for half of the queries
        k[..., seqlen_k // 2, :, :] *= 50
    elif inputs == "sink_key":  # every query looks at the first key, as language models do
        q[..., 0] += 10
        k[..., 0, :, 0] += 20
    elif inputs == "outliers":
        for x in (q, k, v):
            add_outliers(x, generator)
    elif inputs != "normal":
        raise ValueError(f"inputs must be normal, x10, ramp, huge_key, sink_key or outliers, got {inputs!r}")


def add_outliers(x: torch.Tensor, generator: torch.Generator) -> None:
    """0.1 % of the entries plus a normal number of ten times the size, as in FlashAttention-3, section 4.3."""
    large = 10 * torch.randn(x.shape, device=x.device, generator=generator)
    x += large * (torch.rand(x.shape, device=x.device, generator=generator) < 0.001)


def feature_options(case: Case, device, generator) -> dict:
    heads = case.num_heads
    if not case.feature:
        return {}
    if case.feature == "softcap":
        return {"softcap": 30.0}  # models use 30 to 50; what bends normal scores more takes longer (bench/NOTES.md)
    if case.feature == "alibi":
        return {"alibi_slopes": torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device)}
    if case.feature == "bias":
        bias = torch.randn(1, heads, case.seqlen, case.seqlen_k, device=device, generator=generator)
        return {"attn_bias": bias.to(DTYPES[case.dtype])}
    if case.feature == "sinks":
        return {"sinks": torch.randn(heads, device=device, generator=generator)}
    if case.feature == "dropout":
        return {"dropout_p": 0.1}
    raise ValueError(f"feature must be softcap, alibi, bias, sinks or dropout, got {case.feature!r}")


def packed_lengths(count: int = 16, low: int = 100, high: int = 8000, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).randint(low, high) for _ in range(count))


def _grid(work: str, head_dims=(64, 128, 256), seqlens=SEQLENS, **options) -> list[Case]:
    return [
        Case(
            work,
            "grid",
            head_dim=head_dim,
            causal=causal,
            batch=TOKENS // seqlen,
            seqlen=seqlen,
            num_heads=WIDTH // head_dim,
            num_heads_kv=WIDTH // head_dim,
            **options,
        )
        for head_dim in head_dims
        for causal in (False, True)
        for seqlen in seqlens
    ]


def _both_masks(case: Case) -> list[Case]:
    return [replace(case, causal=False), replace(case, causal=True)]


def _shapes(work: str) -> list[Case]:
    """The shapes beside the grid, forward or backward."""
    lengths = packed_lengths()
    packed = Case(work, "packed", batch=len(lengths), seqlen=max(lengths), lengths=lengths)
    at_4k = Case(work, "head_dim", batch=4, seqlen=4096)
    return [
        *(
            Case(work, "gqa", causal=True, batch=TOKENS // n, seqlen=n, num_heads_kv=8, num_heads=32)
            for n in (4096, TOKENS)
        ),
        Case(work, "window", batch=1, seqlen=16384, window_size=(1024, 0)),
        *_both_masks(packed),
        *_both_masks(Case(work, "cross", batch=8, seqlen=1024, seqlen_k=8192)),
        *_both_masks(replace(at_4k, head_dim=96, head_dim_v=96, num_heads=21, num_heads_kv=21)),
        *_both_masks(replace(at_4k, head_dim=192)),
        *(replace(case, case="fp16", dtype="fp16", causal=True) for case in (_with_head_dim(at_4k, 64), at_4k)),
    ]


def _with_head_dim(case: Case, head_dim: int) -> Case:
    heads = WIDTH // head_dim
    return replace(case, head_dim=head_dim, head_dim_v=head_dim, num_heads=heads, num_heads_kv=heads)


def _features(work: str) -> list[Case]:
    """Every feature, and the plain kernel at the same masks, whose speed they are compared with."""
    plain = Case(work, "feature", batch=4, seqlen=4096)
    cases = [*_both_masks(plain), replace(plain, feature="bias")]
    cases += [replace(plain, feature=name, causal=True) for name in ("softcap", "alibi", "sinks", "dropout")]
    return [_with_head_dim(case, head_dim) for head_dim in (64, 128) for case in cases]


def _logits(work: str) -> list[Case]:
    """Inputs whose scores are large, growing, or ruled by one key, and normal ones to compare with."""
    kinds = ("normal", "x10", "ramp", "huge_key", "sink_key")
    cases = [Case(work, "logits", inputs=kind, batch=4, seqlen=4096, causal=True) for kind in kinds]
    return [_with_head_dim(case, head_dim) for head_dim in (64, 128) for case in cases]


def _sustained() -> list[Case]:
    return [replace(case, case="sustained") for case in _grid("fwd", seqlens=(8192,))]


def _fp32() -> list[Case]:
    shapes = {"head_dims": (64, 128), "seqlens": (4096, 16384), "dtype": "fp32"}
    return [*_grid("fp32", **shapes), *(replace(case, case="fp32") for case in _grid("bwd", **shapes))]


def _generations() -> list[Case]:
    """The same shapes through every path; backward and fp8 where a path has them."""
    shapes = {"head_dims": (64, 128), "seqlens": (1024, 4096)}
    grids = [*_grid("fwd", **shapes), *_grid("bwd", **shapes), *_grid("fp8", dtype="e4m3", **shapes)]
    return [replace(case, case="generations") for case in grids]


def _accuracy() -> list[Case]:
    """The last 512 queries against all keys: e4m3 with and without outliers up to 128k keys, and bf16 at 4k."""
    few = Case("accuracy", "bf16", batch=1, seqlen=512, num_heads=4, num_heads_kv=4, seqlen_k=4096)
    cases = [replace(few, inputs=inputs) for inputs in ("normal", "x10")]
    for seqlen_k in (1024, 4096, 16384, 131072):
        fp8 = replace(few, case="fp8", dtype="e4m3", seqlen_k=seqlen_k)
        cases += [case for inputs in ("normal", "outliers") for case in _both_masks(replace(fp8, inputs=inputs))]
    return [replace(case, head_dim=d, head_dim_v=d) for d in (64, 128, 256) for case in cases]


def _overhead() -> list[Case]:
    tiny = Case("overhead", "forward", batch=1, seqlen=128, causal=True)
    return [tiny, replace(tiny, case="forward_grad"), replace(tiny, case="training")]


def _memory() -> list[Case]:
    return [Case("memory", "training", batch=1, seqlen=n, causal=True) for n in (2048, 8192, 32768)]


ALL: dict[str, list[Case]] = {
    "fwd": [*_grid("fwd"), *_shapes("fwd"), *_features("fwd"), *_logits("fwd"), *_sustained()],
    "bwd": [*_grid("bwd"), *_shapes("bwd"), *_features("bwd")],
    "fp8": _grid("fp8", dtype="e4m3"),
    "fp32": _fp32(),
    "accuracy": _accuracy(),
    "generations": _generations(),
    "overhead": _overhead(),
    "memory": _memory(),
}
