"""Trains a byte-level GPT on real text with flash_ext, and the same model with standard attention beside it.

    python examples/train_gpt.py                         on a GPU if there is one, else on the CPU in a few minutes
    python examples/train_gpt.py --steps 500 --contexts  only the comparison of losses, longer

Both models start from the same weights and see the same batches, so their losses must agree. On a GPU it then trains at
growing context lengths and shows step time and peak memory. Results and plots go to runs/train_gpt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Corpus
from gpt import GPT, Attend, Config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import flash_ext


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_ext.forward(q, k, v, causal=True)


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole score matrix in memory."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, num_heads, seqlen, head_dim)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTION: dict[str, Attend] = {
    "flash_ext": flash_attention,
    "sdpa": sdpa_attention,
    "standard": standard_attention,
}


@dataclass
class Setup:
    """What fits the device."""

    device: torch.device
    config: Config
    batch: int
    context: int
    steps: int
    learning_rate: float
    contexts: tuple[int, ...]  # of the second part

    @property
    def dtype(self) -> str:
        return "bf16" if self.device.type == "cuda" else "fp32"


def setup_for(device: torch.device) -> Setup:
    if device.type == "cuda":
        config = Config(num_layers=6, num_heads=8, head_dim=128)
        return Setup(device, config, 16, 2048, 200, 6e-4, (2048, 8192, 32768, 131072))
    return Setup(device, Config(num_layers=4, num_heads=4, head_dim=32), 8, 256, 250, 2e-3, ())


class Training:
    """One model, its optimiser and its batches; the same for the same seed, but for what computes attention."""

    def __init__(self, setup: Setup, corpus: Corpus, attention: str, batch: int, context: int):
        torch.manual_seed(0)
        self.setup, self.corpus, self.batch, self.context = setup, corpus, batch, context
        self.model = GPT(setup.config, ATTENTION[attention]).to(setup.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95))

    def precision(self):
        return torch.autocast(self.setup.device.type, torch.bfloat16, enabled=self.setup.dtype == "bf16")

    def step(self, step: int, total: int) -> float:
        warm_up = min(1.0, (step + 1) / (0.1 * total))
        for group in self.optimizer.param_groups:
            group["lr"] = self.setup.learning_rate * warm_up * (1 - 0.9 * step / total)
        with self.precision():
            loss = self.model.loss(self.corpus.batch(step, self.batch, self.context))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        with self.precision():
            return self.model.loss(self.corpus.held_out_batch(4 * self.batch, self.context)).item()

    def sample(self, prompt: str, count: int) -> str:
        torch.manual_seed(0)
        tokens = torch.tensor([list(prompt.encode())], device=self.setup.device)
        with self.precision():
            tokens = self.model.generate(tokens, count, self.context)
        return bytes(tokens[0].tolist()).decode(errors="replace")


@dataclass
class Run:
    losses: list[float]
    seconds: float  # median of a step
    peak_mib: float | None


def train(training: Training, steps: int, name: str) -> Run:
    on_gpu = training.setup.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    bar = tqdm(range(steps), desc=f"{name:9} context {training.context}", unit="step")
    for step in bar:
        start = time.perf_counter()
        losses.append(training.step(step, steps))  # reading the loss waits for the device
        seconds.append(time.perf_counter() - start)
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else None
    return Run(losses, statistics.median(seconds[1:] or seconds), peak)


def compare_losses(setup: Setup, corpus: Corpus) -> list[dict]:
    """The same training with flash_ext and with standard attention."""
    runs, held_out = {}, {}
    for name in ("standard", "flash_ext"):
        training = Training(setup, corpus, name, setup.batch, setup.context)
        runs[name] = train(training, setup.steps, name)
        held_out[name] = training.held_out_loss()
        if name == "flash_ext":
            sample = training.sample("def ", 300)
        del training

    difference = max(abs(a - b) for a, b in zip(runs["flash_ext"].losses, runs["standard"].losses, strict=True))
    print(f"\nA sample after {setup.steps} steps:\n{sample}\n")
    for name, run in runs.items():
        memory = f", peak memory {run.peak_mib / 1024:.2f} GiB" if run.peak_mib else ""
        print(
            f"{name:9}  training loss {run.losses[-1]:.4f}, held-out loss {held_out[name]:.4f} nats per byte, "
            f"{run.seconds * 1e3:.1f} ms a step{memory}"
        )
    print(f"The loss curves differ by at most {difference:.2g} over {setup.steps} steps.")

    shape = row_of(setup, setup.batch, setup.context)
    losses = {name: [round(loss, 5) for loss in run.losses] for name, run in runs.items()}
    rows = [
        {
            **shape,
            "work": "train",
            "case": "loss",
            "loss": losses,
            "loss_difference": difference,
            "held_out": held_out,
            "seconds": {name: run.seconds for name, run in runs.items()},
        }
    ]
    if setup.device.type == "cuda":
        peaks = {name: run.peak_mib for name, run in runs.items()}
        rows.append({**shape, "work": "memory", "case": "loss", "mib": peaks})
    return rows


def compare_contexts(setup: Setup, corpus: Corpus, steps: int) -> list[dict]:
    """Step time and peak memory of one sequence of growing length, until memory runs out."""
    rows, full = [], set()
    for context in setup.contexts:
        seconds, peaks = {}, {}
        for name in ATTENTION:
            if name in full:
                continue
            torch.cuda.empty_cache()
            try:
                with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                    run = train(Training(setup, corpus, name, 1, context), steps, name)
            except torch.OutOfMemoryError:
                full.add(name)
                print(f"{name:9} context {context}: out of memory")
                continue
            seconds[name], peaks[name] = run.seconds, run.peak_mib
        shape = row_of(setup, 1, context)
        rows.append({**shape, "work": "train", "case": "context", "seconds": seconds})
        rows.append({**shape, "work": "memory", "case": "context", "mib": peaks})

    print(f"\n{'context':>8}" + "".join(f"{name:>24}" for name in ATTENTION))
    for train_row, memory_row in zip(rows[::2], rows[1::2], strict=True):
        cells = [
            f"{train_row['seconds'][name] * 1e3:9.1f} ms {memory_row['mib'][name] / 1024:7.2f} GiB"
            if name in train_row["seconds"]
            else "out of memory"
            for name in ATTENTION
        ]
        print(f"{train_row['seqlen']:>8}" + "".join(f"{cell:>24}" for cell in cells))
    return rows


def row_of(setup: Setup, batch: int, context: int) -> dict:
    """The fields that bench/results shares among all rows."""
    config = setup.config
    shape = (batch, context, config.num_heads, config.head_dim)
    q = torch.empty(shape, device=setup.device, dtype=torch.bfloat16 if setup.dtype == "bf16" else torch.float32)
    return {
        "arch_path": flash_ext.explain(q, q, q, causal=True).path,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "dtype": setup.dtype,
        "head_dim": config.head_dim,
        "causal": True,
        "batch": batch,
        "seqlen": context,
        "num_heads": config.num_heads,
        "num_heads_kv": config.num_heads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of the comparison of losses")
    parser.add_argument("--contexts", type=int, nargs="*", help="context lengths of the second part (GPU only)")
    parser.add_argument("--context-steps", type=int, default=4, help="steps at each of them")
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"))
    options = parser.parse_args()

    setup = setup_for(torch.device(options.device))
    setup.steps = options.steps or setup.steps
    if options.contexts is not None:
        setup.contexts = tuple(options.contexts)
    corpus = Corpus(setup.device)
    print(
        f"{len(corpus.train) / 1e6:.1f} MB of Python's own sources to train on, "
        f"{len(corpus.held_out) / 1e6:.1f} MB held out; {setup.config}; {setup.dtype} on {setup.device}"
    )

    rows = compare_losses(setup, corpus)
    if setup.contexts:
        rows += compare_contexts(setup, corpus, options.context_steps)

    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if setup.device.type == "cuda" else "cpu"
    (options.out / "results.json").write_text(json.dumps({"gpu": gpu, "rows": rows}) + "\n")
    try:
        from plots import draw

        drawn = draw(rows, options.out)
    except ImportError:
        drawn = []
        print("matplotlib is not installed: no plots")
    print("\nWritten:", *[options.out / "results.json", *drawn], sep="\n  ")


if __name__ == "__main__":
    main()
