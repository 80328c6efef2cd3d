"""Clocks. On a GPU the launch queue is filled first: a long sleep kernel runs while the host enqueues, so that the
events see device time alone. Libraries are timed in turn within each round: all see the same clocks and temperature."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from functools import cache

import torch

QUEUE_CALLS = 200  # with a few kernels per call this stays below the launch queue's depth of about 1000


@cache
def sleep_cycles_per_second() -> float:
    cycles = 20_000_000
    torch.cuda._sleep(1000)
    start, end = _events()
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def device_seconds(call: Callable[[], object], repeats: int, queue_seconds: float) -> float:
    """Seconds of one call, the mean of `repeats` calls that were all enqueued within `queue_seconds`."""
    start, end = _events()
    torch.cuda._sleep(int(queue_seconds * sleep_cycles_per_second()))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def wall_seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def time_in_turn(
    calls: dict[str, Callable[[], object]],
    *,
    cuda: bool,
    rounds: int,
    round_seconds: float,
    sessions: dict[str, Callable] | None = None,
) -> dict[str, float]:
    """Median seconds of one call of each library."""
    sessions = sessions or {}
    repeats, queue_seconds = {}, 0.0
    for name, call in calls.items():
        with sessions.get(name, contextlib.nullcontext)():
            call()
            host = _host_seconds(call, 2) if cuda else 0.0
            once = device_seconds(call, 2, 3 * host + 1e-4) if cuda else wall_seconds(call, 1)
        repeats[name] = max(1, int(round_seconds / once))
        if host > once:  # the device would overtake the host once the queue is empty
            repeats[name] = min(repeats[name], QUEUE_CALLS)
        queue_seconds = max(queue_seconds, 1.3 * host * min(repeats[name], QUEUE_CALLS) + 2e-4)

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            with sessions.get(name, contextlib.nullcontext)():
                one = device_seconds(call, repeats[name], queue_seconds) if cuda else wall_seconds(call, repeats[name])
            seconds[name].append(one)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _host_seconds(call: Callable[[], object], repeats: int) -> float:
    """Host time of enqueueing one call."""
    torch.cuda.synchronize()
    seconds = wall_seconds(call, repeats)
    torch.cuda.synchronize()
    return seconds


def host_seconds_in_turn(
    calls: dict[str, Callable[[], object]],
    *,
    cuda: bool,
    rounds: int,
    sessions: dict[str, Callable] | None = None,
    repeats: int = 100,
) -> dict[str, float]:
    """Median host seconds of one eager call whose device work is too small to matter."""
    sessions = sessions or {}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):  # the first round warms up
        for name, call in calls.items():
            with sessions.get(name, contextlib.nullcontext)():
                seconds[name].append(_host_seconds(call, repeats) if cuda else wall_seconds(call, repeats))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def peak_mib(call: Callable[[], object]) -> float:
    """Memory that one call needs beyond what is there already."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
