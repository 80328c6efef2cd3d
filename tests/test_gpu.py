"""What only a CUDA device can show: streams, graphs, devices, synchronisation, compiled programs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from behaviours import qkv
from cases import CASES

import flash_ext
from flash_ext.dispatch import CUDA_PATHS
from flash_ext.extension import _C
from flash_ext.testing import check

pytestmark = pytest.mark.gpu


def test_the_fastest_path_serves_usual_calls():
    q, k, v = qkv("cuda", seqlen_q=256, seqlen_k=256)
    expected = "sm90" if torch.cuda.get_device_capability()[0] == 9 else "sm80"
    assert flash_ext.explain(q, k, v, causal=True).path == expected


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("65536")])
def test_automatic_choice(name):
    """Whatever a single path cannot serve, another one does: no case is refused."""
    check(CASES[name][0].problem("cuda"))


def test_current_device_and_second_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    q, k, v = (t.detach().to("cuda:1").requires_grad_() for t in qkv("cuda"))
    expected = flash_ext.forward(*(t.detach().cuda(0) for t in (q, k, v)))
    out = flash_ext.forward(q, k, v)
    out.sum().backward()
    assert torch.cuda.current_device() == 0 and q.grad.device.index == 1
    assert torch.equal(out.cpu(), expected.cpu())
    with pytest.raises(ValueError, match="k must be on q's device"):
        flash_ext.forward(q, k.cuda(0), v)


@pytest.mark.parametrize("path", CUDA_PATHS)
def test_two_devices_at_once(path):
    """What a kernel sets up once (shared memory, counters) it sets up once per device; and results do not depend on it."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    cu = torch.tensor([0, 130, 300], dtype=torch.int32)

    def run(device: int) -> list[torch.Tensor]:
        results = []
        for dim in (64, 128, 256):
            leaves = [t.detach().to(device).requires_grad_() for t in qkv("cpu", 2, 300, 300, 4, 2, dim)]
            packed = [t.detach()[0].requires_grad_() for t in leaves]
            lengths = cu.to(device)
            for softcap in (0.0, 5.0):
                options = {"causal": True, "softcap": softcap, "deterministic": True}
                with flash_ext.use_path(path):
                    dense = flash_ext.forward(*leaves, **options)
                    varlen = flash_ext.flash_attn_varlen_func(*packed, lengths, lengths, 170, 170, **options)
                for out, inputs in ((dense, leaves), (varlen, packed)):
                    results += [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]
        return [x.cpu() for x in results]

    alone = run(1)  # the second device first: nothing was set up by the first one
    with ThreadPoolExecutor(2) as pool:
        for at_once in list(pool.map(run, (0, 1, 0, 1))):
            assert all(torch.equal(a, b) for a, b in zip(alone, at_once, strict=True))
    assert torch.cuda.current_device() == 0


