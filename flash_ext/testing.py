"""Problems that are judged by the rule of ``tolerance``, and a self check: ``python -m flash_ext.testing``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from . import reference
from .call import lse_shape, new_rng_state
from .dispatch import CUDA_PATHS
from .extension import _C, use_path
from .interface import flash_attn_varlen_func, forward
from .tolerance import Results, failures


@dataclass
class Problem:
    """Inputs of one attention call. ``options`` are keywords of ``forward``, of ``flash_attn_varlen_func`` if
    packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict = field(default_factory=dict)
    with_lse_gradient: bool = True
    seed: int = 0
    rows_of_segments: int | None = None  # read from the device where it is not known

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.options

    @property
    def rows(self) -> int:
        """Rows of packed queries that a segment owns."""
        return int(self.options["cu_seqlens_q"][-1]) if self.rows_of_segments is None else self.rows_of_segments

    @property
    def differentiable(self) -> dict[str, Tensor]:
        extras = {name: self.options.get(name) for name in ("attn_bias", "sinks")}
        return {"q": self.q, "k": self.k, "v": self.v, **{n: t for n, t in extras.items() if t is not None}}

    def _seed_generator(self) -> None:
        cpu = self.q.device.type == "cpu"  # torch.manual_seed takes a millisecond to reach every device
        generator = torch.default_generator if cpu else torch.cuda.default_generators[self.q.device.index]
        generator.manual_seed(self.seed)

    def rng_state(self) -> Tensor:
        """Seed and offset of the dropout in ``run``."""
        self._seed_generator()
        return new_rng_state(self.q.device)

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor]:
        """The same random dout, in q's dtype, and dlse whatever the path; NaN in rows that no segment owns."""
        generator = torch.Generator(self.q.device).manual_seed(self.seed)
        dout = torch.randn(*self.q.shape[:-1], self.v.shape[-1], generator=generator, device=self.q.device)
        dlse = torch.randn(lse_shape(self.q), generator=generator, device=self.q.device) * self.with_lse_gradient
        dout = dout.to(self.q.dtype)
        if self.packed:
            dout[self.rows :] = math.nan
            dlse[:, self.rows :] = math.nan
        return dout, dlse

    def run(self, path: str | None = None, backward: bool = True) -> Results:
        """out, lse, and dq, dk, dv, dattn_bias, dsinks with ``backward``, computed by flash_ext."""
        function = flash_attn_varlen_func if self.packed else forward

        def attention(q, k, v, **options):
            return function(q, k, v, **options, return_lse=True)

        with use_path(path) if path else nullcontext():
            return self._evaluate(attention, None, backward)

    def reference(self, dtype: torch.dtype | None = torch.float64, backward: bool = True) -> Results:
        """The same by plain attention; ``dtype`` None: in the dtype of the inputs."""
        return self._evaluate(reference.attention, dtype, backward)

    def _evaluate(self, attention, dtype: torch.dtype | None, backward: bool) -> Results:
        def leaf(t: Tensor) -> Tensor:
            t = t.detach() if dtype is None or not t.is_floating_point() else t.detach().to(dtype)
            return t.requires_grad_(backward)

        leaves = {name: leaf(t) for name, t in self.differentiable.items()}
        options = {name: leaves.get(name, value) for name, value in self.options.items()}
        if self.options.get("dropout_p"):
            self._seed_generator()
        if attention is reference.attention:
            if self.options.get("dropout_p"):
                options["rng_state"] = self.rng_state()
            options = {n: x for n, x in options.items() if n not in ("max_seqlen_q", "max_seqlen_k", "deterministic")}
        out, lse = attention(leaves["q"], leaves["k"], leaves["v"], **options)
        results = {"out": out.detach(), "lse": lse.detach()}
        if self.packed:
            results = {"out": out.detach()[: self.rows], "lse": lse.detach()[:, : self.rows]}
        if backward:
            dout, dlse = self.gradients
            torch.autograd.backward((out, lse), (dout.to(out.dtype), dlse.to(lse.dtype)))
            results |= {f"d{name}": t.grad for name, t in leaves.items()}
        return results


