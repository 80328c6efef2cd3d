"""Clocks and peers on a real device."""

import time
from dataclasses import replace

import pytest
import torch

from bench import runner, timing
from bench.cases import Case, make_inputs

pytestmark = pytest.mark.gpu

SMALL = Case("fwd", "grid", batch=2, seqlen=512, num_heads=4, num_heads_kv=4, causal=True)
OPTIONS = runner.Options("cuda", rounds=2, round_seconds=0.001, commit="abc")


@pytest.mark.alone
def test_host_time_does_not_count():
    x = torch.zeros(1024, device="cuda")

    def slow_to_enqueue():
        time.sleep(0.002)
        x.add_(1)

    slow_to_enqueue()
    assert timing.device_seconds(slow_to_enqueue, repeats=5, queue_seconds=0.05) < 0.0005
    assert timing.device_seconds(slow_to_enqueue, repeats=5, queue_seconds=0.0) > 0.0015


@pytest.mark.alone
def test_device_time_counts():
    cycles = timing.sleep_cycles_per_second() / 1000
    seconds = timing.device_seconds(lambda: torch.cuda._sleep(int(cycles)), repeats=3, queue_seconds=0.005)
    assert seconds == pytest.approx(0.001, rel=0.2)


@pytest.mark.parametrize("work", ["fwd", "bwd"])
def test_peers_are_right_and_timed(work):
    names = ["flash_ext", "cudnn", "fa2", "efficient", "standard"]
    verdicts = {}
    rows = runner.run_cases([replace(SMALL, work=work)], names, OPTIONS, verdicts)
    assert runner.refused(verdicts) == 0
    assert set(rows[0]["tflops"]) == set(names)


def test_unwritten_results_are_seen():
    inputs = make_inputs(SMALL, "cuda")
    runner.poison_free_memory(inputs)
    assert torch.empty_like(inputs.q).isnan().all()


def test_packed_and_window():
    packed = replace(SMALL, case="packed", batch=3, lengths=(512, 100, 37))
    window = replace(SMALL, case="window", causal=False, window_size=(100, 0))
    verdicts = {}
    rows = runner.run_cases([packed, window], ["flash_ext", "fa2"], OPTIONS, verdicts)
    assert runner.refused(verdicts) == 0 and all(set(row["tflops"]) == {"flash_ext", "fa2"} for row in rows)


def test_memory_and_overhead():
    cases = [replace(SMALL, work="memory", case="training"), replace(SMALL, work="overhead", case="forward", seqlen=64)]
    rows = runner.run_cases(cases, ["flash_ext", "standard"], OPTIONS, {})
    memory, overhead = rows
    assert memory["mib"]["flash_ext"] < memory["mib"]["standard"]
    assert 1 < overhead["us"]["flash_ext"] < 10000
