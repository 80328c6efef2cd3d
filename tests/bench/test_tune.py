import dataclasses
import json
import os
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import bench.tune.__main__ as command
from bench.cases import Case, make_inputs
from bench.tune import build, measure, variants
from flash_ext import jit

LIST = """
# a comment
base  | fwd sm80 bf16 128 any_mask any_layout plain |
n32   | fwd sm80 bf16 128 any_mask any_layout plain | kBlockN=32 kBlocksPerSm=3
"""


def test_a_list():
    base, narrow = variants.parse(LIST)
    assert base.name == "base" and base.row_name.startswith("fwd sm80 bf16 128 ") and base.defines() == []
    assert narrow.defines() == ["-DFLASH_TUNE_FWD=t.kBlockN=32;t.kBlocksPerSm=3"]


@pytest.mark.parametrize(
    "text,message",
    [
        ("a | row", "must be 'name"),
        ("a | row | kBlockN=1,2", "name=value"),
        ("a | row |\na | row |", "names must be unique"),
    ],
)
def test_a_bad_list_says_why(text, message):
    with pytest.raises(ValueError, match=message):
        variants.parse(text)


def test_the_lists_of_the_repository_are_readable():
    lists = list((variants.ROOT / "bench" / "tune").glob("*.txt"))
    assert lists
    for path in lists:
        for variant in variants.read(path):
            assert build.build.sources_of_row(variant.row_name), variant


def tile_header(row_name: str) -> str:
    pass_, arch, dtype, *_ = row_name.split()
    return f"{arch}/{'fp8' if dtype == 'e4m3' else pass_}_tile.h" if arch == "sm90" else f"{arch}/tile.h"


