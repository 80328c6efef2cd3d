from dataclasses import replace

import pytest
import torch

from bench.cases import Case, make_inputs
from bench.check import DROPOUT_SEED, Checker, disagreement
from bench.libraries import prepare
from bench.runner import _outputs

SMALL = Case("bwd", "grid", batch=3, seqlen=40, num_heads=4, num_heads_kv=2, head_dim=32, causal=True)


def outputs(case: Case, inputs) -> list[torch.Tensor]:
    return _outputs(case, prepare("standard", case, inputs))


def test_standard_attention_passes():
    inputs = make_inputs(SMALL, "cpu")
    assert Checker(SMALL, inputs).complaint(outputs(SMALL, inputs)) == ""


@pytest.mark.parametrize("position,name", [(0, "out"), (1, "dq"), (2, "dk"), (3, "dv")])
def test_a_wrong_result_is_named(position, name):
    inputs = make_inputs(SMALL, "cpu")
    results = outputs(SMALL, inputs)
    results[position] = results[position] * 1.1
    assert Checker(SMALL, inputs).complaint(results).startswith(name)


def test_unwritten_results_never_pass():
    inputs = make_inputs(SMALL, "cpu")
    results = outputs(SMALL, inputs)
    results[0] = torch.full_like(results[0], torch.nan)
    assert Checker(SMALL, inputs).complaint(results).endswith("are not finite")


def test_dropout_is_known_in_advance():
    case = replace(SMALL, feature="dropout")
    inputs = make_inputs(case, "cpu")
    checker = Checker(case, inputs)
    call = prepare("flash_ext", case, inputs)
    torch.manual_seed(DROPOUT_SEED)
    assert checker.complaint(_outputs(case, call)) == ""
    torch.manual_seed(DROPOUT_SEED + 1)
    assert checker.complaint(_outputs(case, call)) != ""


@pytest.mark.parametrize("feature", ["softcap", "alibi", "bias", "sinks"])
def test_features_are_part_of_the_reference(feature):
    def inputs_of(case):
        inputs = make_inputs(case, "cpu")
        return replace(inputs, q=8 * inputs.q) if feature == "softcap" else inputs  # 30 bends large scores only

    case = replace(SMALL, work="fwd", feature=feature, causal=False)
    inputs = inputs_of(case)
    checker = Checker(case, inputs)
    assert checker.complaint(outputs(case, inputs)) == ""
    plain = replace(case, feature="")
    assert checker.complaint(outputs(plain, inputs_of(plain))) != ""


def test_packed_segments_are_checked_alone():
    case = Case("fwd", "packed", batch=3, seqlen=30, lengths=(7, 30, 12), num_heads=2, num_heads_kv=2, head_dim=16)
    inputs = make_inputs(case, "cpu")
    segments = torch.tensor_split(torch.arange(49), (7, 37))
    dense = replace(case, lengths=(), batch=1)
    out = torch.empty_like(inputs.dout)
    for rows in segments:
        parts = {name: getattr(inputs, name)[rows][None] for name in ("q", "k", "v", "dout")}
        out[rows] = outputs(dense, replace(inputs, **parts))[0][0]
    checker = Checker(case, inputs)
    assert checker.complaint([out]) == ""
    assert checker.complaint([out.roll(1, dims=0)]) != ""


def test_tolerances():
    reference = torch.randn(5000, dtype=torch.float64)
    plain = reference + 0.01
    assert disagreement("out", reference + 0.013, reference, plain, "bf16") == ""
    assert "1.35 times" in disagreement("out", reference + 0.015, reference, plain, "bf16")
    assert disagreement("out", reference * (1 + 1e-6), reference, reference, "fp32") == ""
    assert "in norm above" in disagreement("out", reference * (1 + 2e-5), reference, reference, "fp32")
    assert disagreement("out", reference * 1.05, reference, plain, "e4m3") == ""
    assert "allowed 0.06" in disagreement("out", reference * 1.07, reference, plain, "e4m3")
