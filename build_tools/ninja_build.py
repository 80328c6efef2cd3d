"""Compile and link flash_ext._C: one ninja file, each kernel only for the architectures that it has code for."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .environment import Torch, find_compiler, find_torch, parallel_jobs, python_include
from .shared import ROOT, BuildError, build

# CPU seconds of one file on one core, the kernels for one architecture; only for the estimate that is printed.
SECONDS = {"cpp": 8, "attn": 3, "simt": 11, "sm80": 12, "sm90": 18}

FACTS = "_build_facts.json"  # beside _C: what it was built with

_RULES = """
rule cxx
  command = {cxx} -MMD -MF $out.d $flags -c $in -o $out
  description = $in
  depfile = $out.d
  deps = gcc
rule cuda
  command = {nvcc} -ccbin {cxx} -MMD -MF $out.d $flags -c $in -o $out > $out.log 2>&1 || {{ cat $out.log; exit 1; }}
  description = $in ($archs)
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} -shared -o $out $in $flags
  description = $out
"""


@dataclass(frozen=True)
class Plan:
    """Everything that decides a build. `toolkit` None or no `archs`: the CPU part alone, and `why` says why."""

    torch: Torch
    toolkit: object | None
    archs: list[str]
    compiler: str
    why: str

    @property
    def folder(self) -> Path:
        python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        return ROOT / "build" / "-".join([python, f"torch{self.torch.version}", *(self.archs or ["cpu"])])

    @property
    def kernels(self) -> list[Path]:
        return [f for f in build.kernel_sources() if build.archs_of(f, self.archs)] if self.archs else []


def make_plan() -> Plan:
    torch = find_torch()
    compiler = find_compiler()
    archs = build.architectures([tuple(c) for c in torch.capabilities])
    why, toolkit = "", None
    if not archs:
        why = "FLASH_EXT_ARCHS=none asked for it"
    elif torch.cuda is None:
        why, archs = f"torch {torch.version} is a CPU-only build", []
    else:
        toolkit = build.find_toolkit(torch.cuda)
        if toolkit is None:
            why, archs = "no CUDA toolkit (nvcc and cuda_runtime_api.h) was found; set CUDA_HOME to one", []
    return Plan(torch, toolkit, archs, compiler, why)


def announce(plan: Plan, say=print) -> int:
    """Say what will be built and how long it may take; returns the number of parallel jobs."""
    files = len(build.cpp_sources()) + len(plan.kernels)
    jobs = parallel_jobs(files)
    seconds = SECONDS["cpp"] * len(build.cpp_sources())
    seconds += sum(
        SECONDS.get(f.parent.name, SECONDS["sm90"]) * len(build.archs_of(f, plan.archs)) for f in plan.kernels
    )
    what = f"the CPU part alone: {plan.why}"
    if plan.archs:
        what = f"CUDA kernels for {', '.join(plan.archs)} with {plan.toolkit}"
    say(f"flash_ext: building {what}, against torch {plan.torch.version}")
    say(f"flash_ext: {files} files, {jobs} jobs, about {max(1, round(seconds / jobs / 60))} min")
    return jobs


def _quote(flags: list[str]) -> str:
    return shlex.join(flags).replace("$", "$$")


def _path(path: Path | str) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))  # as ninja reads paths


def write_ninja(plan: Plan) -> Path:
    folder = plan.folder
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = plan.toolkit.nvcc if plan.toolkit else "nvcc"
    text = [_RULES.format(cxx=shlex.quote(plan.compiler), nvcc=shlex.quote(str(nvcc)))]
    objects = []

    def add(rule: str, source: Path, flags: list[str], **variables: str) -> None:
        out = _path(f"{source.relative_to(build.CSRC)}.o")
        extra = "".join(f"  {key} = {value}\n" for key, value in variables.items())
        text.append(f"build {out}: {rule} {_path(source)}\n  flags = {_quote(flags)}\n{extra}")
        objects.append(out)

    cxx = [*build.cxx_flags(), "-fPIC", "-fvisibility=hidden", "-pthread"]
    # torch's headers as system headers: their warnings are not ours.
    system = [f"-isystem{path}" for path in (*plan.torch.include, python_include())]
    for source in build.cpp_sources():
        torch_flags = [*system, "-DTORCH_EXTENSION_NAME=_C", f"-D_GLIBCXX_USE_CXX11_ABI={plan.torch.abi}"]
        add("cxx", source, cxx + (torch_flags if source.name == "binding.cpp" else []))
    for source in plan.kernels:
        archs = build.archs_of(source, plan.archs)
        flags = [*build.nvcc_flags(), "-Xptxas=-v", "-Xcompiler=-fvisibility=hidden", *build.gencode(archs)]
        add("cuda", source, flags, archs=",".join(archs))

    libraries = [f"-L{plan.torch.lib}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-ldl", "-pthread"]
    if plan.archs:
        # torch's own CUDA runtime, already loaded when _C is: one runtime means one current device.
        root = plan.toolkit.root
        libraries += [plan.torch.cudart] if plan.torch.cudart else [f"-L{root}/lib64", f"-L{root}/lib", "-lcudart"]
    text.append(f"build _C.so: link {' '.join(objects)}\n  flags = {_quote(libraries)}")
    path = folder / "build.ninja"
    path.write_text("\n".join(text) + "\n")
    return path


def run(plan: Plan, library: Path, say=print) -> None:
    """Build `library` (flash_ext/_C.*.so) and write down beside it what it was built with."""
    jobs = announce(plan, say)
    ninja_file = write_ninja(plan)
    result = subprocess.run([build.find_ninja(), "-f", str(ninja_file), "-C", str(plan.folder), f"-j{jobs}"])
    if result.returncode != 0:
        raise BuildError("A file did not compile or link; the compiler's message stands above (pip shows it with -v).")
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(plan.folder / "_C.so", library)
    facts = {
        "torch": plan.torch.version,
        "cuda": plan.torch.cuda,
        "toolkit": str(plan.toolkit) if plan.toolkit else None,
        "archs": plan.archs,
        "folder": str(plan.folder),
        "contract": build.contract(),
        "cpu_only_because": plan.why,
    }
    (library.parent / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    if not plan.archs:
        say(f"flash_ext: CPU part built, NO CUDA kernels: {plan.why}")
