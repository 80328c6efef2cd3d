"""The whole way on the CPU: prepare, check, time, record."""

from dataclasses import replace

import pytest
import torch

import bench.__main__ as command
from bench import libraries, results, runner, timing
from bench.cases import ALL, Case

TINY = Case("fwd", "grid", dtype="fp32", head_dim=32, batch=1, seqlen=16, num_heads=2, num_heads_kv=2)
OPTIONS = runner.Options("cpu", rounds=3, round_seconds=0.001, commit="abc")


def run(cases: list[Case], names: list[str], verdicts: dict | None = None) -> tuple[list[dict], int]:
    verdicts = {} if verdicts is None else verdicts
    rows = runner.run_cases(cases, names, OPTIONS, verdicts)
    return rows, runner.refused(verdicts)


def test_forward_and_backward_on_the_cpu_path():
    for work in ("fwd", "bwd"):
        rows, refused = run([replace(TINY, work=work, causal=True)], ["flash_ext", "standard"])
        assert refused == 0
        assert set(rows[0]["tflops"]) == {"flash_ext", "standard"} and min(rows[0]["tflops"].values()) > 0
        assert rows[0]["arch_path"] == "cpu" and rows[0]["commit"] == "abc"


def test_packed_on_the_cpu_path():
    case = replace(TINY, case="packed", batch=2, lengths=(5, 16))
    rows, refused = run([case], ["flash_ext"])
    assert refused == 0 and rows[0]["lengths"] == [5, 16] and rows[0]["arch_path"] == "cpu"


def test_the_path_of_a_case_is_used():
    options = command.parse(["--path", "cpu", "--device", "cpu", "--case", "gqa"])
    assert {case.path for case in command.select(options, "fwd")} == {"cpu"}
    rows, refused = run([replace(TINY, path="simt")], ["flash_ext"])
    assert refused == 1 and not rows
    rows, refused = run([replace(TINY, path="cpu")], ["flash_ext"])
    assert refused == 0 and rows[0]["path"] == rows[0]["arch_path"] == "cpu"


def test_accuracy_is_the_error_against_fp64():
    case = replace(TINY, work="accuracy", case="bf16", dtype="bf16", inputs="outliers", seqlen_k=40)
    rows, refused = run([case], ["flash_ext", "standard"])
    assert refused == 0 and rows[0]["inputs"] == "outliers"
    assert 1e-4 < rows[0]["rmse"]["flash_ext"] <= 1.35 * rows[0]["rmse"]["standard"] < 0.02


def test_overhead_is_in_microseconds():
    rows, _ = run([replace(TINY, work="overhead", case="forward")], ["standard"])
    assert rows[0]["us"]["standard"] > 0


def test_what_is_wrong_is_not_timed(monkeypatch, capsys):
    def wrong(case, inputs):
        call = libraries._standard(case, inputs)
        return replace(call, forward=lambda: call.forward() + 1)

    monkeypatch.setitem(libraries.LIBRARIES, "flash_ext", wrong)
    verdicts = {}
    for _ in range(2):  # nor is it in a second run
        rows, refused = run([TINY], ["flash_ext", "standard"], verdicts)
        assert refused == 1 and set(rows[0]["tflops"]) == {"standard"}
    assert "not timed: flash_ext" in capsys.readouterr().err


def test_what_fails_is_named_and_the_others_go_on(monkeypatch, capsys):
    def fails(case, inputs):
        raise RuntimeError("no kernel")

    monkeypatch.setitem(libraries.LIBRARIES, "fa3", fails)
    rows, refused = run([TINY], ["fa3", "standard"])
    assert refused == 0 and set(rows[0]["tflops"]) == {"standard"}
    assert "RuntimeError: no kernel" in capsys.readouterr().err


def test_generations_make_a_row_per_path():
    case = replace(TINY, case="generations")
    rows, _ = run([case], ["standard", "cpu"])
    assert [row["arch_path"] for row in rows] == ["cpu"] and set(rows[0]["tflops"]) == {"flash_ext", "standard"}


def test_the_median_of_the_rounds_counts(monkeypatch):
    seconds = iter([1.0, 1.0, 5.0, 50.0, 1.0, 20.0, 2.0, 30.0])  # calibration, then three rounds, a and b in turn
    monkeypatch.setattr(timing, "wall_seconds", lambda call, repeats: next(seconds))
    calls = {"a": lambda: None, "b": lambda: None}
    assert timing.time_in_turn(calls, cuda=False, rounds=3, round_seconds=1.0) == {"a": 2.0, "b": 30.0}


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ALL, "fwd", [TINY, replace(TINY, causal=True), replace(TINY, case="gqa")])
    path = tmp_path / "cpu.json"
    arguments = ["fwd", "--device", "cpu", "--case", "grid", "--mask", "causal", "--libraries", "flash_ext", "standard"]
    assert command.main([*arguments, "--rounds", "2", "--ms", "1", "--runs", "2", "--out", str(path)]) == 0
    rows = results.load(path)["rows"]
    assert len(rows) == 1 and rows[0]["causal"] and rows[0]["runs"] == 2
    printed = capsys.readouterr().out
    assert "fwd grid fp32 d32 causal" in printed and "geomean" in printed


def test_quick_is_the_grid_with_three_libraries():
    options = command.parse(["--quick", "--device", "cpu"])
    assert options.work == ["fwd"] and len(command.select(options, "fwd")) == 36
    assert options.libraries == ["flash_ext", "fa3", "cudnn"] and options.ms == 15


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        command.parse([])
    assert "no CUDA device" in capsys.readouterr().err


def test_unknown_names_are_refused(capsys):
    for arguments in (["nonsense"], ["fwd", "--libraries", "nonsense"]):
        with pytest.raises(SystemExit):
            command.parse(arguments)
    assert "nonsense" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse(["fwd", "--device", "cpu", "--case", "nothing"])
    assert "no case is left: fwd has --case cross" in capsys.readouterr().err
    assert command.parse(["fwd", "fp8", "--device", "cpu", "--case", "gqa"])  # one of them has it


def test_unsupported_libraries_say_so():
    inputs = None
    with pytest.raises(libraries.Unsupported, match="16 or 32 bit"):
        libraries.prepare("standard", replace(TINY, dtype="e4m3"), inputs)
    with pytest.raises(libraries.Unsupported):
        libraries.prepare("efficient", replace(TINY, window_size=(4, 0)), inputs)
    with pytest.raises(ValueError, match="library must be one of"):
        libraries.prepare("nonsense", TINY, inputs)