def test_side_stream():
    q, k, v = qkv("cuda", seqlen_q=512, seqlen_k=512)
    expected = flash_ext.forward(q, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows has to wait for it
        shifted = q * 0 + 1
        out = flash_ext.forward(shifted, k, v)
        (grad,) = torch.autograd.grad(out.sum(), k)
    stream.synchronize()
    assert torch.equal(out, flash_ext.forward(torch.ones_like(q), k, v))
    assert torch.isfinite(grad).all() and not torch.equal(out, expected)


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 5.0}, {"dropout_p": 0.3}])
def test_graph_capture_and_replay(options):
    q, k, v = (t.detach().requires_grad_() for t in qkv("cuda", seqlen_q=200, seqlen_k=200))
    dout = torch.randn(q.shape, device="cuda", dtype=q.dtype)

    def step():
        out = flash_ext.forward(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for _ in range(2):
        with torch.no_grad():
            for t in (q, k, v, dout):
                t.normal_()
        graph.replay()
        if "dropout_p" in options:
            assert all(torch.isfinite(x).all() for x in results)
        else:
            for got, expected in zip(results, step(), strict=True):
                assert torch.allclose(got.float(), expected.float(), atol=2e-2)  # dq may be added up in another order
    if "dropout_p" in options:
        first = results[0].clone()
        graph.replay()
        assert not torch.equal(first, results[0]), "a replay has to draw new random numbers"


def test_no_hidden_synchronisation():
    q, k, v = qkv("cuda", heads=4, heads_kv=2)
    cu = torch.tensor([0, 30, 64], dtype=torch.int32, device="cuda")
    sinks = torch.zeros(4, device="cuda", requires_grad=True)
    packed = [t.detach()[0].requires_grad_() for t in (q, k, v)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_ext.forward(q, k, v, causal=True, sinks=sinks, dropout_p=0.1).sum().backward()
        flash_ext.flash_attn_varlen_func(*packed, cu, cu, 34, 34, causal=True, sinks=sinks).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.alone
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("path", CUDA_PATHS)
def test_wrong_lengths_on_the_device_end(path, deterministic):
    """They say nothing that makes sense, but no kernel waits for what never comes."""
    q, k, v = (t.detach()[0].requires_grad_() for t in qkv("cuda", seqlen_q=300, seqlen_k=300, heads=8, heads_kv=1))
    for starts in ([0, 2**30, -5, 10**9], [0, 200, 100, 300], [0, 300, 0, 300, 0, 300]):
        wild = torch.tensor(starts, dtype=torch.int32, device="cuda")
        with flash_ext.use_path(path):
            out = flash_ext.flash_attn_varlen_func(q, k, v, wild, wild, 300, 300, deterministic=deterministic)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        torch.cuda.synchronize()


def between(guards: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Room for a result; ``guards`` get what lies before and behind it, as large as the result and filled with 7."""
    before, room, behind = torch.full((3, *like.shape), 7.0, dtype=like.dtype, device="cuda")
    guards += [before, behind]
    return room


@pytest.mark.parametrize("path", CUDA_PATHS)
def test_wrong_lengths_on_the_device_reach_no_foreign_memory(path):
    q, k, v = (t.detach()[0] for t in qkv("cuda", seqlen_q=300, seqlen_k=300, heads=4, heads_kv=2))
    names = {_C.row_name(row): row for row in range(len(_C.instances()))}
    fwd, bwd = (
        next(row for name, row in names.items() if name.startswith(f"{p} {path} bf16 64 ") and "general" not in name)
        for p in ("fwd", "bwd")
    )
    if not (_C.is_built(fwd) and _C.is_built(bwd)):
        pytest.skip("not in this build")
    options, stream = _C.Options(), torch.cuda.current_stream().cuda_stream
    options.softmax_scale, options.max_seqlen_q, options.max_seqlen_k = 0.125, 300, 300
    for starts in ([0, 2**30, -5, 10**9], [0, 200, 100, 300], [-(2**31), 2**31 - 1]):
        options.cu_seqlens_q = options.cu_seqlens_k = torch.tensor(starts, dtype=torch.int32, device="cuda")
        stats = torch.zeros(4, 300, device="cuda")
        guards: list[torch.Tensor] = []
        out, lse, delta, dq, dk, dv = (between(guards, like) for like in (q, stats, stats, q, k, v))
        _C.fwd(fwd, q, k, v, out, lse, options, stream)
        blocks = -(-_C.bwd_workspace(bwd, q, k, v, options) // 1024)
        workspace = between(guards, torch.empty(blocks, 1024, dtype=torch.uint8))
        _C.bwd(bwd, q, k, v, out, out, lse, None, delta, dq, dk, dv, None, workspace, options, stream)
        assert all((guard == 7).all() for guard in guards)


def test_lengths_on_the_device_are_checked_on_request(monkeypatch):
    q, k, v = (t.detach()[0] for t in qkv("cuda"))
    wild = torch.tensor([0, 2**30, -5, 10**9], dtype=torch.int32, device="cuda")
    monkeypatch.setenv("FLASH_EXT_CHECK_LENGTHS", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        flash_ext.flash_attn_varlen_func(q[:63], k, v, wild, wild, 64, 64)


@pytest.mark.parametrize("path", CUDA_PATHS)
def test_long_sequence(path):
    """33728 keys: the last rows of the causal result against attention of those rows alone."""
    q, k, v = (t.detach() for t in qkv("cuda", seqlen_q=33728, seqlen_k=33728, heads=1, heads_kv=1, dim=128))
    with flash_ext.use_path(path):
        out = flash_ext.forward(q, k, v, causal=True)
    exact = flash_ext.reference.attention(*(t.double() for t in (q[:, -64:], k, v)), causal=True)[0]
    assert torch.isfinite(out).all() and (out[:, -64:].double() - exact).abs().max() < 1e-3


def test_more_than_two_to_the_31_elements():
    total = torch.cuda.get_device_properties(0).total_memory
    if total < 60e9:
        pytest.skip("needs 60 GB")
    x = torch.zeros(1, 2**17 + 3, 130, 128, device="cuda", dtype=torch.bfloat16)
    x[:, -70:] = torch.randn(1, 70, 130, 128, device="cuda").bfloat16()
    out = flash_ext.forward(x[:, -70:], x, x, window_size=(69, 0))
    exact = flash_ext.forward(x[:, -70:].clone(), x[:, -140:].clone(), x[:, -140:].clone(), window_size=(69, 0))
    assert torch.allclose(out.float(), exact.float(), atol=1e-2)  # other tiles, other rounding


def test_compile_with_inductor():
    torch._dynamo.reset()
    weights = torch.randn(64, 3 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def block(x, weights):
        qkv = (x @ weights).view(*x.shape[:2], 3, 1, 64)
        return flash_ext.flash_attn_qkvpacked_func(qkv, causal=True).sum(dim=(2, 3)) * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for batch, seqlen in ((2, 100), (3, 130)):
        x = torch.randn(batch, seqlen, 64, device="cuda", dtype=torch.bfloat16)
        expected, got = block(x, weights), compiled(x, weights)
        assert torch.allclose(expected.float(), got.float(), atol=0.1, rtol=0.05)
        grads = (torch.autograd.grad(y.float().sum(), weights)[0].float() for y in (expected, got))
        assert torch.allclose(*grads, atol=1.0, rtol=0.1)


def test_autocast():
    q, k, v = (t.detach().float().requires_grad_() for t in qkv("cuda"))
    with torch.autocast("cuda", torch.float16):
        out = flash_ext.forward(q, k, v)
    assert out.dtype == torch.float16
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_import_leaves_cuda_uninitialised():
    code = "import torch, flash_ext; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


WITHOUT_QUERIES = """
import cases
from flash_ext.testing import available_paths, check, device_of, poison

for path in available_paths():
    for head_dim in (128, 256):
        configs = dict(zip(("cuda", "cpu"), cases.CASES[f"packed, keys without queries, head_dim {head_dim}"]))
        config, device = configs[device_of(path)], device_of(path)
        problem = config.problem(device)
        with poison():
            got = problem.run(path)
        check(problem, path, got=got)
        first, last = config.lengths[0][1], config.lengths[-1][1]
        for name in ("dk", "dv"):
            assert not got[name][:first].any() and not got[name][-last:].any(), f"{path} {head_dim}: {name}"
"""


@pytest.mark.parametrize("caching", [True, False])
def test_keys_without_queries_have_gradients_of_zero(caching):
    """Of exactly zero, also in memory that comes fresh from the driver."""
    tests = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tests.parent), str(tests)))}
    if not caching:
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    subprocess.run([sys.executable, "-c", WITHOUT_QUERIES], env=env, check=True)
