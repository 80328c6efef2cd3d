"""The Hopper FP8 forward: every row, masks, packed sequences, scales, scores that leave e4m3's range behind, long
contexts. Compared with exact attention of what the float8 numbers stand for."""

from __future__ import annotations

import random

import pytest
import torch
from float8_problems import check, float8_problem
from problems import SCORES, packed_problem, problem, problem_of_scores
from random_configs import random_config

import flash_ext
from flash_ext.testing import Problem, poison

pytestmark = pytest.mark.gpu
FLOAT8 = torch.float8_e4m3fn
HEAD_DIMS = (64, 96, 128, 192, 256)
MASKS = ({}, {"causal": True}, {"window_size": (100, 30)})


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_masks(mask, head_dim):
    for lengths in ((300, 421), (1500, 1400), (257, 70), (1, 1)):
        check(problem(*lengths, (head_dim, head_dim), (8, 2), **mask))


@pytest.mark.parametrize("head_dim", [16, 48, 80, 112, 144, 176, 208, 240])
def test_head_dims_between(head_dim):
    check(problem(300, 350, (head_dim, head_dim), causal=True), dtype=torch.float16)
    check(problem(300, 350, (head_dim, 16)), scales=False)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed(mask, head_dim):
    check(packed_problem([100, 1, 0, 513, 64, 777], [100, 300, 20, 513, 0, 900], head_dim, tail=40, **mask))
    used = torch.tensor([650, 1, 0], dtype=torch.int32, device="cuda")
    check(packed_problem([128, 256, 500], [700, 300, 200], head_dim, seqused_k=used, **mask))
    check(packed_problem([3] * 200, [5] * 200, head_dim, tail=40, **mask))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_behind_a_sequence_do_not_count(head_dim):
    used = torch.tensor([33, 257], dtype=torch.int32, device="cuda")
    p = packed_problem([70, 130], [300, 290], head_dim, tail=40, seqused_k=used)
    q, k, v = (t.to(FLOAT8) for t in (p.q, p.k, p.v))
    clean = flash_ext.flash_attn_varlen_func(q, k, v, **p.options)
    for x in (k, v):
        x.view(torch.uint8)[33:300] = x.view(torch.uint8)[557:] = 0x7F  # NaN
    assert torch.equal(clean[:200], flash_ext.flash_attn_varlen_func(q, k, v, **p.options)[:200])


def test_poison_shows_what_is_not_written():
    p = packed_problem([70, 130], [300, 290], 64, tail=40)
    q, k, v = (t.to(FLOAT8) for t in (p.q, p.k, p.v))
    with poison():
        out, lse = flash_ext.flash_attn_varlen_func(q, k, v, **p.options, return_lse=True)
    assert torch.isfinite(out[:200]).all() and out[200:].isnan().all()
    assert torch.isfinite(lse[:, :200]).all() and lse[:, 200:].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scores", SCORES)
