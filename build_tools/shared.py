"""flash_ext/_build.py as a module of its own: `import flash_ext` needs the torch that a build is still looking for."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_spec = importlib.util.spec_from_file_location("_flash_ext_build", ROOT / "flash_ext" / "_build.py")
build = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = build  # dataclasses look their module up
_spec.loader.exec_module(build)

BuildError = build.BuildError
