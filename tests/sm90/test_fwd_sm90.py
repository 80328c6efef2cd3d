"""The Hopper forward where its own design could break: blocks that a warpgroup passes over, tails of V, the scheduler's
counters, every row of the table. (What Ampere's could get wrong too: tests/test_tensor_cores.py.)"""

from __future__ import annotations

import math

import pytest
import torch
from problems import DTYPES, HEAD_DIMS, SCORES, packed_problem, problem, problem_of_scores, rand

import flash_ext
from flash_ext.testing import check, poison

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [(0, 0), (64, 64), (200, 0), (-1, 130), (130, -1), (700, 3)], ids=str)
def test_windows_over_many_tiles(window, head_dim):
    """More tiles than multiprocessors, so that the pipeline goes on from tile to tile with blocks passed over."""
    p = problem(1500, 1400, (head_dim, head_dim), (16, 4), window_size=window)
    with poison():
        check(p, "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [8, 24, 40, 72, 104, 136, 168, 200, 248])
def test_head_dims_between(head_dim):
    check(problem(300, 350, (head_dim, head_dim), causal=True), "sm90", backward=False)
    check(problem(300, 350, (head_dim, 8)), "sm90", backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (64, 64)}], ids=str)
def test_packed(options, head_dim, dtype):
    lengths = [100, 1, 0, 513, 64, 777], [100, 300, 20, 513, 0, 900]
    with poison():
        check(packed_problem(*lengths, head_dim, dtype, tail=40, **options), "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_short_segments(head_dim):
    with poison():
        check(packed_problem([3] * 300, [5] * 300, head_dim, tail=40, causal=True), "sm90", backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 12.0, "causal": True},
        {"alibi_slopes": (0.5, 0.03)},
        {"attn_bias": (1, 2, 300, 421)},
        {"attn_bias": (2, 1, 1, 421), "window_size": (100, 10)},
        {"attn_bias": (1, 2, 1, 421), "causal": True},
        {"softcap": 12.0, "alibi_slopes": (0.5, 0.03), "attn_bias": (1, 2, 300, 421), "sinks": (1.0, -3.0)},
    ],
    ids=str,
)
def test_general_variants(options, head_dim, dtype):
    options = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = torch.tensor(options[name], device="cuda")
    if "attn_bias" in options:
        options["attn_bias"] = rand(*options["attn_bias"], dtype=dtype)
    with poison():
        check(problem(300, 421, head_dim, dtype=dtype, **options), "sm90", backward=False)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("sinks", [(1.0, -3.0), (80.0, 0.0)], ids=str)