def test_scores_that_leave_the_range(scores, head_dim):
    for mask in ({}, {"causal": True}):
        p = problem_of_scores(scores, 700, (head_dim, head_dim), **mask)
        if scores == "all large":  # q.k in 14 bits tells scores of thousands no more apart
            p.q = p.q / 4
        p.k = p.k.clamp(-448, 448)  # what e4m3 holds: beyond is NaN
        check(p, scales=False, allowed=0.3)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "options", [{"softcap": 15.0}, {"softcap": 2.0}, {"softmax_scale": -0.1}, {"softmax_scale": 0.0}], ids=str
)
def test_general(options, head_dim):
    sinks = torch.randn(2, device="cuda") * 3
    for mask in MASKS:
        check(problem(300, 421, (head_dim, head_dim), **options, **mask))
        check(problem(300, 200, (head_dim, head_dim), sinks=sinks, **options, **mask))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sinks(head_dim):
    for sinks in ((0.0, -3.0), (50.0, 2.0)):
        check(problem(300, 200, (head_dim, head_dim), sinks=torch.tensor(sinks, device="cuda"), causal=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_contexts_add_up(head_dim):
    """V = 1 over 128k keys: the tensor cores' own accumulators would lose most of it."""
    q, k = (torch.randn(1, n, 2, head_dim, device="cuda").to(FLOAT8) for n in (64, 131072))
    out, lse = flash_ext.forward(q, k, torch.ones_like(k.float()).to(FLOAT8), return_lse=True)
    assert (out.float() - 1).abs().max() <= 2**-8
    check(problem(100, 20000, (head_dim, head_dim)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("amplitude", [1, 3])
def test_error_is_that_of_rounding_p_at_its_maximum(amplitude, head_dim):
    """The best that e4m3 can do: a row's largest P is a power of two, none is flushed that need not be, sums are exact."""
    q, k, v = (torch.randn(1, n, 4, head_dim, device="cuda") for n in (512, 2000, 2000))
    q, k, v = (t.to(FLOAT8) for t in (q * amplitude, k, v))
    qe, ke, ve = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = qe @ ke.transpose(-2, -1) * head_dim**-0.5
    p = 256 * torch.exp(scores - scores.amax(-1, keepdim=True))
    exact = (p @ ve / p.sum(-1, keepdim=True)).transpose(1, 2)
    rounded = (p.float().to(FLOAT8).double() @ ve / p.sum(-1, keepdim=True)).transpose(1, 2)
    out = flash_ext.forward(q, k, v).double()
    assert (out - exact).norm() <= 1.06 * (rounded - exact).norm()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_wrong_lengths_end(head_dim):
    """cu_seqlens that overlap or run backwards give numbers without meaning, but no block waits for ever."""
    q, k, v = (torch.randn(900, 2, head_dim, device="cuda").to(FLOAT8) for _ in range(3))
    cu = torch.tensor([0, 300, 600, 900], dtype=torch.int32, device="cuda")

    def attend(cu_k):
        return flash_ext.flash_attn_varlen_func(q, k, v, cu, cu_k, max_seqlen_q=300, max_seqlen_k=900)

    before = attend(cu)
    for wrong in ([0, 700, 100, 900], [500, 20, 5000, -7], [0, 0, 900, 900]):
        attend(torch.tensor(wrong, dtype=torch.int32, device="cuda"))
    assert torch.equal(attend(cu), before), "a call behind them finds its inputs and counters as they should be"


@pytest.mark.parametrize("layout", ["heads_first", "qkv", "expanded"])
def test_layouts(layout):
    rand = torch.randn(2, 300, 3, 2, 128, device="cuda").to(FLOAT8)
    if layout == "qkv":
        q, k, v = rand.unbind(2)
    elif layout == "heads_first":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in rand.unbind(2))
    else:
        q, k, v = rand[:, :, 0], *(rand[:, :, i, :1].expand(-1, -1, 2, -1) for i in (1, 2))
    check(Problem(q, k, v, {}))


def test_the_same_from_run_to_run():
    q, k, v = (torch.randn(4, 1000, 16, 128, device="cuda").to(FLOAT8) for _ in range(3))
    first = flash_ext.forward(q, k, v, causal=True)
    assert all(torch.equal(first, flash_ext.forward(q, k, v, causal=True)) for _ in range(5))


def test_captured_in_a_graph():
    q, k, v = (torch.randn(2, 500, 4, 128, device="cuda").to(FLOAT8) for _ in range(3))
    expected = flash_ext.forward(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_ext.forward(q, k, v)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_what_has_no_float8_kernel_is_converted():
    q, k, v = (torch.randn(1, 200, 2, 64, device="cuda").to(FLOAT8) for _ in range(3))
    slopes = torch.rand(2, device="cuda")
    for options in ({"alibi_slopes": slopes}, {"attn_bias": torch.randn(200, 200, device="cuda")}, {"dropout_p": 0.1}):
        assert "converted to bfloat16" in str(flash_ext.explain(q, k, v, **options))
        assert flash_ext.forward(q, k, v, **options).dtype == torch.bfloat16


@pytest.mark.parametrize("seed", range(12))
def test_random_configurations(seed):
    rng = random.Random(seed)
    for _ in range(12):
        config = random_config(rng, "sm90", ["bf16"], 900)
        if (p := float8_problem(config)) is not None:
            check(p)
