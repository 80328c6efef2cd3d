import pytest
import torch

from bench.cases import ALL, Case, make_inputs, packed_lengths, visible_pairs


def test_grid_is_the_36_cells():
    grid = [case for case in ALL["fwd"] if case.case == "grid"]
    assert len(grid) == 36
    assert all(case.batch * case.seqlen == 16384 and case.num_heads * case.head_dim == 2048 for case in grid)


def test_no_case_is_listed_twice():
    for work, cases in ALL.items():
        assert len(set(cases)) == len(cases), work


@pytest.mark.parametrize("causal,share", [(False, 1.0), (True, 0.5)])
def test_flops_of_a_square(causal, share):
    forward = Case("fwd", "grid", causal=causal, batch=2, seqlen=512, num_heads=16, head_dim=128)
    assert forward.flops() == share * 4 * 2 * 16 * 512 * 512 * 128
    backward = Case("bwd", "grid", causal=causal, batch=2, seqlen=512, num_heads=16, head_dim=128)
    assert backward.flops() == 2.5 * forward.flops()


def test_flops_with_another_value_dim():
    case = Case("bwd", "head_dim", head_dim=192, head_dim_v=128, batch=1, seqlen=64, num_heads=2, num_heads_kv=2)
    assert case.flops() == 2 * (3 * 192 + 2 * 128) * 2 * 64 * 64


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(5, 5), (3, 8), (8, 3)])
@pytest.mark.parametrize("left,right", [(-1, -1), (-1, 0), (2, 0), (1, 2), (0, -1)])
def test_visible_pairs_counts_the_mask(seqlen_q, seqlen_k, left, right):
    offset = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    assert visible_pairs(seqlen_q, seqlen_k, left, right) == seen.sum().item()


def test_packed_lengths_are_fixed():
    assert packed_lengths() == packed_lengths()
    assert len(packed_lengths()) == 16 and all(100 <= n <= 8000 for n in packed_lengths())


def test_inputs_have_the_shapes_of_the_case():
    case = Case("fwd", "cross", batch=2, seqlen=8, seqlen_k=24, num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=8)
    inputs = make_inputs(case, "cpu")
    assert inputs.q.shape == (2, 8, 4, 16) and inputs.k.shape == (2, 24, 2, 16) and inputs.v.shape == (2, 24, 2, 8)
    assert inputs.dout.shape == (2, 8, 4, 8) and inputs.q.dtype == torch.bfloat16


def test_packed_inputs():
    case = Case("fwd", "packed", batch=3, seqlen=9, lengths=(3, 9, 1), num_heads=2, num_heads_kv=2, head_dim=16)
    inputs = make_inputs(case, "cpu")
    assert inputs.q.shape == (13, 2, 16)
    assert inputs.cu_seqlens.tolist() == [0, 3, 12, 13]
    assert case.pairs() == 9 + 81 + 1


@pytest.mark.parametrize("kind", ["x10", "ramp", "huge_key", "sink_key"])
def test_large_logits_are_large(kind):
    def largest(inputs):
        made = make_inputs(Case("fwd", "logits", inputs=inputs, batch=1, seqlen=64, num_heads=2, num_heads_kv=2), "cpu")
        return (made.q[0, :, 0].float() @ made.k[0, :, 0].float().T).abs().max()

    assert largest(kind) > 3 * largest("normal")


def test_unknown_inputs_and_features_are_named():
    with pytest.raises(ValueError, match="inputs must be"):
        make_inputs(Case("fwd", "logits", inputs="strange", batch=1, seqlen=8), "cpu")
    with pytest.raises(ValueError, match="feature must be"):
        make_inputs(Case("fwd", "feature", feature="strange", batch=1, seqlen=8), "cpu")
