"""The one list of cases, run on every path that the machine has: what broke attention libraries before, as small
inputs.

``Config`` describes a problem completely, so that a failure can be repeated from one line. ``CASES`` are judged by the
rule of ``flash_ext.tolerance``; ``behaviours.py`` has functions that state what else has to hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_ext.testing import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def on_device(numbers: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """A copy that nothing waits for."""
    host = torch.tensor(numbers, dtype=dtype)
    return host if torch.device(device).type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Config:
    """One attention problem. ``Config(**...)`` with what differs from here repeats it."""

    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    num_heads: int = 2
    num_heads_kv: int = 2
    head_dim: int = 64
    head_dim_v: int = 0  # 0: head_dim
    dtype: str = "bf16"
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "heads": (num_heads,), "batch": (batch, num_heads)
    bias: str = ""  # which dimensions have full size, of "bhqk"; "-": none of them
    bias_fp32: bool = False
    sinks: bool = False
    dropout_p: float = 0.0
    deterministic: bool = False
    lengths: tuple[
        tuple[int, int], ...
    ] = ()  # (queries, keys) of packed sequences; batch and seqlens do not count then
    used: tuple[int, ...] = ()  # seqused_k
    tail: int = 0  # rows of NaN behind the last packed sequence
    layout: str = (
        "contiguous"  # "heads_first", "qkv" (slices of one tensor), "expanded" (one kv head seen many times), "odd"
    )
    q_factor: float = 1.0
    k_factor: float = 1.0
    lse_gradient: bool = True
    seed: int = 0

    def problem(self, device: str) -> Problem:
        return _Maker(self, device).problem()

    def __repr__(self) -> str:
        """What differs from the defaults."""
        defaults = type(self).__dataclass_fields__
        shown = {n: getattr(self, n) for n, f in defaults.items() if getattr(self, n) != f.default}
        return f"Config({', '.join(f'{n}={x!r}' for n, x in shown.items())})"


class _Maker:
    def __init__(self, config: Config, device: str):
        self.config, self.device = config, device
        self.dtype = DTYPES[config.dtype]
        self.generator = torch.Generator(device).manual_seed(config.seed)

    def rand(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return x.to(self.dtype if dtype is None else dtype)

    def problem(self) -> Problem:
        c = self.config
        options: dict = {
            "causal": c.causal,
            "window_size": c.window_size,
            "softmax_scale": c.softmax_scale,
            "softcap": c.softcap,
            "dropout_p": c.dropout_p,
            "deterministic": c.deterministic,
        }
        q, k, v = self.packed(options) if c.lengths else self.dense()
        batch = len(c.lengths) or c.batch
        seqlen_q = max(n for n, _ in c.lengths) if c.lengths else c.seqlen_q
        seqlen_k = max(n for _, n in c.lengths) if c.lengths else c.seqlen_k
        if c.alibi:
            shape = (c.num_heads,) if c.alibi == "heads" else (batch, c.num_heads)
            options["alibi_slopes"] = torch.rand(shape, generator=self.generator, device=self.device)
        if c.bias:
            full = dict(zip("bhqk", (batch, c.num_heads, seqlen_q, seqlen_k), strict=True))
            shape = (size if letter in c.bias else 1 for letter, size in full.items())
            options["attn_bias"] = self.rand(*shape, dtype=torch.float32 if c.bias_fp32 else None)
        if c.sinks:
            options["sinks"] = self.rand(c.num_heads, dtype=torch.float32)
        return Problem(q, k, v, options, c.lse_gradient, c.seed, sum(n for n, _ in c.lengths) if c.lengths else None)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        dim_v = c.head_dim_v or c.head_dim
        if c.layout == "qkv":  # needs seqlen_q == seqlen_k, num_heads == num_heads_kv, equal head dims
            q, k, v = self.rand(c.batch, c.seqlen_q, 3, c.num_heads, c.head_dim).unbind(2)
        elif c.layout == "heads_first":
            q = self.rand(c.batch, c.num_heads, c.seqlen_q, c.head_dim).transpose(1, 2)
            k = self.rand(c.batch, c.num_heads_kv, c.seqlen_k, c.head_dim).transpose(1, 2)
            v = self.rand(c.batch, c.num_heads_kv, c.seqlen_k, dim_v).transpose(1, 2)
        elif c.layout == "expanded":
            q = self.rand(c.batch, c.seqlen_q, c.num_heads, c.head_dim)
            k = self.rand(c.batch, c.seqlen_k, 1, c.head_dim).expand(-1, -1, c.num_heads_kv, -1)
            v = self.rand(c.batch, c.seqlen_k, 1, dim_v).expand(-1, -1, c.num_heads_kv, -1)
        elif c.layout == "odd":  # rows that begin at any element
            q = self.rand(c.batch, c.seqlen_q, c.num_heads, c.head_dim + 1)[..., 1:]
            k = self.rand(c.batch, c.seqlen_k, c.num_heads_kv, c.head_dim + 3)[..., 3:]
            v = self.rand(c.batch, c.seqlen_k, c.num_heads_kv, dim_v + 1)[..., :-1]
        else:
            q = self.rand(c.batch, c.seqlen_q, c.num_heads, c.head_dim)
            k = self.rand(c.batch, c.seqlen_k, c.num_heads_kv, c.head_dim)
            v = self.rand(c.batch, c.seqlen_k, c.num_heads_kv, dim_v)
        if c.q_factor != 1 or c.k_factor != 1:
            q, k = q * c.q_factor, k * c.k_factor
        return q, k, v

    def packed(self, options: dict) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        ends_q, ends_k = ([sum(n[side] for n in c.lengths[: b + 1]) for b in range(len(c.lengths))] for side in (0, 1))
        options["cu_seqlens_q"] = on_device([0, *ends_q], torch.int32, self.device)
        options["cu_seqlens_k"] = on_device([0, *ends_k], torch.int32, self.device)
        options["max_seqlen_q"] = max(n for n, _ in c.lengths)
        options["max_seqlen_k"] = max(n for _, n in c.lengths)
        q = self.rand(ends_q[-1] + c.tail, c.num_heads, c.head_dim) * c.q_factor
        k = self.rand(ends_k[-1] + c.tail, c.num_heads_kv, c.head_dim) * c.k_factor
        v = self.rand(ends_k[-1] + c.tail, c.num_heads_kv, c.head_dim_v or c.head_dim)
        q[ends_q[-1] :], k[ends_k[-1] :], v[ends_k[-1] :] = math.nan, math.nan, math.nan
        if c.used:
            options["seqused_k"] = on_device(c.used, torch.int32, self.device)
            for end, (_, length), used in zip(ends_k, c.lengths, c.used, strict=True):
                k[end - length + used : end] = math.nan
                v[end - length + used : end] = math.nan
        return q, k, v


# name -> (config, the same or a smaller one for the CPU)
CASES: dict[str, tuple[Config, Config]] = {}


def _add(name: str, config: Config, **smaller) -> None:
    CASES[name] = (config, replace(config, **smaller))


for _dtype in DTYPES:
    _add(f"square {_dtype}", Config(2, 200, 200, 3, 3, dtype=_dtype))
    _add(f"causal {_dtype}", Config(2, 129, 257, 4, 2, dtype=_dtype, causal=True))
    _add(f"everything {_dtype}", Config(
        2, 70, 130, 4, 2, dtype=_dtype, causal=True, window_size=(90, -1), softcap=8.0, alibi="batch", bias="bhqk",
        sinks=True, dropout_p=0.2, bias_fp32=True,
    ))  # fmt: skip
    for _head_dim in (16, 40, 96, 128, 192, 256):
        _add(f"head_dim {_head_dim} {_dtype}", Config(1, 150, 170, 2, 1, head_dim=_head_dim, dtype=_dtype, causal=True))
_add("head_dim 192 with 128 values", Config(1, 150, 170, 4, 2, head_dim=192, head_dim_v=128, causal=True))
_add("head_dim 64 with 32 values", Config(1, 150, 170, 4, 2, head_dim=64, head_dim_v=32))
_add("head_dim 32 with 64 values", Config(1, 150, 170, 4, 2, head_dim=32, head_dim_v=64))
_add("head_dim 1", Config(1, 20, 30, head_dim=1, dtype="fp32"))
_add("head_dim 37, odd rows", Config(1, 90, 70, 2, 1, head_dim=37))

_add("rows without keys", Config(2, 300, 130, 4, 2, causal=True))
_add("window that misses keys", Config(1, 200, 64, window_size=(5, 3)))
_add("window", Config(1, 300, 300, 4, 1, window_size=(50, 20)))
_add("left window, causal", Config(1, 300, 300, 4, 1, window_size=(64, 0), causal=True))
_add("right window only", Config(1, 150, 200, 4, 1, window_size=(-1, 7)))
_add("left window only", Config(1, 150, 200, 4, 1, window_size=(7, -1)))
_add("window of one key", Config(1, 300, 300, 2, 2, window_size=(0, 0)))
_add("softmax_scale", Config(1, 100, 100, softmax_scale=0.31))
_add("softmax_scale zero", Config(1, 100, 100, softmax_scale=0.0))
_add("softmax_scale negative", Config(1, 100, 100, softmax_scale=-0.2, causal=True))
_add("one query", Config(3, 1, 333, 8, 2, causal=True))
_add("one key", Config(3, 77, 1, 8, 2))
_add("many heads on one", Config(1, 65, 300, 16, 1, causal=True))
_add("odd group", Config(1, 88, 120, 14, 2, causal=True))
_add("ALiBi", Config(2, 100, 180, 4, 2, alibi="heads"))
_add("ALiBi, causal", Config(2, 100, 180, 4, 2, alibi="batch", causal=True))
_add("ALiBi, large slopes times distance", Config(1, 64, 2000, 4, 4, alibi="heads"))
for _bias in ("-", "b", "h", "q", "k", "qk", "hqk", "bqk", "bhqk"):
    _add(f"bias {_bias}", Config(3, 70, 90, 4, 2, bias=_bias, causal=_bias == "qk"))
_add("bias fp32", Config(2, 70, 90, 4, 2, bias="hqk", bias_fp32=True))
_add("sinks", Config(2, 100, 70, 4, 2, sinks=True, causal=True))
_add("sinks, packed", Config(num_heads=4, lengths=((30, 40), (0, 9), (55, 20)), sinks=True, causal=True, tail=5))
_add("sinks, packed, no keys", Config(num_heads=4, lengths=((3, 0), (0, 0), (5, 0)), sinks=True, tail=2))
_add("dropout", Config(2, 100, 130, 4, 2, dropout_p=0.3, causal=True))
_add("dropout, packed", Config(num_heads=4, num_heads_kv=1, lengths=((30, 40), (55, 70)), dropout_p=0.15))
_add("packed", Config(num_heads=4, lengths=((100, 100), (1, 1), (37, 37)), causal=True))
_add("packed, rest of NaN", Config(num_heads=4, num_heads_kv=2, lengths=((60, 90), (130, 100)), causal=True, tail=40))
_add("packed, used keys", Config(num_heads=4, lengths=((60, 90), (40, 100), (9, 7)), used=(50, 100, 0), causal=True))
_add("packed, window", Config(num_heads=4, lengths=((300, 300), (40, 100)), window_size=(30, 10)))
_add("packed, bias", Config(num_heads=4, lengths=((60, 90), (40, 100)), bias="bhqk"))
_add("packed, shared bias", Config(num_heads=4, lengths=((60, 90), (40, 100)), bias="qk"))
_add("packed, ALiBi", Config(num_heads=4, lengths=((60, 90), (40, 100)), alibi="batch", causal=True))
_add("packed, one sequence", Config(num_heads=4, lengths=((257, 257),), causal=True))
for _layout in ("heads_first", "qkv", "expanded", "odd"):
    _add(f"layout {_layout}", Config(2, 97, 97, 4, 4, layout=_layout, causal=True))
    _add(f"layout {_layout}, fp32", Config(2, 97, 97, 4, 4, layout=_layout, causal=True, dtype="fp32"))
_add("deterministic", Config(2, 200, 200, 4, 1, deterministic=True, causal=True))
_add("no gradient of lse", Config(2, 150, 150, 4, 2, lse_gradient=False, causal=True))

# Shapes that broke attention libraries before.
for _head_dim in (128, 256):
    _add(f"packed, keys without queries, head_dim {_head_dim}", Config(
        num_heads=4, num_heads_kv=1, head_dim=_head_dim, lengths=((0, 2538), (1208, 1742), (840, 840), (0, 3072))
    ), lengths=((0, 158), (75, 109), (53, 53), (0, 192)))  # fmt: skip
for _seqlen in (1, 2, 5, 17):
    for _head_dim in (16, 32):
        _add(f"large scores of few keys: {_seqlen}, head_dim {_head_dim}", Config(
            1, _seqlen, _seqlen, head_dim=_head_dim, dtype="fp16", q_factor=5, k_factor=3
        ))  # fmt: skip
_add("packed, one key each", Config(lengths=((76, 1), (34, 1), (146, 1)), causal=True, dtype="fp16", head_dim=32))
for _head_dim in (72, 104):
    _add(f"head_dim {_head_dim}, between the kernels'", Config(
        1, 512, 512, 8, 8, head_dim=_head_dim
    ), seqlen_q=140, seqlen_k=140, num_heads=2, num_heads_kv=2)  # fmt: skip
_add("65 queries, one kv head", Config(1, 65, 65, 8, 1))
_add("softcap of large scores", Config(1, 200, 200, softcap=12.0, q_factor=20, causal=True))
_add("softcap of large scores, packed", Config(lengths=((100, 100), (60, 80)), softcap=12.0, q_factor=20, causal=True))
_add("layout expanded, 65 keys", Config(1, 64, 65, 4, 4, layout="expanded"))
_add("8300 sequences of one token", Config(8300, 1, 1, 16, 16, head_dim=128), batch=83)
_add("65536 sequences", Config(65536, 4, 4, 8, 8), batch=100)
_add("65536 heads", Config(1, 4, 4, 65536, 65536), num_heads=300, num_heads_kv=300)
