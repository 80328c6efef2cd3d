"""The one list of cases, run on every path that the machine has: what broke attention libraries before, as small
inputs.

``Config`` describes a problem completely, so that a failure can be repeated from one line. ``CASES`` are judged by the
rule of ``flash_ext.testing``; ``BEHAVIOURS`` are functions that state what else has to hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import flash_ext
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


# ---- judged by the tolerance rule ------------------------------------------------------------------------------------

# name -> (config, config for host memory where the first is too large for it; None: not there)
CASES: dict[str, tuple[Config, Config | None]] = {}


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

# Numbers as in the published reports.
_add("report 10, packed, keys without queries", Config(
    num_heads=4, num_heads_kv=1, head_dim=256, lengths=((0, 2538), (1208, 1742), (840, 840), (0, 3072))
), lengths=((0, 158), (75, 109), (53, 53), (0, 192)))  # fmt: skip
_add("report 10, head_dim 128", Config(
    num_heads=4, num_heads_kv=1, head_dim=128, lengths=((0, 2538), (1208, 1742), (840, 840), (0, 3072))
), lengths=((0, 158), (75, 109), (53, 53), (0, 192)))  # fmt: skip
for _seqlen in (1, 2, 5, 17):
    for _head_dim in (16, 32):
        _add(f"report 14, seqlen {_seqlen}, head_dim {_head_dim}", Config(
            1, _seqlen, _seqlen, head_dim=_head_dim, dtype="fp16", q_factor=5, k_factor=3
        ))  # fmt: skip
_add("report 15", Config(lengths=((76, 1), (34, 1), (146, 1)), causal=True, dtype="fp16", head_dim=32))
_add(
    "report 16, head_dim 72",
    Config(1, 512, 512, 8, 8, head_dim=72),
    seqlen_q=140,
    seqlen_k=140,
    num_heads=2,
    num_heads_kv=2,
)
_add(
    "report 16, head_dim 104",
    Config(1, 512, 512, 8, 8, head_dim=104),
    seqlen_q=140,
    seqlen_k=140,
    num_heads=2,
    num_heads_kv=2,
)
_add("report 18", Config(1, 65, 65, 8, 1))
_add("report 19, dense", Config(1, 200, 200, softcap=12.0, q_factor=8, causal=True))
_add("report 19, packed", Config(lengths=((100, 100), (60, 80)), softcap=12.0, q_factor=8, causal=True))
_add("report 22", Config(1, 64, 65, 4, 4, layout="expanded"))
_add("report 24", Config(8300, 1, 1, 16, 16, head_dim=128), batch=83)
_add("report 25, batch", Config(65536, 4, 4, 8, 8), batch=100)
_add("report 25, heads", Config(1, 4, 4, 65536, 65536), num_heads=300, num_heads_kv=300)


# ---- what else has to hold -------------------------------------------------------------------------------------------

BEHAVIOURS: dict[str, Callable[[str], None]] = {}


def behaviour(function: Callable[[str], None]) -> Callable[[str], None]:
    """``function(device)``, called with the path to be tested in use."""
    BEHAVIOURS[function.__name__] = function
    return function


def tensors(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def qkv(device: str, batch=1, seqlen_q=64, seqlen_k=64, heads=2, heads_kv=2, dim=64, dtype=torch.bfloat16):
    q = tensors(device, batch, seqlen_q, heads, dim, dtype=dtype, seed=1).requires_grad_()
    k = tensors(device, batch, seqlen_k, heads_kv, dim, dtype=dtype, seed=2).requires_grad_()
    v = tensors(device, batch, seqlen_k, heads_kv, dim, dtype=dtype, seed=3).requires_grad_()
    return q, k, v


@behaviour
def rows_without_keys_are_zero(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=5, seqlen_k=2, heads=1, heads_kv=1)
    out, lse = flash_ext.forward(q, k, v, causal=True, return_lse=True)
    assert (out[0, :3] == 0).all() and (lse[0, 0, :3] == -math.inf).all()
    assert torch.equal(out[0, 3, 0], v[0, 0, 0]) and torch.isfinite(out).all()
    torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert (q.grad[0, :3] == 0).all()
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))


@behaviour
def one_causal_query_sees_all_keys(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=1, seqlen_k=8, heads=1, heads_kv=1)
    assert torch.equal(flash_ext.forward(q, k, v, causal=True), flash_ext.forward(q, k, v))


@behaviour
def finite_bias_is_no_mask(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=40, seqlen_k=50)
    bias = torch.zeros(40, 50, device=device, dtype=q.dtype)
    bias[0] = torch.finfo(q.dtype).min
    out, lse = flash_ext.forward(q, k, v, attn_bias=bias, return_lse=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    assert torch.allclose(out[0, 0].float(), v[0].float().mean(0), atol=1e-2)


@behaviour
def infinite_bias_masks(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=256, seqlen_k=256)
    bias = torch.zeros(256, device=device)
    bias[:128] = -math.inf
    masked = flash_ext.forward(q, k, v, attn_bias=bias)
    assert torch.allclose(masked.float(), flash_ext.forward(q, k[:, 128:], v[:, 128:]).float(), atol=1e-2)
    everything = flash_ext.forward(q, k, v, attn_bias=torch.full((1,), -math.inf, device=device), return_lse=True)
    assert (everything[0] == 0).all() and (everything[1] == -math.inf).all()


@behaviour
def first_tile_masked_and_low_logits(device: str) -> None:
    q = torch.full((1, 88, 14, 128), 5.0, device=device, dtype=torch.bfloat16)
    k = torch.full((1, 448, 2, 128), -5.0, device=device, dtype=torch.bfloat16)
    v = tensors(device, 1, 448, 2, 128)
    out = flash_ext.forward(q, k, v, causal=True)
    rows = torch.arange(88, device=device)[:, None] + 360 >= torch.arange(448, device=device)
    means = torch.einsum("ij,jhd->ihd", rows.float() / rows.sum(1, keepdim=True), v[0].float())
    assert torch.allclose(out[0].float(), means.repeat_interleave(7, dim=1), atol=1e-2)


@behaviour
def huge_logits(device: str) -> None:
    q = torch.full((1, 1, 1, 64), 1024.0, device=device, dtype=torch.bfloat16)
    k = torch.full((1, 1, 1, 64), -8.0, device=device, dtype=torch.bfloat16)
    v = tensors(device, 1, 1, 1, 64)
    out, lse = flash_ext.forward(q, k, v, softmax_scale=1.0, return_lse=True)
    assert torch.equal(out, v) and lse.item() == -524288.0
    x = torch.full((1, 1, 1, 64), 133120.0, device=device, dtype=torch.bfloat16)
    out, lse = flash_ext.forward(x, x, x, return_lse=True)
    assert torch.equal(out, x) and torch.isfinite(lse).all()
    many = x.expand(1, 700, 1, 64)  # blocks of keys that are visited without looking for their maximum
    assert torch.equal(flash_ext.forward(x, many, many), x)


@behaviour
def empty_inputs(device: str) -> None:
    for shape in ({"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}):
        for causal in (False, True):
            q, k, v = qkv(device, **shape)
            out, lse = flash_ext.forward(q, k, v, causal=causal, return_lse=True)
            assert out.shape == q.shape and lse.shape == (q.shape[0], 2, q.shape[1])
            assert (out == 0).all() and (lse == -math.inf).all()
            torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
            assert all(t.grad.shape == t.shape and (t.grad == 0).all() for t in (q, k, v))
    sinks = torch.tensor([0.5, -1.0], device=device, requires_grad=True)
    q, k, v = qkv(device, seqlen_k=0)
    out, lse = flash_ext.forward(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all() and torch.equal(lse[0, :, 0], sinks)
    torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    assert torch.equal(sinks.grad, torch.full_like(sinks, 64.0))


@behaviour
def empty_segments(device: str) -> None:
    q, k, v = (t.detach()[0].requires_grad_() for t in qkv(device, seqlen_q=40, seqlen_k=50))
    cu_q = torch.tensor([0, 0, 40, 40], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 20, 20, 50], dtype=torch.int32, device=device)
    out = flash_ext.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 30)
    assert (out == 0).all()
    out.sum().backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


@behaviour
def huge_window_is_none(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=100, seqlen_k=60)
    full = flash_ext.forward(q, k, v)
    for window in ((-1, 2**31 - 1), (2**31 - 1, -1), (2**63, 2**70), (10**6, 10**6)):
        assert torch.equal(flash_ext.forward(q, k, v, window_size=window), full)


@behaviour
def window_counts_both_ends(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=8, seqlen_k=8)
    q = torch.zeros_like(q)
    lse = flash_ext.forward(q, k, v, window_size=(3, 0), return_lse=True)[1]
    assert torch.allclose(lse[0, 0].exp(), torch.tensor([1, 2, 3, 4, 4, 4, 4, 4.0], device=device))
    for window in ((-1, -3), (-2, 0)):
        try:
            flash_ext.forward(q, k, v, window_size=window)
        except ValueError as error:
            assert "window_size" in str(error)
        else:
            raise AssertionError(f"window_size={window} was accepted")


@behaviour
def alibi_of_one_query_is_the_last_row(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=90, seqlen_k=90)
    slopes = torch.tensor([0.1, 0.5], device=device)
    all_rows = flash_ext.forward(q, k, v, alibi_slopes=slopes)
    last = flash_ext.forward(q[:, -1:], k, v, alibi_slopes=slopes)
    assert torch.allclose(all_rows[:, -1:].float(), last.float(), atol=1e-2)


@behaviour
def gradients_of_any_stride(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=70, seqlen_k=70)

    def gradients(dout: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(flash_ext.forward(q, k, v), (q, k, v), dout))

    ones = torch.ones(1, 70, 2, 64, device=device, dtype=q.dtype)
    expanded = torch.ones(1, device=device, dtype=q.dtype).expand(1, 70, 2, 64)
    random = tensors(device, 1, 70, 2, 64, seed=9)
    transposed = random.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    odd = torch.cat([random[..., :1], random], dim=-1)[..., 1:]
    for contiguous, other in ((ones, expanded), (random, transposed), (random, odd)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(contiguous), gradients(other), strict=True))


@behaviour
def sink_of_zero_halves(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=1, seqlen_k=1)
    out = flash_ext.forward(torch.zeros_like(q), k, v, sinks=torch.zeros(2, device=device))
    assert torch.equal(out, v * 0.5)
    q, k, v = qkv(device, seqlen_q=4, seqlen_k=2)
    sinks = torch.tensor([0.25, -2.0], device=device, dtype=torch.bfloat16)
    out, lse = flash_ext.forward(q, k, v, sinks=sinks, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all() and torch.equal(lse[0, :, 0], sinks.float())


@behaviour
def views_equal_copies(device: str) -> None:
    heads_first = [tensors(device, 2, 4, 80, 64, seed=i).transpose(1, 2) for i in range(3)]
    sliced = list(tensors(device, 2, 80, 3, 4, 64).unbind(2))
    expanded = [
        tensors(device, 2, 97, 4, 64),
        *(tensors(device, 2, 97, 1, 64, seed=i).expand(-1, -1, 4, -1) for i in (1, 2)),
    ]
    odd_size_one = [tensors(device, 80, 4, 64, seed=i).as_strided((1, 80, 4, 64), (3, 256, 64, 1)) for i in range(3)]
    for q, k, v in (heads_first, sliced, expanded, odd_size_one):
        out = flash_ext.forward(q, k, v, causal=True)
        assert torch.equal(
            out,
            flash_ext.forward(
                q.clone(memory_format=torch.contiguous_format), k.contiguous(), v.contiguous(), causal=True
            ),
        )


@behaviour
def scattered_rows_are_copied(device: str) -> None:
    q, k, v = (tensors(device, 1, 4, 64, 50, seed=i).permute(0, 3, 1, 2) for i in range(3))
    assert torch.equal(flash_ext.forward(q, k, v), flash_ext.forward(q.contiguous(), k.contiguous(), v.contiguous()))


@behaviour
def deterministic_gradients(device: str) -> None:
    q, k, v = qkv(device, batch=2, seqlen_q=300, seqlen_k=300, heads=4, heads_kv=1)
    out = flash_ext.forward(q, k, v, causal=True, window_size=(100, 0), deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    for _ in range(29 if device == "cuda" else 2):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@behaviour
def every_call_uses_its_own_options(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=90, seqlen_k=90)
    variants = ({}, {"softmax_scale": 0.5}, {"softcap": 2.0}, {"window_size": (3, 3)}, {"causal": True})
    first = [flash_ext.forward(q, k, v, **options) for options in variants]
    again = [flash_ext.forward(q, k, v, **options) for options in variants]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(not torch.equal(first[0], other) for other in first[1:])


@behaviour
def gradients_only_where_wanted(device: str) -> None:
    q, k, v = qkv(device)
    full = torch.autograd.grad(flash_ext.forward(q, k, v).sum(), (q, k, v))
    for wanted in range(3):
        args = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((q, k, v))]
        flash_ext.forward(*args).sum().backward()
        assert torch.equal(args[wanted].grad, full[wanted])
        assert all(t.grad is None for i, t in enumerate(args) if i != wanted)


@behaviour
def lse_alone_has_a_gradient(device: str) -> None:
    q, k, v = qkv(device, dtype=torch.float32)
    lse = flash_ext.forward(q, k, v, return_lse=True)[1]
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    exact = torch.logsumexp(torch.einsum("bihd,bjhd->bhij", q, k) * 64**-0.5, dim=-1)
    exact_dq, exact_dk = torch.autograd.grad(exact.sum(), (q, k))
    assert torch.allclose(dq, exact_dq, atol=1e-5) and torch.allclose(dk, exact_dk, atol=1e-5)


@behaviour
def merged_halves_equal_the_whole(device: str) -> None:
    q, k, v = qkv(device, seqlen_q=50, seqlen_k=90, dtype=torch.float32)
    whole, whole_lse = flash_ext.forward(q, k, v, return_lse=True)
    a = flash_ext.forward(q, k[:, :30], v[:, :30], return_lse=True)
    b = flash_ext.forward(q, k[:, 30:], v[:, 30:], return_lse=True)
    out, lse = flash_ext.merge_states(*a, *b)
    assert torch.allclose(out, whole, atol=1e-5) and torch.allclose(lse, whole_lse, atol=1e-5)
    dout = torch.randn_like(out)
    for part, full in zip(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(whole, (q, k, v), dout), strict=True
    ):
        assert torch.allclose(part, full, atol=1e-4)


@behaviour
def dropout_keeps_the_mean(device: str) -> None:
    torch.manual_seed(0)
    q, k, v = qkv(device, batch=2, seqlen_q=256, seqlen_k=256)
    v = torch.ones_like(v)
    out = flash_ext.forward(q * 0, k, v, dropout_p=0.25)
    assert abs(out.float().mean().item() - 1) < 0.01
    assert not torch.equal(out, flash_ext.forward(q * 0, k, v, dropout_p=0.25))
    torch.manual_seed(0)
    assert torch.equal(out, flash_ext.forward(q * 0, k, v, dropout_p=0.25))


@behaviour
def float8_is_dequantised(device: str) -> None:
    def quantised(t: Tensor) -> tuple[Tensor, Tensor]:
        scale = t.abs().max().float() / 448
        return (t / scale).to(torch.float8_e4m3fn), scale.expand(1, 2)

    q, k, v = (t.detach().float() for t in qkv(device, seqlen_q=64, seqlen_k=512))
    for factor in (0.0, 1.0, 8.0):  # uniform, usual, peaked
        (q8, sq), (k8, sk), (v8, sv) = quantised(q * factor + 1e-3), quantised(k), quantised(v)
        out = flash_ext.forward(q8, k8, v8, q_descale=sq, k_descale=sk, v_descale=sv)
        assert out.dtype == torch.bfloat16
        exact = flash_ext.forward(*((x.float() * s[0, 0]) for x, s in ((q8, sq), (k8, sk), (v8, sv))))
        assert (out.float() - exact).abs().max() < 0.05 * exact.abs().max()
