import json

import pytest

from bench import report
from bench.cases import Case
from bench.results import load, make_row, save
from bench.table import generation_values, render

MACHINE = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11"}


def row(work: str, case: str, path: str = "sm90", **options) -> dict:
    tflops = {"flash_ext": 600.0, "fa3": 500.0, "standard": 100.0}
    return make_row(Case(work, case, **options), "tflops", tflops, path, commit="abc")


def training_rows() -> list[dict]:
    shape = {"dtype": "bf16", "head_dim": 128, "causal": True, "batch": 1, "num_heads": 8, "num_heads_kv": 8}
    curve = {
        "loss": {"flash_ext": [5.0, 4.0], "standard": [5.0, 4.01]},
        "loss_difference": {"flash_ext": 0.01},
        "seqlen": 2048,
    }
    rows = [{**shape, **curve, "work": "train", "case": "loss", "seconds": {"flash_ext": 0.1, "standard": 0.2}}]
    for seqlen in (2048, 8192):
        rows.append({**shape, "work": "train", "case": "context", "seqlen": seqlen, "seconds": {"flash_ext": 0.1}})
        rows.append({**shape, "work": "memory", "case": "context", "seqlen": seqlen, "mib": {"flash_ext": 900.0}})
    return rows


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "h200.json"
    rows = [
        row("fwd", "grid", seqlen=n, causal=c, head_dim=d)
        for n in (512, 1024)
        for c in (True, False)
        for d in (64, 128)
    ]
    rows += [row("fwd", "generations", arch) for arch in ("simt", "sm80", "sm90")]
    rows += [row("fp8", "generations", dtype="e4m3"), row("bwd", "grid"), row("fp8", "grid", dtype="e4m3")]
    save(path, MACHINE, rows)
    return path


def test_report_prints_ratios(recorded, capsys):
    report.main([str(recorded)])
    printed = capsys.readouterr().out
    assert "gpu NVIDIA H200" in printed and "x best peer" in printed and "fwd grid" in printed


def test_merging_a_training_run(recorded, tmp_path, capsys):
    fresh = tmp_path / "train.json"
    fresh.write_text(json.dumps({"gpu": "NVIDIA H200", "rows": training_rows()}))
    before = len(load(recorded)["rows"])
    report.main([str(recorded), "--merge", str(fresh)])
    data = load(recorded)
    assert len(data["rows"]) == before + 5 and data["driver"] == "580"
    assert all("commit" in made for made in data["rows"])
    assert "memory context bf16 d128 causal" in capsys.readouterr().out


def test_another_gpu_is_refused(recorded, tmp_path):
    fresh = tmp_path / "other.json"
    fresh.write_text(json.dumps({"gpu": "NVIDIA A100", "rows": []}))
    with pytest.raises(ValueError, match="A100"):
        report.merge_file(recorded, fresh)


def test_plots(recorded, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    save(recorded, MACHINE, training_rows())
    report.main([str(recorded), "--plots", str(tmp_path / "plots")])
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"fwd.png", "bwd.png", "fp8.png", "generations.png", "train_loss.png", "train_context.png"}


def test_generations_are_in_order():
    rows = [row("fwd", "generations", arch) for arch in ("sm90", "simt")] + [row("fp8", "generations", dtype="e4m3")]
    values = generation_values(rows, "fwd", 128, False, 8192)
    assert list(values) == ["standard", "simt", "sm90", "fp8"]
    lines = [line.split() for line in render(rows).splitlines()]
    assert lines[0][-5:] == ["standard", "simt", "sm80", "sm90", "fp8"]
    assert lines[1] == ["fwd", "d128", "full", "8k", "100", "600", "-", "600", "600"]
