"""What bench_build reads out of ptxas -v, and what it refuses."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import bench_build, results
from build_tools.shared import build

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in the function '_Z1kPf'
ptxas info    : Compiling entry function '_ZN5flash10fwd_kernelILi128EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN5flash10fwd_kernelILi128EEEvPf
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem
ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
"""


def test_parse_log():
    first, second = bench_build.parse_log(LOG)
    assert (first.arch, first.registers, first.stack, first.spill_stores, first.spill_loads, first.shared) == (
        "sm_90a",
        168,
        16,
        8,
        12,
        1024,
    )
    assert (second.arch, second.registers, second.shared) == ("sm_80", 8, 0)
    assert list(bench_build.per_kernel([first, second]).values()) == [[168, 20], [8, 0]]


def test_spills_and_serialised_wgmma_are_problems(tmp_path):
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "fwd_sm90.cu.o.log").write_text(LOG)
    found = bench_build.problems(tmp_path)
    assert len(found) == 2
    assert found[0] == "sm90/fwd_sm90.cu k: C7510"
    assert found[1].startswith("sm90/fwd_sm90.cu fwd_kernel<128> sm_90a: spills 8 bytes at 168 registers")


def test_kernels_of_the_visible_list_may_spill_as_much_as_it_says(tmp_path, monkeypatch):
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "fwd_sm90.cu.o.log").write_text(LOG)
    monkeypatch.setattr(bench_build, "MAY_SPILL", {"sm90/fwd_sm90.cu fwd_kernel<*> sm_90a": 8})
    assert bench_build.problems(tmp_path) == ["sm90/fwd_sm90.cu k: C7510"]
    for pattern, allowed in (("sm90/fwd_sm90.cu fwd_kernel<*> *", 7), ("sm90/fwd_sm90.cu fwd_kernel<*> sm_80", 8)):
        monkeypatch.setattr(bench_build, "MAY_SPILL", {pattern: allowed})
        assert len(bench_build.problems(tmp_path)) == 2


def test_names_are_short():
    name = "void flash::(anonymous namespace)::fwd_kernel<flash::Traits<(flash::DType)2, 128> >(flash::FwdParams)"
    assert bench_build.short(name) == "fwd_kernel<Traits<2, 128>>"
    assert bench_build.short("void f<flash::T<true, (flash::sm90::Option)4> >(int)") == "f<T<true, 4>>"


def test_rows_are_timed_one_by_one(monkeypatch):
    monkeypatch.setattr(bench_build, "LOAD_ROW", "print('a line of torch'); print(12.34, 20.06)")
    rows = bench_build.measure_rows("fwd sm90 e4m3 64 *")
    assert [row["case"].split()[-1] for row in rows] == ["plain", "general"]
    assert rows[0]["seconds"] == {"flash_ext": 12.3} and rows[0]["cpu_seconds"] == 20.1
    assert rows[0]["case"].startswith("row fwd sm90 e4m3 64") and rows[0]["arch_path"] == "sm90"


def recorded_rows() -> tuple[list[dict], list[dict]]:
    """Of files, of rows compiled on first use."""
    recorded = results.load(results.RESULTS / "build.json")["rows"]
    return tuple([row for row in recorded if row["case"].startswith("row ") is of_rows] for of_rows in (False, True))


def test_only_the_files_that_match_are_compiled(tmp_path, monkeypatch):
    """For each architecture that they have code for, without linking."""
    toolkit = SimpleNamespace(nvcc="nvcc")
    plan = SimpleNamespace(archs=["80", "90a"], toolkit=toolkit, kernels=build.kernel_sources())
    monkeypatch.setattr(bench_build.ninja_build, "make_plan", lambda: plan)
    done = subprocess.CompletedProcess([], 0, stdout="", stderr=LOG)
    monkeypatch.setattr(bench_build.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(bench_build, "demangle", lambda names: names)
    rows = bench_build.measure(tmp_path, "sm80/fwd_*")
    assert {Path(row["case"]).parent.name for row in rows} == {"sm80"}
    assert all(row["archs"] == ["80", "90a"] and row["registers"] == 168 and row["spills"] == 20 for row in rows)
    assert all("fwd_sm80" in row["case"] and len(row["per_kernel"]) == 2 for row in rows)


def test_recorded_times_are_within_their_limits():
    """Two cores: 5 minutes for the kernel files of one architecture, 12 for several, 20 seconds for a row."""
    files, rows = recorded_rows()
    for archs in {tuple(row["archs"]) for row in files if row["arch_path"] == "simt"}:  # which every build has
        built = [row for row in files if set(row["archs"]) <= set(archs)]
        if len(archs) > 1:
            built = [row for row in built if row["archs"] == build.archs_of(build.CSRC / row["case"], list(archs))]
        seconds = sum(row["seconds"]["flash_ext"] for row in built)
        assert seconds < 2 * 60 * (5 if len(archs) == 1 else 12), f"{archs}: {seconds:.0f}"
    slowest = max(rows, key=lambda row: row["seconds"]["flash_ext"])
    assert slowest["seconds"]["flash_ext"] <= 20, slowest


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_recorded_times_of_rows_are_those_that_a_user_is_told(page):
    text = (build.CSRC.parent / page).read_text()
    shortest, longest = map(int, re.search(r"first use[^.]*in (\d+) to (\d+) s on two\s+cores", text).groups())
    seconds = [row["seconds"]["flash_ext"] for row in recorded_rows()[1]]
    assert shortest <= min(seconds) and max(seconds) <= longest


def test_recorded_registers_and_spills_are_those_of_each_kernel():
    files, _ = recorded_rows()
    for row in files:
        numbers = list(row["per_kernel"].values())
        registers, spills = max((n for n, _ in numbers), default=0), sum(n for _, n in numbers)
        assert (len(numbers), registers, spills) == (row["kernels"], row["registers"], row["spills"]), row["case"]


def test_a_record_for_other_architectures_is_another_one():
    one = {"work": "build", "case": "simt/fwd_simt.cu", "archs": ["90a"]}
    assert results.identity(one) != results.identity({**one, "archs": ["80+ptx", "90a"]})
