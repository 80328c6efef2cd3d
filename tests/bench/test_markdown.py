import pytest

from bench import markdown, table
from bench.cases import Case
from bench.results import make_row


def row(values: dict, unit: str = "tflops", work: str = "bwd", case: str = "grid", **options) -> dict:
    return {**make_row(Case(work, case, **options), unit, values, "sm90", commit="abc"), "runs": 3}


def test_others_are_read_through_the_library_that_both_runs_have():
    ours = [row({"flash_ext": 600, "cudnn": 500}), row({"flash_ext": 600, "cudnn": 500}, head_dim=64)]
    peers = [row({"cudnn": 550, "fa3": 660, "fa4": 605})]
    (ratio,) = table.through_cudnn(ours, peers)
    assert ratio.peer == "fa3" and ratio.value == pytest.approx(600 / (500 * 660 / 550))


def test_speeds_name_every_cell_in_which_another_is_faster():
    rows = [row({"flash_ext": 600, "cudnn": 500}), row({"flash_ext": 450, "cudnn": 500}, seqlen=1024, causal=True)]
    text = markdown.speeds(rows, [])
    assert "| backward, bf16 | cuDNN | 2 | 3 | 1.039 | 0.900 (head_dim 128 causal 1k, cuDNN) |" in text
    assert text.endswith("| backward, bf16 | head_dim 128 causal 1k 0.900 |")
    assert "slower" not in markdown.speeds(rows[:1], [])


def test_equal_in_the_digits_shown_is_not_slower():
    assert "slower" not in markdown.speeds([row({"flash_ext": 499.9, "cudnn": 500})], [])


def test_features_are_shares_of_the_plain_call():
    plain = row({"flash_ext": 600, "deterministic": 540})
    shared = [row({"flash_ext": 300}, feature="softcap"), row({"flash_ext": 480}, seqlen=1024), plain]
    lines = markdown.features(shared).splitlines()
    assert lines[2:] == ["| softcap 30 | – | – | – | 0.50 |", "| deterministic gradients | – | – | – | 0.90 |"]
    larger = [row({"flash_ext": 500, "deterministic": n}, head_dim=256, seqlen=n) for n in (450, 475)]
    larger.append(row({"flash_ext": 500, "deterministic": 400}, head_dim=192, head_dim_v=128))
    text = markdown.features([plain, *larger])
    assert text.endswith("\n\nDeterministic gradients at other head dims: 192/128 0.80, 256 0.90–0.95.")
    assert markdown.features([plain | {"own": {}}]) == ""


def test_larger_errors_are_said():
    errors = {"flash_ext": 0.0022, "fa3": 0.002, "cudnn": 0.0021, "standard": 0.0044}
    text = markdown.exactness([row(errors, "rmse", "accuracy", "bf16")])
    assert "is 1.10 times that of the most exact of FA3, cuDNN; plain attention's is 2 to 2 times" in text
    losses = {"loss": {"flash_ext": [1.0, 2.0]}, "loss_difference": {"flash_ext": 0.0012, "sdpa": 0.0011}}
    assert "(2 steps), bf16 losses differ" in markdown.exactness(
        [{**losses, "work": "train", "case": "loss", "dtype": "bf16"}]
    )
