"""Checks every variant of a build against the reference, then times those that are right in turn."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from bench import results, table, timing
from bench.cases import TOKENS, WIDTH, Case, Inputs, make_inputs, packed_lengths
from bench.check import Checker
from bench.libraries import Unsupported, prepare
from flash_ext.call import lse_shape


def load_extension(path: Path | None) -> ModuleType:
    """flash_ext._C, or a module that was linked elsewhere."""
    if path is None:
        from flash_ext import jit

        return jit.extension()
    spec = importlib.util.spec_from_file_location("_C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases_of(row_name: str, seqlen: int) -> list[Case]:
    """What is timed for a row such as 'fwd sm90 bf16 128 any_mask dense plain': both masks where it serves any."""
    pass_, _, dtype, dims, mask, layout, variant = row_name.split()
    head_dim, head_dim_v = (int(dim) for dim in (dims + "/" + dims).split("/")[:2])
    heads = WIDTH // head_dim
    shape = {"batch": max(1, TOKENS // seqlen), "seqlen": seqlen}
    if layout == "packed":
        lengths = packed_lengths(low=seqlen // 80, high=seqlen)
        shape = {"batch": len(lengths), "seqlen": max(lengths), "lengths": lengths}
    feature = "softcap" if variant == "general" else ""
    case = Case(
        pass_,
        "tune",
        dtype,
        head_dim,
        head_dim_v=head_dim_v,
        num_heads=heads,
        num_heads_kv=heads,
        feature=feature,
        **shape,
    )
    if mask == "local":
        return [replace(case, window_size=(1024, 0))]
    masks = {"full": [False], "causal": [True], "any_mask": [False, True]}[mask]
    return [replace(case, causal=causal) for causal in masks]


class RowCall:
    """One row of the table called directly, without dispatch."""

    def __init__(self, extension: ModuleType, row: int, case: Case, inputs: Inputs, deterministic: bool = False):
        self.extension, self.row = extension, row
        self.stream = torch.cuda.current_stream().cuda_stream if inputs.q.is_cuda else 0
        self.qkv = (inputs.q, inputs.k, inputs.v)
        rows = inputs.q.shape[:-2]
        device = inputs.q.device
        self.out = torch.empty(*rows, case.num_heads, case.head_dim_v, dtype=inputs.dout.dtype, device=device)
        self.lse, self.delta = torch.empty(2, *lse_shape(inputs.q), device=device)
        self.options = extension.Options()
        self.options.softmax_scale = case.head_dim**-0.5
        left, right = case.window_size
        self.options.window_left, self.options.window_right = left, 0 if case.causal else right
        self.options.deterministic = deterministic
        self.options.softcap = inputs.options.get("softcap", 0.0)
        if case.packed:
            self.options.cu_seqlens_q = self.options.cu_seqlens_k = inputs.cu_seqlens
            self.options.max_seqlen_q = self.options.max_seqlen_k = case.seqlen
        if case.work == "bwd":
            self._prepare_backward(case, inputs)
        elif size := extension.fwd_workspace(row, *self.qkv, self.options):
            self.options.workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def _prepare_backward(self, case: Case, inputs: Inputs) -> None:
        import flash_ext

        q, k, v = self.qkv
        if case.packed:
            cu, longest = inputs.cu_seqlens, case.seqlen
            result = flash_ext.flash_attn_varlen_func(
                q, k, v, cu, cu, longest, longest, return_lse=True, **inputs.options
            )
        else:
            result = flash_ext.forward(q, k, v, return_lse=True, **inputs.options)
        self.out, self.lse = result
        self.dout = inputs.dout
        self.grads = [torch.empty_like(x) for x in self.qkv]
        size = self.extension.bwd_workspace(self.row, q, k, v, self.options)
        self.workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None

    def forward(self) -> None:
        self.extension.fwd(self.row, *self.qkv, self.out, self.lse, self.options, self.stream)

    def backward(self) -> None:
        tensors = (*self.qkv, self.out, self.dout, self.lse, None, self.delta, *self.grads)
        self.extension.bwd(self.row, *tensors, None, self.workspace, self.options, self.stream)

    def poisoned_results(self, run: Callable[[], None], backward: bool) -> list[torch.Tensor]:
        for written in self.grads if backward else (self.out, self.lse):
            written.fill_(math.nan)
        run()
        return [self.out, *self.grads] if backward else [self.out]


def measure(
    folder: Path,
    seqlens: list[int],
    peers: list[str],
    rounds: int,
    ms: float,
    module: Path | None,
    deterministic: bool = False,
) -> list[dict]:
    """One dict per row, mask and length: {"row_name", "mask", "seqlen", "tflops": {variant or peer: number}, "refused"}."""
    extension = load_extension(module)
    entries = [entry for entry in json.loads((folder / "manifest.json").read_text()) if entry["library"]]
    found = []
    for row_name in dict.fromkeys(entry["row_name"] for entry in entries):
        same_row = [entry for entry in entries if entry["row_name"] == row_name]
        for seqlen in seqlens:
            for case in cases_of(row_name, seqlen):
                numbers = _measure_one(extension, folder, same_row, case, peers, rounds, ms, deterministic)
                mask = "local" if case.window_size != (-1, -1) else "causal" if case.causal else "full"
                found.append({"row_name": row_name, "mask": mask, "seqlen": seqlen, **numbers})
                print(_progress(found[-1]), flush=True)
    return found


def _measure_one(extension, folder, entries, case, peers, rounds, ms, deterministic) -> dict:
    inputs = make_inputs(case, "cuda")
    checker = Checker(case, inputs)
    runs, sessions, refused = {}, {}, {}
    backward = case.work == "bwd"
    for entry, exact in itertools.product(entries, (False, True) if deterministic and backward else (False,)):
        session = _override(extension, entry["row"], folder / entry["library"])
        name = entry["name"] + "+det" * exact
        with session():
            call = RowCall(extension, entry["row"], case, inputs, exact)
            run = call.backward if backward else call.forward
            try:
                complaint = checker.complaint(call.poisoned_results(run, backward))
                if not complaint and exact:
                    first = [grad.clone() for grad in call.grads]
                    again = call.poisoned_results(run, backward)[1:]
                    if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
                        complaint = "two runs differ"
            except (RuntimeError, ValueError) as error:
                complaint = str(error).splitlines()[0]
        if complaint:
            refused[name] = complaint
        else:
            runs[name], sessions[name] = run, session
    for peer in peers:
        with contextlib.suppress(Unsupported):
            call = prepare(peer, case, inputs)
            with call.session(), torch.set_grad_enabled(case.needs_grad):
                runs[peer] = call.backward() if backward else call.forward
            sessions[peer] = call.session
    with torch.no_grad():
        seconds = timing.time_in_turn(runs, cuda=True, rounds=rounds, round_seconds=ms / 1e3, sessions=sessions)
    tflops = {name: results.rounded(case.flops() / value / 1e12) for name, value in seconds.items()}
    return {"tflops": tflops, "refused": refused}


def _override(extension: ModuleType, row: int, library: Path) -> Callable[[], contextlib.AbstractContextManager]:
    @contextlib.contextmanager
    def session():
        extension.override_row(row, str(library.resolve()))
        yield

    return session


def _progress(found: dict) -> str:
    refused = "".join(f"\n  refused: {name}: {why}" for name, why in found["refused"].items())
    return f"{found['row_name']}, {found['mask']} {found['seqlen']}: {len(found['tflops'])} timed{refused}"


def render(found: list[dict]) -> str:
    """Per row and mask: the variants by speed, TFLOP/s and ratio to the first variant of the list."""
    blocks = []
    for title in dict.fromkeys((one["row_name"], one["mask"]) for one in found):
        columns = [one for one in found if (one["row_name"], one["mask"]) == title]
        names = list(dict.fromkeys(name for one in columns for name in one["tflops"]))
        if not names:
            continue
        base = names[0]
        cells = [[", ".join(title), *(table.short(one["seqlen"]) for one in columns), f"x {base}"]]
        for name in sorted(names, key=lambda name: -_mean_ratio(columns, name, base)):
            numbers = [f"{one['tflops'][name]:.0f}" if name in one["tflops"] else "-" for one in columns]
            cells.append([name, *numbers, f"{_mean_ratio(columns, name, base):.3f}"])
        blocks.append(table.align(cells))
    return "\n\n".join(blocks)


def _mean_ratio(columns: list[dict], name: str, base: str) -> float:
    """Geometric mean over the lengths that have both."""
    both = [one["tflops"] for one in columns if name in one["tflops"] and base in one["tflops"]]
    return math.exp(sum(math.log(t[name] / t[base]) for t in both) / len(both)) if both else 0.0
