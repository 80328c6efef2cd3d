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
from .check import DROPOUT_SEED, Checker
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
    seed: int = 1


# What is wrong with a library's result for a case, "" if nothing: found out once, before the first timing.
Verdicts = dict[tuple[Case, str], str]


def run_cases(cases: Iterable[Case], names: Iterable[str], options: Options, verdicts: Verdicts) -> list[dict]:
    """One row per case. `verdicts` is filled; what stands in it already is not checked again."""
    rows = []
    for case in cases:
        start = time.monotonic()
        fresh = run_case(case, list(names), options, verdicts)
        for row in fresh:
            print(f"{one_line(row)}  ({time.monotonic() - start:.1f} s)", file=sys.stderr, flush=True)
        rows += fresh
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def run_case(case: Case, names: list[str], options: Options, verdicts: Verdicts) -> list[dict]:
    inputs = make_inputs(case, options.device, options.seed)
    checker = None
    calls: dict[str, Call] = {}
    runs: dict[str, Callable[[], object]] = {}
    for name in names:
        if verdicts.get((case, name)):
            continue
        try:
            call = prepare(name, case, inputs)
            with call.session(), torch.set_grad_enabled(case.with_autograd):
                if (case, name) not in verdicts:
                    checker = checker or Checker(case, inputs)
                    poison_free_memory(inputs)
                    torch.manual_seed(DROPOUT_SEED)
                    verdicts[case, name] = checker.complaint(_outputs(case, call))
                run = _runnable(case, call)
                run()
        except Unsupported:
            continue
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
            verdicts[case, name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        if verdicts[case, name]:
            shape = f"{label(results.case_fields(case))} {case.seqlen}"
            print(f"not timed: {name}, {shape}: {verdicts[case, name]}", file=sys.stderr, flush=True)
            continue
        calls[name], runs[name] = call, run
    if not runs:
        return []
    if case.work == "accuracy":
        errors = _errors(checker or Checker(case, inputs), calls, runs)
        return _rows(case, "rmse", errors, inputs, calls, options)
    del checker  # its tensors are large
    unit, values = _measure(case, runs, {name: call.session for name, call in calls.items()}, options)
    return _rows(case, unit, values, inputs, calls, options)


def refused(verdicts: Verdicts) -> int:
    """How many calls of flash_ext are wrong or fail."""
    return sum(bool(complaint) and name in OURS for (_, name), complaint in verdicts.items())


def poison_free_memory(inputs: Inputs) -> None:
    """Results are allocated from memory full of NaN, whatever the dtype: what a kernel leaves unwritten shows."""
    if inputs.q.is_cuda:
        size = sum(t.numel() * t.element_size() for t in (inputs.q, inputs.k, inputs.v, inputs.dout))
        torch.cuda.empty_cache()  # then the blocks that are freed here are the only ones to allocate from
        small = 1 << 20  # up to here the allocator takes from a pool of its own
        blocks = [4 * size] + [small] * (2 * (1 + 2 * size // small))  # two fill a segment
        filled = [torch.full((n,), 255, dtype=torch.uint8, device=inputs.q.device) for n in blocks]
        del filled


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
    if case.with_autograd:
        for leaf in call.leaves:
            leaf.requires_grad_()
    if case.case == "forward_grad":
        return call.forward
    if case.case == "training":
        return lambda: torch.autograd.grad(call.forward(), call.leaves, call.dout)

    def forward():
        with torch.no_grad():
            return call.forward()

    return forward


def _errors(checker: Checker, calls: dict[str, Call], runs: dict) -> dict[str, float]:
    errors = {}
    for name, run in runs.items():
        with calls[name].session():
            errors[name] = checker.relative_rmse(calls[name].common(run()))
    return errors


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
    with flash_ext.use_path(case.path) if case.path else contextlib.nullcontext():
        explanation = flash_ext.explain(inputs.q, inputs.k, inputs.v, **inputs.options, **lengths)
    return (explanation.backward if case.work == "bwd" else explanation.forward).path
