"""All that has to run on a GPU before kernels are called right: tests, compute-sanitizer, random problems, soak.

    python tests/gpu_checks.py --out checks                     every group; minutes on one GPU with 16 cores
    python tests/gpu_checks.py --out checks tests memcheck      some of them

Each check is a process of its own with a time limit and a log in ``--out``. Tests and sanitizers run side by side, then
random problems, then what needs the device for itself; the soak beside all of it. The table at the end has each
log's last word. Exit status 1 if a check failed or ran out of time; racecheck's reports are counted, not judged:
bench/NOTES.md explains those that are known.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD_DIMS = ("64", "96", "128", "192", "256")
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
TOOLS = ("memcheck", "synccheck", "racecheck")
GROUPS = ("tests", *TOOLS, "random", "soak", "alone")


@dataclass(frozen=True)
class Check:
    group: str
    name: str
    command: tuple[str, ...]
    limit: float  # seconds

    @property
    def log(self) -> str:
        return f"{self.group}_{self.name}.log"


@dataclass(frozen=True)
class Outcome:
    check: Check
    status: int | None  # None: out of time
    seconds: float
    last: str  # what the check says of itself

    @property
    def failed(self) -> bool:
        return self.status != 0

    def __str__(self) -> str:
        end = "out of time" if self.status is None else "failed" if self.status else "ok"
        return f"{self.check.group:10} {self.check.name:12} {end:12} {self.seconds:5.0f} s  {self.last}"


def tests(shares: int) -> Iterator[Check]:
    for i in range(shares):
        words = ("-m", "pytest", "-q", "-m", "gpu and not alone", f"--share={i}/{shares}", "-p", "no:cacheprovider")
        yield Check("tests", str(i), (sys.executable, *words), 400)


def sanitizers() -> Iterator[Check]:
    # What racecheck follows costs it seconds, so it gets one head_dim and one 16-bit dtype at a time.
    parts = {path: ("--path", path) for path in ("sm80", "simt")}
    parts["sm90"] = ("--path", "sm90", "--dtype", "bf16", "fp16")
    parts["fp8"] = ("--path", "sm90", "--dtype", "e4m3")
    for tool in ("memcheck", "synccheck"):
        for name, words in parts.items():
            yield sanitizer(tool, name, words)
    for path in ("sm80", "sm90"):
        for head_dim in HEAD_DIMS:
            name = f"{path}_{head_dim}"
            yield sanitizer("racecheck", name, ("--path", path, "--dtype", "bf16", "--head-dim", head_dim))
    for name, words in {"fp8": parts["fp8"], "tf32": ("--path", "sm80", "--dtype", "fp32")}.items():
        yield sanitizer("racecheck", name, words)
    for head_dim in ("64", "128", "256"):
        words = ("--path", "simt", "--dtype", "fp32", "bf16", "--head-dim", head_dim)
        yield sanitizer("racecheck", f"simt_{head_dim}", words)


def sanitizer(tool: str, name: str, words: tuple[str, ...]) -> Check:
    judged = () if tool == "racecheck" else ("--error-exitcode", "9")
    command = (SANITIZER, "--tool", tool, "--kernel-name", "kns=flash", *judged, sys.executable, "tests/sanitize.py")
    return Check(tool, name, (*command, *words), 300)


def random_problems(count: int, seed: int, jobs: int) -> Iterator[Check]:
    parts = {path: ("--path", path) for path in ("simt", "sm80", "sm90")}
    parts["fp8"] = ("--path", "sm90", "--float8", "--pass", "fwd")
    for name, words in parts.items():
        more = ("--count", str(count), "--seed", str(seed), "--jobs", str(jobs))
        yield Check("random", name, (sys.executable, "tests/random_configs.py", *words, *more), 400)


def soak(seconds: int) -> Check:
    return Check("soak", "auto", (sys.executable, "tests/soak.py", "--seconds", str(seconds)), seconds + 120)


def alone() -> Check:
    words = ("-m", "pytest", "-q", "-m", "gpu and alone", "-p", "no:cacheprovider")
    return Check("alone", "tests", (sys.executable, *words), 120)


def run(check: Check, out: Path) -> Outcome:
    start = time.monotonic()
    with (out / check.log).open("w") as log:
        # A session of its own: what outlives its time is ended with all that it started.
        process = subprocess.Popen(
            check.command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            status = process.wait(check.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    outcome = Outcome(check, status, time.monotonic() - start, last_word((out / check.log).read_text(errors="replace")))
    print(outcome, flush=True)
    return outcome


def last_word(log: str) -> str:
    """The summary of pytest, of compute-sanitizer, or of a script: the last line that says something."""
    lines = [line.strip("= ") for line in log.splitlines() if line.strip("= ")]
    summaries = [line for line in lines if "SUMMARY" in line]
    return (summaries or lines or ["(nothing)"])[-1][:100]


def run_all(stages: list[list[Check]], beside: list[Check], side_by_side: int, out: Path) -> list[Outcome]:
    """One stage after another, the checks of a stage side by side; `beside` from the start to the last stage but one."""
    outcomes = []
    with ThreadPoolExecutor(max(1, len(beside))) as background:
        running = [background.submit(run, check, out) for check in beside]
        for stage in stages[:-1]:
            with ThreadPoolExecutor(side_by_side) as pool:
                outcomes += pool.map(lambda check: run(check, out), stage)
        outcomes += [future.result() for future in running]
    return outcomes + [run(check, out) for check in stages[-1]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", nargs="*", help=f"of: {' '.join(GROUPS)} (default all)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the logs")
    parser.add_argument("--count", type=int, default=10000, help="of random problems on each path")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of them (default: another one each time)")
    parser.add_argument("--soak", type=int, default=120, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="processes side by side")
    options = parser.parse_args(arguments)
    if wrong := set(options.group) - set(GROUPS):
        parser.error(f"group must be of {', '.join(GROUPS)}, got {', '.join(sorted(wrong))}")

    wanted = options.group or GROUPS
    if set(wanted) & set(TOOLS) and not Path(SANITIZER).exists():
        parser.error(f"compute-sanitizer is not on PATH, nor {SANITIZER}: choose among the other groups")
    jobs = max(1, options.jobs // 8)  # of each of the four kinds of random problems
    stages = [
        [*sanitizers(), *tests(max(1, options.jobs // 2))],
        [*random_problems(options.count, options.seed, jobs)],
        [alone()],
    ]
    stages = [[check for check in stage if check.group in wanted] for stage in stages]
    beside = [soak(options.soak)] if "soak" in wanted else []
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(stages, beside, options.jobs, options.out)
    print("", *sorted(map(str, outcomes)), sep="\n")
    failed = sum(outcome.failed for outcome in outcomes)
    print(f"\n{len(outcomes)} checks, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
