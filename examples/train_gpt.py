"""Trains a byte-level GPT on real text with flash_ext, and the same model with standard attention and torch's SDPA.

    python examples/train_gpt.py                         on a GPU if there is one, else on the CPU in a few minutes
    python examples/train_gpt.py --steps 500 --contexts  only the comparison of losses, longer

All start from the same weights and see the same batches, so their losses must agree: exactly but for rounding, which
every step of a 16-bit training amplifies, so flash_ext and SDPA may differ from standard attention alike. On a GPU it
then trains at growing context lengths and shows step time and peak memory. Results and plots go to runs/train_gpt.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import train_results
from attention import ATTENTION, best_of_torch
from corpus import Corpus
from gpt import GPT, Config
from tqdm import tqdm
from train_results import Run


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
    tokens: int = 32768  # of a step there, or one sequence if that is longer

    def batch_at(self, context: int) -> int:
        return max(1, self.tokens // context)

    @property
    def dtype(self) -> str:
        return "bf16" if self.device.type == "cuda" else "fp32"


def setup_for(device: torch.device) -> Setup:
    if device.type == "cuda":
        config = Config(num_layers=6, num_heads=8, head_dim=128)
        # Above 3e-4 the loss has spikes, and then any rounding decides where.
        return Setup(device, config, 16, 2048, 200, 2e-4, (2048, 8192, 32768, 131072))
    return Setup(device, Config(num_layers=4, num_heads=4, head_dim=32), 8, 256, 150, 2e-3, ())


class Training:
    """One model, its optimiser and its batches; the same for the same seed, but for what computes attention."""

    def __init__(self, setup: Setup, corpus: Corpus, attention: str, batch: int, context: int):
        torch.manual_seed(0)
        self.setup, self.corpus, self.batch, self.context = setup, corpus, batch, context
        with setup.device:  # drawing the first weights on the device takes no time
            self.model = GPT(setup.config, ATTENTION[attention])
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95), fused=True
        )

    @contextmanager
    def precision(self):
        device = self.setup.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.setup.dtype == "bf16"), best_of_torch(device):
            yield

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
    """The same training with each attention."""
    runs = {}
    for name in ATTENTION:
        training = Training(setup, corpus, name, setup.batch, setup.context)
        runs[name] = train(training, setup.steps, name)
        runs[name].held_out = training.held_out_loss()
        if name == "flash_ext":
            print(f"\nA sample after {setup.steps} steps with flash_ext:\n{training.sample('def ', 300).rstrip()}\n")
    print(train_results.describe_losses(runs))
    return train_results.loss_rows(setup, runs)


def compare_contexts(setup: Setup, corpus: Corpus, steps: int) -> Iterator[list[dict]]:
    """Step time and peak memory at growing context lengths, each attention until memory runs out."""
    still_fit = list(ATTENTION)
    for context in setup.contexts:
        runs = {}
        for name in list(still_fit):
            torch.cuda.empty_cache()
            try:
                runs[name] = train(Training(setup, corpus, name, setup.batch_at(context), context), steps, name)
            except torch.OutOfMemoryError:
                still_fit.remove(name)
        print(train_results.describe_context(context, runs, list(ATTENTION)))
        yield train_results.context_rows(setup, context, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="of the comparison of losses")
    parser.add_argument("--contexts", type=int, nargs="*", help="context lengths of the second part (GPU only)")
    parser.add_argument("--context-steps", type=int, default=6, help="steps at each of them")
    parser.add_argument("--out", type=Path, default=Path("runs/train_gpt"))
    options = parser.parse_args()
    if min(options.steps or 1, options.context_steps, *(options.contexts or ())) < 1:
        parser.error("--steps, --context-steps and --contexts must be positive")

    setup = setup_for(torch.device(options.device))
    setup.steps = options.steps or setup.steps
    if options.contexts is not None:
        setup.contexts = tuple(options.contexts)
    corpus = Corpus(setup.device)
    print(
        f"{len(corpus.train) / 1e6:.1f} MB of Python's own sources to train on, "
        f"{len(corpus.held_out) / 1e6:.1f} MB held out; {setup.config}, "
        f"{train_results.parameters_of(setup.config) / 1e6:.1f} M parameters; {setup.dtype} on {setup.device}"
    )

    rows = compare_losses(setup, corpus)
    results = train_results.write(rows, options.out)
    for more in compare_contexts(setup, corpus, options.context_steps):
        rows += more
        results = train_results.write(rows, options.out)
    print("\nWritten:", results, *train_results.draw_plots(rows, options.out), sep="\n  ")


if __name__ == "__main__":
    main()