def check(problem: Problem, path: str | None = None, backward: bool = True, got: Results | None = None) -> None:
    """Raises ``AssertionError`` where flash_ext breaks the rule on this problem; ``got``: what a run gave before."""
    got = problem.run(path, backward) if got is None else got
    exact, plain = problem.reference(torch.float64, backward), problem.reference(None, backward)
    lines = failures(got, exact, plain, problem.q.dtype)
    assert not lines, "\n".join(lines)


def check_draws(
    problems: Sequence[Problem], path: str | None = None, backward: bool = True, got: Results | None = None
) -> None:
    """The rule for several draws of one problem as if they were one: where a few numbers decide, plain attention is exact
    or inexact by luck in a single one. ``got``: what a run of the first draw gave before."""
    runs = []
    for i, p in enumerate(problems):
        ours = got if i == 0 and got is not None else p.run(path, backward)
        runs.append((ours, p.reference(torch.float64, backward), p.reference(None, backward)))
    together = [
        {name: torch.cat([x[name].flatten() for x in side]) for name in side[0]} for side in zip(*runs, strict=True)
    ]
    lines = failures(*together, problems[0].q.dtype)
    assert not lines, "\n".join(lines)


@contextmanager
def poison(value: float = math.nan) -> Iterator[None]:
    """Fill what flash_ext allocates in this context with ``value`` (bytes with 0xFF), so that unwritten memory
    shows."""

    _C.poison(value)
    try:
        yield
    finally:
        _C.poison(None)


def available_paths() -> list[str]:
    """Paths that run on this machine with this build."""
    paths = ["reference", "cpu"]
    if torch.cuda.is_available():
        q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
        for path in reversed(CUDA_PATHS):
            try:
                with use_path(path):
                    forward(q, q, q)
                paths.append(path)
            except (NotImplementedError, RuntimeError):
                continue
    return paths


def device_of(path: str) -> str:
    return "cuda" if path in CUDA_PATHS else "cpu"


def self_check_problems(device: str) -> Iterator[tuple[str, Problem]]:
    """A few problems that touch every feature; small enough for a CPU."""

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = rand(2, 130, 4, 64, dtype=dtype), rand(2, 150, 2, 64, dtype=dtype), rand(2, 150, 2, 64, dtype=dtype)
        plain = Problem(q, k, v)
        name = str(dtype).removeprefix("torch.")
        yield f"{name}", plain
        for feature, options in {
            "causal": {"causal": True},
            "window": {"window_size": (40, 11)},
            "softcap": {"softcap": 5.0},
            "ALiBi": {"alibi_slopes": torch.rand(4, device=device), "causal": True},
            "bias": {"attn_bias": rand(1, 4, 130, 150, dtype=dtype)},
            "sinks": {"sinks": rand(4), "causal": True},
        }.items():
            yield f"{name} {feature}", replace(plain, options=options)
        cu_q = torch.tensor([0, 17, 17, 100], dtype=torch.int32, device=device)
        cu_k = torch.tensor([0, 30, 40, 120], dtype=torch.int32, device=device)
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 83, "max_seqlen_k": 80}
        yield f"{name} packed", Problem(q[0, :100], k[0, :120], v[0, :120], lengths | {"causal": True})


def main(arguments: Sequence[str] = ()) -> int:
    """Every path that this machine has, on all problems; a minute or two on a CPU."""
    argparse.ArgumentParser(prog="python -m flash_ext.testing", description=main.__doc__).parse_args(arguments)
    bad = 0
    for path in available_paths():
        device = device_of(path)
        torch.manual_seed(0)
        for name, problem in self_check_problems(device):
            try:
                with poison():
                    check(problem, path)
                verdict = "ok"
            except NotImplementedError:
                continue  # this path leaves such calls to another one
            except AssertionError as error:
                bad += 1
                verdict = f"FAILED: {error}"
            print(f"{path:10} {name:24} {verdict}", flush=True)
    print("all ok" if not bad else f"{bad} failed")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
