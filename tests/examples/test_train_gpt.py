"""The training example, with a tiny model."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_gpt
from attention import ATTENTION, flash_attention
from corpus import Corpus, windows
from gpt import GPT, Config, rotary_table, rotate

CPU = torch.device("cpu")
TINY = Config(num_layers=2, num_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(CPU)


@pytest.fixture
def setup() -> train_gpt.Setup:
    return train_gpt.Setup(CPU, TINY, batch=2, context=32, steps=4, learning_rate=1e-2, contexts=())


def test_corpus_is_real_text_split_by_file(corpus):
    assert len(corpus.train) > 1e6 and len(corpus.held_out) > 1e5
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.02 < share < 0.3
    assert b"import" in bytes(corpus.held_out[:100000].tolist())


def test_batches_depend_on_the_step_alone(corpus):
    assert torch.equal(corpus.batch(3, 2, 16), corpus.batch(3, 2, 16))
    assert not torch.equal(corpus.batch(3, 2, 16), corpus.batch(4, 2, 16))


def test_windows_are_runs_of_the_text():
    text = torch.arange(100, dtype=torch.uint8)
    got = windows(text, batch=50, context=8, seed=0)
    assert got.shape == (50, 9) and (got.diff(dim=1) == 1).all() and got.max() < 100


def test_rotation_depends_on_distance_only():
    table = rotary_table(10, 16, CPU)
    q, k = torch.randn(2, 16)
    scores = [(rotate(q, table[i]) * rotate(k, table[j])).sum() for i, j in ((2, 0), (9, 7))]
    assert torch.allclose(scores[0], scores[1], atol=1e-4)


def test_all_attentions_agree():
    q, k, v = torch.randn(3, 2, 40, 2, 16)
    results = [attend(q, k, v) for attend in ATTENTION.values()]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], atol=1e-5, rtol=1e-4)


def test_model_is_causal():
    torch.manual_seed(0)
    model = GPT(TINY, flash_attention)
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])
    assert not torch.allclose(model(tokens)[:, 8:], model(changed)[:, 8:])


def test_losses_agree_and_results_are_written(setup, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(train_gpt, "setup_for", lambda device: setup)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--device", "cpu", "--steps", "4", "--out", str(tmp_path)])
    train_gpt.main()
    (row,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert row["work"] == "train" and row["arch_path"] == "cpu" and len(row["loss"]["flash_ext"]) == 4
    assert max(row["loss_difference"].values()) < 1e-3 and set(row["loss"]) == set(ATTENTION)
    assert row["loss"]["flash_ext"][-1] < row["loss"]["flash_ext"][0]
    assert row["num_layers"] == 2 and row["parameters"] == sum(p.numel() for p in GPT(TINY, None).parameters())
    assert set(row["held_out"]) == set(row["seconds"]) == set(ATTENTION) and row["held_out"]["flash_ext"] < 6
    assert (tmp_path / "train_loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "A sample after 4 steps with flash_ext:\ndef " in printed.out and "held-out loss" in printed.out
    assert "differ from standard attention" in printed.out and "4/4" in printed.err  # of the progress bar


def test_contexts_are_plotted(setup, tmp_path):
    pytest.importorskip("matplotlib")
    runs = {name: train_gpt.Run([1.0], 0.5, 1024.0) for name in ATTENTION}
    rows = [row for n in (16, 32) for row in train_gpt.train_results.context_rows(setup, n, runs)]
    (plot,) = train_gpt.train_results.draw_plots(rows, tmp_path)
    assert plot.name == "train_context.png" and plot.read_bytes().startswith(b"\x89PNG")


def test_contexts_until_memory_runs_out(corpus, setup, monkeypatch, capsys):
    def train(training, steps, name):
        if name == "standard" and training.context > 16:
            raise torch.OutOfMemoryError
        return train_gpt.Run([1.0], 0.5, 1024.0)

    monkeypatch.setattr(train_gpt, "train", train)
    setup.contexts = (16, 32, 64)
    rows = [row for part in train_gpt.compare_contexts(setup, corpus, steps=1) for row in part]
    assert [row["work"] for row in rows] == ["train", "memory"] * 3
    assert [set(row["seconds"]) for row in rows[::2]] == [set(ATTENTION)] + [{"flash_ext", "sdpa"}] * 2
    printed = capsys.readouterr().out.splitlines()
    assert "standard 500.0 ms, 1.00 GiB" in printed[0] and "standard out of memory" in printed[2]


@pytest.mark.gpu
def test_contexts_on_a_gpu(tmp_path, monkeypatch):
    small = train_gpt.Setup(torch.device("cuda"), Config(2, 2, 64), 2, 128, 3, 1e-3, (128, 512))
    monkeypatch.setattr(train_gpt, "setup_for", lambda device: small)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--context-steps", "2", "--out", str(tmp_path)])
    train_gpt.main()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    memory = [row for row in rows if row["work"] == "memory" and row["case"] == "context"]
    assert [row["seqlen"] for row in memory] == [128, 512]
    assert all(row["mib"]["flash_ext"] > 0 for row in memory)
