"""The closed form against autograd through plain attention, in float64 and in the rounding of 16 bit."""

from __future__ import annotations

import random

import pytest
import torch
from cases import Config
from closed_form import ClosedForm
from random_configs import random_config

FEATURES = {
    "plain": Config(2, 33, 47, 4, 2),
    "causal, rows that see nothing": Config(2, 47, 33, 4, 2, causal=True),
    "window": Config(1, 40, 60, 3, 3, window_size=(9, 4), head_dim_v=24),
    "all features": Config(
        2, 40, 50, 6, 2, causal=True, softcap=5.0, alibi="batch", bias="bhqk", sinks=True, dropout_p=0.3
    ),
    "packed": Config(1, 64, 64, 4, 2, lengths=((30, 40), (0, 9), (1, 0), (40, 20)), used=(35, 9, 0, 20), tail=7),
    "packed, all features": Config(
        1, 64, 64, 4, 2, lengths=((30, 40), (17, 17)), window_size=(9, 2), softcap=5.0, alibi="batch", bias="bhqk",
        sinks=True, dropout_p=0.3, bias_fp32=True,
    ),
}  # fmt: skip


def compare(config: Config) -> None:
    problem = config.problem("cpu")
    closed = ClosedForm(config, problem)
    for dtype in (torch.float64, problem.q.dtype):
        expected = problem.reference(None if dtype == problem.q.dtype else dtype)
        got = closed.results(dtype, backward=True)
        if dtype != torch.float64:
            del expected["lse"]
        assert expected.keys() == got.keys()
        for name, x in expected.items():
            assert got[name].shape == x.shape, name
            if dtype == torch.float64:
                assert torch.allclose(got[name], x, rtol=1e-11, atol=1e-11), name
            elif config.lengths and name in ("dsinks", "dattn_bias"):  # sequences are added up in another order
                assert (got[name] - x).norm() <= 1e-2 * x.norm() + 1e-6, name
            else:
                assert (got[name].double() - x.double()).norm() <= 1e-2 * x.double().norm() + 1e-6, name
                if x.numel() > 20:
                    same = (got[name].double() == x.double()).double().mean()
                    assert same > 0.98, f"{name}: {same:.3f} are the same bits"


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    compare(FEATURES[name])


@pytest.mark.parametrize("seed", range(6))
def test_any_config(seed):
    rng = random.Random(seed)
    for _ in range(3):
        compare(random_config(rng, "cpu", ["bf16", "fp16"], 40))
