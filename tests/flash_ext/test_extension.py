"""The stub of the extension, and the path that a context asks for."""

from __future__ import annotations

import ast
import contextvars
from pathlib import Path

import pytest

import flash_ext
from flash_ext import extension, jit


def test_the_stub_names_what_the_extension_has():
    stub = ast.parse(Path(extension.__file__).with_name("_C.pyi").read_text())
    named = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert named == {name for name in dir(jit.extension()) if not name.startswith("_")}


def test_a_path_holds_for_its_context_alone():
    with flash_ext.use_path("cpu"):
        with flash_ext.use_path("reference"):
            assert extension.current_path() == "reference"
        assert extension.current_path() == "cpu"
        assert contextvars.Context().run(extension.current_path) == ""
    with pytest.raises(ValueError, match="path must be one of"), flash_ext.use_path("gpu"):
        pass
    assert extension.current_path() == ""
