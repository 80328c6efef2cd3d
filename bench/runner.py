"""Runs cases: prepares every library, checks it against the reference, times those that are right in turn."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from . import results, timing
from .cases import Case, Inputs, make_inputs
from .check import Checker
from .libraries import OURS, PATHS, Call, Unsupported, prepare
from .table import label, one_line

SUSTAINED_SECONDS = 0.8
SUSTAINED_ROUNDS = 3


@dataclass
class Options:
    device: str
    rounds: int = 5
    round_seconds: float = 0.040
    commit: str | None = None


def run_cases(
    cases: Iterable[Case], names: Iterable[str], options: Options, checked: bool = False
) -> tuple[list[dict], int]:
    """The rows, and how many calls of flash_ext were refused because they are wrong or fail. `checked`: an earlier run
    of the same cases in this process did the checking."""
    rows, refused = [], 0
    for case in cases:
        start = time.monotonic()
        fresh, wrong = run_case(case, list(names), options, checked)
        for row in fresh:
            print(f"{one_line(row)}  ({time.monotonic() - start:.1f} s)", file=sys.stderr, flush=True)
        rows += fresh
        refused += wrong
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return rows, refused


def run_case(case: Case, names: list[str], options: Options, checked: bool) -> tuple[list[dict], int]:
    inputs = make_inputs(case, options.device)
    checker = None if checked else Checker(case, inputs)
    calls: dict[str, Call] = {}
    runs: dict[str, Callable[[], object]] = {}
    refused = 0
    for name in names:
        try:
            call = prepare(name, case, inputs)
            with call.session(), torch.set_grad_enabled(case.needs_grad):
                complaint = checker.complaint(_outputs(case, call)) if checker else ""
                run = _runnable(case, call)
                run()
        except Unsupported:
            continue
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
            complaint = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if complaint:
            print(
                f"not timed: {name}, {label(results.case_fields(case))} {case.seqlen}: {complaint}",
                file=sys.stderr,
                flush=True,
            )
            refused += name in OURS
            continue
        calls[name], runs[name] = call, run
    del checker
    if not runs:
        return [], refused
    unit, values = _measure(case, runs, {name: call.session for name, call in calls.items()}, options)
    return _rows(case, unit, values, inputs, calls, options), refused


def _outputs(case: Case, call: Call) -> list[torch.Tensor]:
    """out, or out and the gradients, in the common layout."""
    if not case.needs_grad:
        return [call.out()]
    for leaf in call.leaves:
        leaf.requires_grad_()
    out = call.forward()
    grads = torch.autograd.grad(out, call.leaves, call.dout)
    return [call.common(x.detach()) for x in (out, *grads)]


def _runnable(case: Case, call: Call) -> Callable[[], object]:
    """What is timed."""
    if case.work == "bwd":
        return call.backward()
    if case.case == "training":
        for leaf in call.leaves:
            leaf.requires_grad_()
        return lambda: torch.autograd.grad(call.forward(), call.leaves, call.dout)

    def forward():
        with torch.no_grad():
            return call.forward()

    return forward


def _measure(case: Case, runs: dict, sessions: dict, options: Options) -> tuple[str, dict[str, float]]:
    """The unit and each library's number."""
    cuda = options.device == "cuda"
    if case.work == "overhead":
        seconds = timing.host_seconds_in_turn(runs, cuda=cuda, rounds=options.rounds, sessions=sessions)
        return "us", {name: value * 1e6 for name, value in seconds.items()}
    if case.work == "memory":
        peaks = {}
        for name, run in runs.items():
            with sessions[name](), contextlib.suppress(torch.OutOfMemoryError):
                peaks[name] = timing.peak_mib(run)
        return "mib", peaks
    rounds, round_seconds = options.rounds, options.round_seconds
    if case.case == "sustained":
        rounds, round_seconds = SUSTAINED_ROUNDS, SUSTAINED_SECONDS
    seconds = timing.time_in_turn(runs, cuda=cuda, rounds=rounds, round_seconds=round_seconds, sessions=sessions)
    return "tflops", {name: case.flops() / value / 1e12 for name, value in seconds.items()}


def _rows(case: Case, unit: str, values: dict[str, float], inputs: Inputs, calls: dict, options: Options) -> list[dict]:
    """One row; of the generations one row per path, beside standard attention."""
    if case.case != "generations":
        path = arch_path(case, inputs) if "flash_ext" in calls else "none"
        return [results.make_row(case, unit, values, path, options.commit)]
    peers = {name: value for name, value in values.items() if name not in PATHS}
    return [
        results.make_row(case, unit, {"flash_ext": values[path], **peers}, path, options.commit)
        for path in calls
        if path in PATHS
    ]


def arch_path(case: Case, inputs: Inputs) -> str:
    """Which path flash_ext takes for this case."""
    import flash_ext

    lengths = {}
    if case.packed:
        cu, longest = inputs.cu_seqlens, case.seqlen
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    explanation = flash_ext.explain(inputs.q, inputs.k, inputs.v, **inputs.options, **lengths)
    return (explanation.backward if case.work == "bwd" else explanation.forward).path