def complaints_of_the_compiler(variant: variants.Variant) -> str:
    """Tile headers know no CUDA: the host compiler tries a variant in a moment."""
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-x", "c++", f"-I{build.build.CSRC}"]
    program = f'#include "{tile_header(variant.row_name)}"'
    result = subprocess.run([*command, *variant.defines(), "-"], input=program, capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def test_the_fields_of_the_lists_are_those_of_the_tiles():
    for path in (variants.ROOT / "bench" / "tune").glob("*.txt"):
        for variant in variants.read(path):
            assert not (wrong := complaints_of_the_compiler(variant)), f"{path.name}: {variant.name}: {wrong}"
            unknown = dataclasses.replace(variant, fields=("no_such_field=1",))
            assert "no_such_field" in complaints_of_the_compiler(unknown), (
                f"{path.name}: nobody reads {unknown.defines()}"
            )


def test_cases_of_a_row():
    full, causal = measure.cases_of("fwd sm90 bf16 128 any_mask any_layout plain", 4096)
    assert (full.causal, causal.causal) == (False, True)
    assert full.batch == 4 and full.num_heads == 16 and full.head_dim == 128
    (only,) = measure.cases_of("bwd sm90 bf16 192/128 causal packed general", 1024)
    assert only.work == "bwd" and only.head_dim_v == 128 and only.packed and only.feature == "softcap"
    (window,) = measure.cases_of("fwd sm90 bf16 64 local dense plain", 4096)
    assert window.window_size == (1024, 0)


class Fp8Kernel:
    """An extension whose forward demands the workspace that it asked for, as Hopper's float8 rows do."""

    Options = SimpleNamespace

    def fwd_workspace(self, row, q, k, v, options) -> int:
        return 4 * v.numel()

    def fwd(self, row, q, k, v, out, lse, options, stream) -> None:
        assert options.workspace.dtype == torch.uint8 and options.workspace.numel() == 4 * v.numel()
        out.zero_()


def test_a_row_gets_the_workspace_that_it_asks_for():
    case = replace(measure.cases_of("fwd sm90 e4m3 64 any_mask any_layout plain", 32)[0], batch=2)
    call = measure.RowCall(Fp8Kernel(), 3, case, make_inputs(case, "cpu"))
    (out,) = call.poisoned_results(call.forward, backward=False)
    assert out.shape == (2, 32, case.num_heads, 64) and out.isfinite().all()


class BackwardKernel:
    """An extension whose backward gives the same result twice, but for row 1 even where it was asked to."""

    Options = SimpleNamespace

    def __init__(self):
        self.calls, self.asked = 0, []

    def override_row(self, row, library) -> None: ...

    def bwd_workspace(self, row, q, k, v, options) -> int:
        return 0

    def bwd(self, row, *arguments) -> None:
        *_, dq, dk, dv, _, _, options, _ = arguments
        self.calls += 1
        self.asked.append(options.deterministic)
        for grad in (dq, dk, dv):
            grad.fill_(self.calls if row == 1 else 1)


def backward_case() -> Case:
    return replace(measure.cases_of("bwd sm80 bf16 64 any_mask any_layout plain", 32)[0], batch=1)


def test_a_row_is_told_to_be_deterministic():
    case = backward_case()
    kernel, inputs = BackwardKernel(), make_inputs(case, "cpu")
    for deterministic in (False, True):
        call = measure.RowCall(kernel, 0, case, inputs, deterministic)
        _, *grads = call.poisoned_results(call.backward, backward=True)
        assert all(grad.isfinite().all() for grad in grads)
    assert kernel.asked == [False, True]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Everything is right, and takes a millisecond."""
    monkeypatch.setattr(measure, "make_inputs", lambda case, _: make_inputs(case, "cpu"))
    monkeypatch.setattr(measure, "Checker", lambda *_: SimpleNamespace(complaint=lambda results: None))
    monkeypatch.setattr(measure.timing, "time_in_turn", lambda runs, **_: dict.fromkeys(runs, 1e-3))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_calls_are_timed_if_two_runs_agree(on_the_cpu, tmp_path, deterministic):
    entries = [{"row": row, "name": name, "library": name} for row, name in enumerate(("good", "wobbly"))]
    found = measure._measure_one(BackwardKernel(), tmp_path, entries, backward_case(), [], 1, 1, deterministic)
    assert list(found["tflops"]) == (["good", "good+det", "wobbly"] if deterministic else ["good", "wobbly"])
    assert found["refused"] == ({"wobbly+det": "two runs differ"} if deterministic else {})


def test_a_forward_is_always_deterministic(on_the_cpu, monkeypatch, tmp_path):
    kernel, case = Fp8Kernel(), replace(measure.cases_of("fwd sm90 e4m3 64 any_mask any_layout plain", 32)[0], batch=2)
    monkeypatch.setattr(Fp8Kernel, "override_row", lambda *_: None, raising=False)
    entries = [{"row": 3, "name": "base", "library": "base"}]
    found = measure._measure_one(kernel, tmp_path, entries, case, [], 1, 1, True)
    assert list(found["tflops"]) == ["base"] and not found["refused"]


def test_deterministic_calls_are_measured_on_request(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(measure, "measure", lambda *arguments: asked.append(arguments[-1]) or [])
    assert command.main(["measure"]) == 0 and command.main(["measure", "--deterministic"]) == 0
    assert asked == [False, True]


def test_a_build_says_what_ptxas_made_of_it(tmp_path, monkeypatch):
    log = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in the function '_Z1kPf'
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90a'
ptxas info    : Function properties for _Z1kPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers
"""
    done = subprocess.CompletedProcess([], 0, stdout="", stderr=log)
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(build.bench_build, "demangle", lambda names: names)
    _, narrow = variants.parse(LIST)
    entry = build.build_one(narrow, 3, tmp_path, "nvcc", "90a")
    assert entry["registers"] == 168 and entry["row"] == 3
    assert "SPILLS 20 bytes, 1 times wgmma serialised" in build.report([entry])


def test_rows_have_the_numbers_that_the_extension_gives_them():
    module = jit.extension()
    assert list(build.row_numbers()) == [module.row_name(row) for row in range(len(module.instances()))]


def test_an_unknown_row_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "row_numbers", lambda: {"fwd sm90": 0})
    with pytest.raises(ValueError, match="not in the kernel table: 'fwd sm80 bf16 128 .*; it has\nfwd sm90"):
        build.build_all(variants.parse(LIST), tmp_path, "90a", 1)


def test_a_measurement_that_was_kept_is_shown(tmp_path, capsys):
    found = [{"row_name": "fwd sm90", "mask": "full", "refused": {}, "seqlen": 1024, "tflops": {"base": 100.0}}]
    (tmp_path / "kept.json").write_text(json.dumps(found))
    assert command.main(["show", str(tmp_path / "kept.json")]) == 0
    assert capsys.readouterr().out.split() == ["fwd", "sm90,", "full", "1k", "x", "base", "base", "100", "1.000"]


def test_table_is_sorted_by_speed_and_relative_to_the_first():
    row = {"row_name": "fwd sm90", "mask": "full", "refused": {}}
    found = [
        {**row, "seqlen": 1024, "tflops": {"base": 100.0, "fast": 200.0}},
        {**row, "seqlen": 4096, "tflops": {"base": 100.0, "fast": 150.0, "cudnn": 90.0}},
    ]
    lines = [line.split() for line in measure.render(found).splitlines()]
    assert lines[0][-4:] == ["1k", "4k", "x", "base"]
    assert lines[1] == ["fast", "200", "150", "1.732"]
    assert lines[2] == ["base", "100", "100", "1.000"]
    assert lines[3] == ["cudnn", "-", "90", "0.900"]
