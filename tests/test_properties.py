"""Any shape, stride, mask and feature: hypothesis looks for the problem that breaks the rule, and shrinks it."""

from __future__ import annotations

from dataclasses import replace

import torch
from cases import Config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cases import check_what_is_served

import flash_ext
from flash_ext.testing import poison

usual = settings(
    max_examples=40 if not torch.cuda.is_available() else 100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
lengths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 200]))
bounds = st.one_of(st.just(-1), st.integers(0, 100))


@st.composite
def configs(draw) -> Config:
    num_heads_kv = draw(st.integers(1, 3))
    config = Config(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(lengths),
        seqlen_k=draw(lengths),
        num_heads=num_heads_kv * draw(st.integers(1, 3)),
        num_heads_kv=num_heads_kv,
        head_dim=draw(st.one_of(st.sampled_from([16, 64, 128]), st.integers(1, 80))),
        head_dim_v=draw(st.sampled_from([0, 0, 24])),
        dtype=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        causal=draw(st.booleans()),
        window_size=draw(st.one_of(st.just((-1, -1)), st.tuples(bounds, bounds))),
        layout=draw(st.sampled_from(["contiguous", "heads_first", "expanded", "odd"])),
        softcap=draw(st.sampled_from([0.0, 0.0, 10.0])),
        alibi=draw(st.sampled_from(["", "", "heads", "batch"])),
        bias=draw(st.sampled_from(["", "", "k", "qk", "bhqk"])),
        sinks=draw(st.booleans()),
        lse_gradient=draw(st.booleans()),
    )
    if draw(st.integers(0, 2)) == 0:
        pairs = draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=4))
        pairs.append((draw(st.integers(1, 90)), draw(st.integers(1, 90))))
        used = tuple(draw(st.integers(0, n)) for _, n in pairs) if draw(st.booleans()) else ()
        config = replace(config, lengths=tuple(pairs), used=used, tail=draw(st.integers(0, 9)), layout="contiguous")
    return config


@usual
@given(config=configs())
def test_any_problem(path, device, config):
    with poison():
        check_what_is_served(config.problem(device), path)


@usual
@given(config=configs(), cut=st.integers(0, 200))
def test_keys_in_two_parts_merge_into_the_whole(config, cut):
    config = replace(config, lengths=(), used=(), causal=False, window_size=(-1, -1), sinks=False, bias="", alibi="")
    problem = replace(config, dtype="fp32").problem("cpu")
    q, k, v = problem.q, problem.k, problem.v
    cut = min(cut, k.shape[1])
    whole = flash_ext.forward(q, k, v, return_lse=True)
    parts = (flash_ext.forward(q, k[:, s], v[:, s], return_lse=True) for s in (slice(cut), slice(cut, None)))
    (out_a, lse_a), (out_b, lse_b) = parts
    merged = flash_ext.merge_states(out_a, lse_a, out_b, lse_b)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(merged, whole, strict=True))
