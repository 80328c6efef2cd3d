"""The rules of the code base that a machine can keep (CONTRIBUTING.md has all of them)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp"))
KERNEL_FILES = sorted(p for p in CSRC.rglob("*.cu") if p.parent.name != "attn")
PYTHON_FOLDERS = ("flash_ext", "build_tools", "bench", "examples", "tests")
PYTHON = [ROOT / "setup.py", *sorted(p for folder in PYTHON_FOLDERS for p in (ROOT / folder).rglob("*.py"))]

# A file may include files of its own folder and of these. "" is csrc/ itself.
MAY_INCLUDE = {"ptx": set(), "attn": {"ptx"}} | {arch: {"attn", "ptx"} for arch in ("sm90", "sm80", "simt", "cpu")}
CONTRACT = {"params.h", "instances.h", "registry.h", "check.h"}
MAY_INCLUDE_OF_THE_TOP = {"ptx": {"check.h", "params.h"}, "cpu": CONTRACT | {"api.h"}}  # cpu is a part of api.h
INCLUDED_MANY_TIMES = {"tile_ops_simd.h"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def includes(path: Path) -> list[tuple[str, str]]:
    """(kind, name): kind is " for project files, < for others."""
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_includes_go_one_way(path):
    layer = path.parent.name if path.parent != CSRC else ""
    for kind, name in includes(path):
        if kind == "<":
            continue
        beside = (path.parent / name).resolve()
        target = beside if beside.is_file() else (CSRC / name).resolve()
        assert target.is_file(), f"{name} does not exist"
        target_layer = target.parent.name if target.parent != CSRC else ""
        if target_layer == layer:
            continue
        if target_layer == "":
            assert target.name in MAY_INCLUDE_OF_THE_TOP.get(layer, CONTRACT), f"{layer} includes {name}"
        else:
            assert target_layer in MAY_INCLUDE.get(layer, set()), f"{layer or 'csrc'} includes {name}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_torch_is_seen_by_the_binding_alone(path):
    foreign = ("torch/", "ATen/", "c10/", "pybind11/", "cute/", "cutlass/")
    if path.stem.partition("_")[0] != "binding":
        assert not [name for _, name in includes(path) if name.startswith(foreign)]
    assert "torch/extension.h" not in [name for _, name in includes(path)]  # 80 seconds


def test_translation_units_have_unique_names():
    stems = [path.stem for path in SOURCES if path.suffix in (".cu", ".cpp")]
    assert len(stems) == len(set(stems))


@pytest.mark.parametrize("path", KERNEL_FILES, ids=relative)
def test_kernel_files_name_pass_and_architecture(path):
    assert re.fullmatch(rf"(fwd|bwd|dbias)_{path.parent.name}(_\w+)?", path.stem)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_headers_are_guarded_and_nothing_prints_or_exits(path):
    text = re.sub(r"//.*", "", path.read_text())
    if path.suffix in (".h", ".cuh") and path.name not in INCLUDED_MANY_TIMES:
        assert "#pragma once" in text
    assert not re.search(r"\b(printf|fprintf|abort|exit)\s*\(|std::c(out|err)\b", text)
    assert "using namespace" not in text


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_architecture_guards_are_in_kernels_or_choose_an_instruction(path):
    """Whole files behind #if vanish without a word where the architecture is missing."""
    text = path.read_text()
    bodies = re.findall(r"#\s*if[^\n]*__CUDA_ARCH[^\n]*\n(.*?)#\s*endif", text, re.DOTALL)
    long_ones = [body for body in bodies if body.count("\n") > 10]
    assert len(long_ones) <= text.count("__global__"), long_ones


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_global_functions_are_tables_of_contents(path):
    text = path.read_text()
    for match in re.finditer(r"__global__[^;{]*\{", text):
        end = closing(text, match.end(), "{", "}")
        lines = text[match.start() : end].count("\n") + 1
        assert lines <= 60, f"a __global__ function of {lines} lines"


@pytest.mark.parametrize("path", [*SOURCES, *PYTHON], ids=relative)
def test_files_stay_short(path):
    assert path.read_text().count("\n") <= 300


def closing(text: str, begin: int, opening: str, closing: str) -> int:
    """Behind the bracket that closes the one before `begin`."""
    depth, end = 1, begin
    while depth:
        depth += {opening: 1, closing: -1}.get(text[end], 0)
        end += 1
    return end


def templates(text: str) -> list[tuple[list[str], str]]:
    """(names of the parameters, declaration) of every template."""
    text = re.sub(r"//.*", "", text)
    found = []
    for match in re.finditer(r"\btemplate\s*<", text):
        end = closing(text, match.end(), "<", ">")
        parameters = re.sub(r"<[^<>]*>", "", text[match.end() : end - 1]).split(",")
        names = [re.findall(r"\w+", parameter.split("=")[0])[-1] for parameter in parameters if parameter.strip()]
        found.append((names, re.split(r"[{;]", text[end:], maxsplit=1)[0]))
    return found


# What names a kernel's row, and the pieces in which Ampere's warps add up dq.
LONGER_TEMPLATES = {"FwdTraits": 5, "BwdTraits": 5, "BwdPairTraits": 5, "Traits": 4, "DqPieces": 4}


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_few_template_parameters(path):
    """Three that a caller chooses; what a function's arguments deduce comes on top."""
    for names, declaration in templates(path.read_text()):
        arguments = re.sub(r"__launch_bounds__\s*\([^()]*\)", "", declaration).partition("(")[2]
        chosen = [name for name in names if not re.search(rf"\b{name}\b", arguments)]
        struct = re.match(r"\s*struct (\w+)", declaration)
        assert len(chosen) <= LONGER_TEMPLATES.get(struct[1] if struct else "", 3), declaration


@pytest.mark.parametrize("path", [*SOURCES, *PYTHON], ids=relative)
def test_nothing_is_left_for_later(path):
    if path.name != "test_layering.py":
        assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())


def test_pure_modules_do_not_import_torch():
    """dispatch decides without torch; _build runs before torch is there."""
    for name in ("dispatch.py", "_build.py"):
        text = (ROOT / "flash_ext" / name).read_text()
        assert not re.search(r"^\s*(import|from) torch", text, re.MULTILINE)


def test_python_layers_go_one_way():
    """From the pure ones to the public ones; the build files stand apart."""
    order = [
        "dispatch",
        "reference",
        "tolerance",
        "jit",
        "numeric",
        "call",
        "extension",
        "reference_path",
        "autograd",
        "plan",
    ]
    order += ["ops", "float8", "explain", "interface", "flash_attn", "testing"]
    for name in order:
        text = (ROOT / "flash_ext" / f"{name}.py").read_text()
        modules = re.findall(r"^from \.(\w+) import", text, re.MULTILINE)
        modules += [
            m.strip() for line in re.findall(r"^from \. import (.+)", text, re.MULTILINE) for m in line.split(",")
        ]
        for module in modules:
            if module in order:
                assert order.index(module) < order.index(name), f"{name} imports {module}"


def test_no_build_output_is_tracked():
    result = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    assert not [name for name in result.stdout.split() if name.endswith((".so", ".o", ".cubin", ".ptx"))]
