import json

from bench.cases import ALL, Case
from bench.libraries import OURS
from bench.results import IDENTITY, RESULTS, identity, load, make_row, median_of_runs, merge, rounded, save, unit_of


def row(value: float = 100.0, path: str = "sm90", library: str = "flash_ext", **case) -> dict:
    return make_row(Case("fwd", **{"case": "grid", **case}), "tflops", {library: value}, path, commit="abc")


def test_a_row_has_the_recorded_format():
    made = row(seqlen=4096, head_dim=64)
    assert made["commit"] == "abc" and made["work"] == "fwd" and made["case"] == "grid" and made["arch_path"] == "sm90"
    assert made["tflops"] == {"flash_ext": 100.0} and made["seqlen"] == 4096 and made["dtype"] == "bf16"
    assert "seqlen_k" not in made and "feature" not in made  # written only where they say something
    assert json.loads(json.dumps(made)) == made


def test_other_ways_of_flash_ext_are_not_among_the_peers():
    made = make_row(Case("bwd", "grid"), "tflops", {"cudnn": 1, "deterministic": 2, "flash_ext": 3, "simt": 4}, "sm90")
    assert made["tflops"] == {"cudnn": 1, "flash_ext": 3} and made["own"] == {"deterministic": 2, "simt": 4}
    for path in RESULTS.glob("*.json"):
        for recorded in load(path)["rows"]:
            assert not set(recorded[unit_of(recorded)]) & (set(OURS) - {"flash_ext"})


def test_every_case_has_an_identity_of_its_own():
    for work, cases in ALL.items():
        rows = [make_row(case, "tflops", {}, "sm90", commit="abc") for case in cases]
        assert len({identity(made) for made in rows}) == len(rows), work


def test_identity_survives_json():
    made = row(window_size=(1024, 0), lengths=())
    assert identity(json.loads(json.dumps(made))) == identity(made)
    assert "window_size" in IDENTITY


def test_where_and_when_is_not_identity():
    other = {**row(path="simt"), "date": "2020-01-01", "commit": "def"}
    assert identity(row()) == identity(other)


def test_generations_keep_one_row_per_path():
    assert identity(row(case="generations", path="simt")) != identity(row(case="generations", path="sm80"))


def test_merge_replaces_and_keeps():
    old = [row(1.0, seqlen=512), row(2.0, seqlen=1024)]
    merged = merge(old, [row(3.0, seqlen=512), row(4.0, seqlen=2048)])
    assert {made["seqlen"]: made["tflops"]["flash_ext"] for made in merged} == {512: 3.0, 1024: 2.0, 2048: 4.0}


def test_merge_never_mixes_numbers_of_two_runs():
    merged = merge([row(1.0, library="fa3")], [row(2.0, library="flash_ext")])
    assert merged[0]["tflops"] == {"flash_ext": 2.0}


def test_median_of_three_runs_per_library():
    runs = [[row(5.0)], [row(1.0)], [row(3.0)]]
    runs[0][0]["tflops"]["cudnn"] = 7.0  # timed in one run only
    (made,) = median_of_runs(runs)
    assert made["tflops"] == {"flash_ext": 3.0, "cudnn": 7.0} and made["runs"] == 3 and "own" not in made
    runs[1][0]["own"], runs[2][0]["own"] = {"deterministic": 1.0}, {"deterministic": 2.0}
    assert median_of_runs(runs)[0]["own"] == {"deterministic": 1.5}


def test_save_merges_with_the_file(tmp_path):
    path = tmp_path / "gpu.json"
    machine = {"gpu": "NVIDIA H200", "driver": "1", "cuda": "13.0", "torch": "2"}
    save(path, machine, [row(1.0, seqlen=512)])
    save(path, machine, [row(2.0, seqlen=512), row(3.0, seqlen=1024)])
    data = load(path)
    assert data["gpu"] == "NVIDIA H200" and len(data["rows"]) == 2
    assert len(path.read_text().splitlines()) == 4  # a row per line


def test_rounded_to_four_digits():
    assert rounded(712.3456) == 712.3 and rounded(0.00123456) == 0.001235
