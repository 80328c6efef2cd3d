"""The parts of a recorded run."""

import os
import subprocess
import sys

import pytest

import bench.__main__ as command
from bench import recorded, report
from bench.cases import ALL, Case

BACKWARD_LENGTHS = (1024, 4096, 16384)  # of its grid


def cases_of(part: str) -> list[Case]:
    options = command.parse([*recorded.PARTS[part].split(), "--device", "cpu"])
    return [case for work in options.work for case in command.select(options, work)]


def test_every_case_is_in_exactly_one_part():
    found = [case for part in recorded.PARTS for case in cases_of(part)]
    assert len(found) == len(set(found))
    wanted = [case for cases in ALL.values() for case in cases]
    wanted = {case for case in wanted if (case.work, case.case) != ("bwd", "grid") or case.seqlen in BACKWARD_LENGTHS}
    assert {case for case in found if not case.path} == wanted


def test_parts_run_one_after_another(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(recorded, "run", lambda *words: calls.append(words) or (1 if "fp8" in words else 0))
    out = tmp_path / "out.json"
    assert recorded.main(["fwd", "fp8", "training", "--out", str(out), "--commit", "abc"]) == 1
    assert [words[:3] for words in calls[:2]] == [("-m", "bench", "fwd"), ("-m", "bench", "fp8")]
    assert calls[0][-4:] == ("--out", str(out), "--commit", "abc")
    assert calls[2][0] == "examples/train_gpt.py"
    lines = capsys.readouterr().out.splitlines()
    assert "exit status 1" in next(line for line in lines if line.startswith("fp8"))


@pytest.mark.parametrize("before", ["", "elsewhere"])
def test_a_part_finds_flash_ext_without_an_installation(monkeypatch, before):
    calls = []
    monkeypatch.setenv("PYTHONPATH", before)
    monkeypatch.setenv("FLASH_EXT_JIT", "0")
    done = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(recorded.subprocess, "run", lambda words, **options: calls.append((words, options)) or done)
    assert recorded.run("examples/train_gpt.py", "--steps", "1") == 3
    ((words, options),) = calls
    assert words == [sys.executable, "examples/train_gpt.py", "--steps", "1"] and options["cwd"] == recorded.ROOT
    assert options["env"]["PYTHONPATH"].split(os.pathsep) == [str(recorded.ROOT), *filter(None, [before])]
    assert options["env"]["FLASH_EXT_JIT"] == "0"


def test_training_rows_are_taken_in(monkeypatch, tmp_path):
    merged = []

    def train(*words):
        folder = words[words.index("--out") + 1]
        open(f"{folder}/results.json", "w").close()
        return 0

    monkeypatch.setattr(recorded, "run", train)
    monkeypatch.setattr(report, "merge_file", lambda *arguments: merged.append(arguments))
    assert recorded.run_part("training", tmp_path / "out.json", "abc") == 0
    assert merged[0][0] == tmp_path / "out.json" and merged[0][2] == "abc"


def test_unknown_part(capsys):
    with pytest.raises(SystemExit):
        recorded.main(["forward"])
    assert "part must be of fwd, bwd" in capsys.readouterr().err
