"""Builds flash_ext._C; everything else about the package stands in pyproject.toml."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from setuptools import Extension, __version__, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # setuptools.build_meta leaves it out
from build_tools import ninja_build  # noqa: E402
from build_tools.environment import check_setuptools  # noqa: E402
from build_tools.shared import BuildError  # noqa: E402


def say(line: str) -> None:
    """pip hides what a build prints: the lines that a waiting user needs go to the terminal too, if there is one."""
    print(line, flush=True)
    if not sys.stdout.isatty():
        try:
            with open("/dev/tty", "w") as terminal:
                print(line, file=terminal)
        except OSError:
            pass


@contextmanager
def readable_errors() -> Iterator[None]:
    try:
        yield
    except BuildError as error:
        sys.exit(f"\nflash_ext was not built: {error}\n")


class BuildExt(build_ext):
    def build_extension(self, ext: Extension) -> None:
        with readable_errors():
            ninja_build.run(ninja_build.make_plan(), Path(self.get_ext_fullpath(ext.name)).absolute(), say)

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        shutil.copy(Path(self.build_lib) / "flash_ext" / ninja_build.FACTS, ROOT / "flash_ext")


class BuildPy(build_py):
    """A wheel carries the C++ and CUDA sources, so that kernels it was built without can be compiled on first use."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(ROOT / "csrc", Path(self.build_lib) / "flash_ext" / "csrc", dirs_exist_ok=True)


with readable_errors():
    check_setuptools(__version__)
setup(ext_modules=[Extension("flash_ext._C", sources=[])], cmdclass={"build_ext": BuildExt, "build_py": BuildPy})
