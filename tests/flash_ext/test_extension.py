"""The stub of the extension, and the path that a context asks for."""

from __future__ import annotations

import ast
import contextvars
import re
from pathlib import Path

import pytest

import flash_ext
from flash_ext import extension, jit

STUB = ast.parse(Path(extension.__file__).with_name("_C.pyi").read_text()).body


def public(x: object) -> set[str]:
    return {name for name in dir(x) if not name.startswith("_")}


def parameters(function: object) -> list[str]:
    """Of a function of pybind11, whose first line of documentation is its signature: "f(arg0: int) -> int"."""
    return re.findall(r"\b(arg\d+|self): ", function.__doc__.splitlines()[0])


def test_the_stub_names_what_the_extension_has():
    module = jit.extension()
    names = {node.name for node in STUB if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.target.id for node in STUB if isinstance(node, ast.AnnAssign)}
    assert names == public(module)
    for node in STUB:
        if isinstance(node, ast.FunctionDef) and node.name != "eager":  # which is none of pybind11's
            assert len(node.args.args) == len(parameters(getattr(module, node.name))), node.name


@pytest.mark.parametrize("node", [node for node in STUB if isinstance(node, ast.ClassDef)], ids=lambda node: node.name)
def test_the_stub_has_the_members_of_each_class(node):
    kind = getattr(jit.extension(), node.name)
    inherited = set().union(*(public(base) for base in kind.__bases__))
    fields = {member.target.id for member in node.body if isinstance(member, ast.AnnAssign)}
    methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef) and m.name != "__init__"}
    assert fields | set(methods) == public(kind) - inherited
    for name, method in methods.items():
        assert len(method.args.args) == len(parameters(getattr(kind, name))), name


def test_a_path_holds_for_its_context_alone():
    with flash_ext.use_path("cpu"):
        with flash_ext.use_path("reference"):
            assert extension.current_path() == "reference"
        assert extension.current_path() == "cpu"
        assert contextvars.Context().run(extension.current_path) == ""
    with pytest.raises(ValueError, match="path must be one of"), flash_ext.use_path("gpu"):
        pass
    assert extension.current_path() == ""
