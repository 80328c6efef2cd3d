import pytest

from bench.cases import Case
from bench.results import make_row
from bench.table import label, one_line, ratio_to_best_peer, render, short, summary


def row(tflops: dict, unit: str = "tflops", **case) -> dict:
    return make_row(Case("fwd", "grid", **case), unit, tflops, "sm90", commit="abc")


def test_ratio_is_to_the_best_peer():
    ratio = ratio_to_best_peer(row({"flash_ext": 600, "fa3": 500, "cudnn": 400}))
    assert ratio.value == pytest.approx(1.2) and ratio.peer == "fa3"


def test_less_is_better_for_time_and_memory():
    ratio = ratio_to_best_peer(row({"flash_ext": 10.0, "fa3": 40.0, "cudnn": 20.0}, unit="us"))
    assert ratio.value == pytest.approx(2.0) and ratio.peer == "cudnn"


def test_no_ratio_without_both():
    assert ratio_to_best_peer(row({"flash_ext": 600})) is None
    assert ratio_to_best_peer(row({"fa3": 600})) is None


def test_a_block_has_a_column_per_length_and_a_line_per_library():
    rows = [row({"flash_ext": 700, "fa3": 650}, seqlen=4096), row({"flash_ext": 600}, seqlen=512)]
    lines = render(rows).splitlines()
    assert lines[0] == "fwd grid bf16 d128 full [tflops]"
    assert lines[1].split() == ["512", "4k"]
    assert lines[2].split() == ["flash_ext", "600", "700"]
    assert lines[3].split() == ["fa3", "-", "650"]
    assert lines[4].split() == ["x", "best", "peer", "-", "1.08"]
    assert len({len(line) for line in lines[1:]}) == 1


def test_other_ways_of_flash_ext_stand_below_it_and_are_no_peers():
    made = row({"cudnn": 500, "flash_ext": 600, "deterministic": 550})
    assert [line.split()[0] for line in render([made]).splitlines()[2:5]] == ["flash_ext", "deterministic", "cudnn"]
    assert ratio_to_best_peer(made).peer == "cudnn" and "deterministic 550" in one_line(made)


def test_one_line():
    line = one_line(row({"flash_ext": 600, "fa3": 500}, seqlen=4096))
    assert line == "fwd grid bf16 d128 full 4k [tflops, sm90]  flash_ext 600  fa3 500  x best peer 1.200"


def test_small_numbers_keep_their_digits():
    assert "0.012" in render([row({"flash_ext": 0.0123})])


def test_summary_names_the_lowest_cell():
    rows = [row({"flash_ext": 400, "fa3": 200}, seqlen=512), row({"flash_ext": 50, "cudnn": 100}, seqlen=1024)]
    text = summary(rows).splitlines()[1]
    assert text.split()[:6] == ["fwd", "grid", "2", "1.000", "1", "0.500"]
    assert "1k (cudnn)" in text


def test_summary_without_pairs():
    assert "no row" in summary([row({"fa3": 1})])


def test_shares_are_of_the_plain_call():
    plain = row({"flash_ext": 600, "deterministic": 540}, causal=True)
    rows = [plain, row({"flash_ext": 300}, causal=True, feature="softcap"), row({"flash_ext": 9}, inputs="x10")]
    text = summary(rows).splitlines()
    assert [line.split()[-2:] for line in text[-2:]] == [["deterministic", "0.90"], ["8k", "0.50"]]


def test_a_chosen_path_is_named():
    made = row({"flash_ext": 400, "fa2": 200}, path="sm80")
    assert label(made).endswith("on sm80 full") and summary([made]).splitlines()[1].startswith("  fwd grid on sm80")


def test_short():
    assert [short(n) for n in (512, 1024, 16384, 1000, 7777)] == ["512", "1k", "16k", "1000", "7777"]
