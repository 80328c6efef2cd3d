"""What bench_build reads out of ptxas -v, and what it refuses."""

from bench import bench_build, results

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


def test_spills_and_serialised_wgmma_are_problems(tmp_path):
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "fwd_sm90.cu.o.log").write_text(LOG)
    found = bench_build.problems(tmp_path)
    assert len(found) == 2
    assert found[0] == "sm90/fwd_sm90.cu k: C7510"
    assert found[1].startswith("sm90/fwd_sm90.cu fwd_kernel<128>: spills 8 bytes at 168 registers (sm_90a)")


def test_kernels_of_the_visible_list_may_spill_as_much_as_it_says(tmp_path, monkeypatch):
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "fwd_sm90.cu.o.log").write_text(LOG)
    monkeypatch.setattr(bench_build, "MAY_SPILL", {"sm90/fwd_sm90.cu fwd_kernel<*>": 8})
    assert bench_build.problems(tmp_path) == ["sm90/fwd_sm90.cu k: C7510"]
    monkeypatch.setattr(bench_build, "MAY_SPILL", {"sm90/fwd_sm90.cu fwd_kernel<*>": 7})
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


def test_recorded_times_are_within_their_limits():
    """Two cores: 5 minutes for the kernel files of one architecture, 20 seconds for a row."""
    recorded = results.load(results.RESULTS / "build.json")["rows"]
    files = {row["case"]: row["seconds"]["flash_ext"] for row in recorded if not row["case"].startswith("row ")}
    rows = {row["case"]: row["seconds"]["flash_ext"] for row in recorded if row["case"].startswith("row ")}
    assert files and sum(files.values()) < 2 * 300
    assert rows and max(rows.values()) <= 20, max(rows, key=rows.get)