@pytest.mark.parametrize("mask", [{"causal": True}, {"window_size": (3, 3)}], ids=str)
def test_sinks_of_plain_kernels(mask, sinks, head_dim):
    options = {"sinks": torch.tensor(sinks, device="cuda"), **mask}
    with poison():  # with more queries than keys, some see none
        check(problem(300, 200, head_dim, **options), "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("options", [{"alibi_slopes": (0.02, 0.5)}, {"attn_bias": True}, {"dropout_p": 0.1}], ids=str)
def test_reference_of_general_variants(options, scores, head_dim):
    options = dict(options, causal=True)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(options["alibi_slopes"], device="cuda")
    if "attn_bias" in options:
        options["attn_bias"] = rand(1, 2, 704, 704)
    check(problem_of_scores(scores, 704, (head_dim, head_dim), **options), "sm90", backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("softcap", "size"), [(50.0, 1.0), (15.0, 1.0), (15.0, 3.0), (1.0, 3.0), (0.1, 10.0)])
def test_softcap_of_small_and_large_scores(softcap, size, head_dim, dtype):
    p = problem(200, 500, (head_dim, head_dim), dtype=dtype, softcap=softcap)
    p.q *= size
    check(p, "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("steepness", [0.3, 2.0, 20.0])
def test_softcap_of_growing_scores(steepness, head_dim):
    """From the form that serves small scores to that of any, in the middle of a tile."""
    p = problem(300, 900, (head_dim, head_dim), softcap=20.0)
    p.k *= torch.linspace(steepness, 0.1, 900, device="cuda", dtype=p.k.dtype)[:, None, None]
    check(p, "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dropout_p", [0.001, 0.5, 0.96, 0.98])
def test_dropout_of_any_size(dropout_p, head_dim):
    """Beyond 0.96875 thresholds are no 16-bit floats in order."""
    for mask in ({}, {"causal": True}):
        check(problem(300, 421, (head_dim, head_dim), dropout_p=dropout_p, **mask), "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (100, 60)}], ids=str)
@pytest.mark.parametrize("slope", [0.003, 0.1, 2.0])
def test_alibi_on_both_sides_of_the_diagonal(slope, mask, head_dim):
    slopes = torch.tensor([[slope, -slope], [0.0, 3 * slope]], device="cuda")
    for seqlens in ((700, 1000), (1000, 700)):
        check(problem(*seqlens, (head_dim, head_dim), alibi_slopes=slopes, **mask), "sm90", backward=False)


BIAS_SHAPES = [(2, 2, 300, 424), (1, 2, 300, 424), (2, 1, 300, 424), (2, 2, 1, 424), (2, 1, 1, 424), (2, 2, 300, 1)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_by_copy_and_by_load(shape, head_dim, dtype):
    """fp32, and rows that are not multiples of 16 bytes apart, are not for the copy engine."""
    of_q = torch.bfloat16 if dtype == torch.float32 else dtype
    bias = rand(*shape, dtype=dtype)
    bias[rand(*shape) < -1] = -math.inf
    wide = rand(*shape[:3], 512, dtype=dtype)
    for attn_bias in (bias, wide[..., 8:432], wide[..., 2:426], bias.transpose(1, 2).contiguous().transpose(1, 2)):
        with poison():
            p = problem(300, 424, (head_dim, head_dim), dtype=of_q, attn_bias=attn_bias, causal=True)
            check(p, "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bias_of_packed_segments(head_dim):
    for longest in (513, 520):  # rows of bias that the copy engine cannot read, and that it can
        bias = rand(3, 4, longest, longest)
        with poison():
            p = packed_problem([100, 1, longest], [300, 20, longest], head_dim, attn_bias=bias)
            check(p, "sm90", backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bias_of_the_most_negative_number(head_dim, dtype):
    """It is no mask: a row that has nothing else attends to all."""
    bias = torch.zeros(1, 1, 300, 424, device="cuda", dtype=dtype)
    bias[:, :, 7:200] = torch.finfo(dtype).min
    bias[:, :, :, 100:400] = torch.finfo(dtype).min
    check(problem(300, 424, (head_dim, head_dim), dtype=dtype, attn_bias=bias), "sm90", backward=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("size", "offset"), [(1, -500), (1, 200), (10, 0), (100, 0), (50, -3000), (1, -60000)])
def test_large_bias(size, offset, head_dim, dtype):
    """Bias may be what Q K^T is added to: in units of q.k, and in the accumulator's order of sums."""
    bias = rand(1, 2, 300, 424, dtype=dtype) * size + offset
    for options in ({}, {"causal": True}, {"softmax_scale": 0.01}):
        check(problem(300, 424, (head_dim, head_dim), dtype=dtype, attn_bias=bias, **options), "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 1500, 1400), (1, 1, 1500, 1400), (1, 16, 1, 1400)], ids=str)
def test_bias_that_batches_share(shape, mask, head_dim):
    """Their tiles are worked on together, more of them than multiprocessors."""
    p = problem(1500, 1400, (head_dim, head_dim), (16, 4), attn_bias=rand(*shape), **mask)
    with poison():
        check(p, "sm90", backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout(dropout_p, head_dim):
    check(problem(300, 350, (head_dim, head_dim), dropout_p=dropout_p), "sm90", backward=False)
    check(
        problem(300, 350, (head_dim, head_dim), dropout_p=dropout_p, causal=True, softcap=20.0), "sm90", backward=False
    )


def test_streams_do_not_share_counters():
    """Two streams with launches in flight at the same time, one of them captured."""
    q, k, v = (rand(4, 1024, 8, 64) for _ in range(3))
    with flash_ext.use_path("sm90"):
        expected = flash_ext.forward(q, k, v, causal=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [flash_ext.forward(q, k, v, causal=True) for _ in range(4)]
        streams = [torch.cuda.Stream() for _ in range(3)]
        results = []
        for _ in range(5):
            graph.replay()
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(flash_ext.forward(q, k, v, causal=True))
        torch.cuda.synchronize()
    assert all(torch.equal(expected, x) for x in results + captured)


@pytest.mark.parametrize("softmax_scale", [0.0, -0.2])
@pytest.mark.parametrize("head_dim", [(64, 64), (192, 128)], ids=str)
def test_scales_that_are_not_positive(head_dim, softmax_scale):
    check(problem(200, 150, head_dim, causal=True, softmax_scale=softmax_scale), "sm90", backward=False)
