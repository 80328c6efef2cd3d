#!/bin/sh
# make_env.sh PYTHON VENV: a virtual environment with torch and what a build needs.
# If PYTHON itself can import torch, that torch is used (through a .pth file), else one is installed from pip.
set -eu
python=$1
venv=$2

say() { printf 'flash_ext: %s\n' "$*"; }
die() { printf '\nflash_ext: %s\n\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || die "'$python' was not found. Install Python 3.10 or newer, or: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$("$python" --version) is too old; 3.10 or newer is needed: make PYTHON=..."

if [ ! -x "$venv/bin/python" ]; then
  say "creating $venv"
  # Debian keeps ensurepip in python3-venv; without it the caller's pip installs one into the environment.
  if ! "$python" -m venv "$venv" 2>/dev/null; then
    rm -rf "$venv"
    "$python" -m venv --without-pip "$venv" || die "python's venv module does not work (Debian: apt-get install python3-venv)"
    "$python" -m pip --python "$venv/bin/python" install -q pip || die "no pip (Debian: apt-get install python3-venv python3-pip)"
  fi
fi
bin=$venv/bin

if ! "$bin/python" -c 'import torch' 2>/dev/null; then
  site=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)' 2>/dev/null || true)
  if [ -n "$site" ]; then
    say "using the torch in $site"
    echo "$site" > "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torch_of_caller.pth"
  else
    say "installing ${TORCH:-torch} with pip (some GB; TORCH=torch==x.y chooses another)"
    "$bin/python" -m pip install -q "${TORCH:-torch}" || die "pip could not install ${TORCH:-torch}. Install torch yourself, then: make PYTHON=<the python that has it>"
  fi
  "$bin/python" -c 'import torch' || die "torch is installed but cannot be imported (see above)"
fi

# What a build without isolation needs (the [build-system] table of pyproject.toml), and numpy for torch.
missing=
"$bin/python" -c 'import setuptools; assert int(setuptools.__version__.split(".")[0]) >= 77' 2>/dev/null || missing="setuptools>=77"
for name in ninja numpy; do
  "$bin/python" -c "import $name" 2>/dev/null || missing="$missing $name"
done
[ -z "$missing" ] || "$bin/python" -m pip install -q $missing || die "pip could not install $missing"
say "$("$bin/python" -c 'import torch, sys; print("Python", sys.version.split()[0], "torch", torch.__version__, "in", sys.prefix)')"
