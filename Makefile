# make demo    set everything up, then train a small GPT with flash_ext's attention
# make test    set everything up, then every check: C++ tests, linters, spills of kernels (none but the listed), Python tests
# make lint / format / bench
#
# make PYTHON=python3.12 ...   another Python (its torch is used if it has one);   make VENV=... another environment

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
CXX_FILES = $(shell find csrc tests examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test install ctest lint format kernels pytest bench clean
.NOTPARALLEL:

demo: install
	$(BIN)/python -m pip install -q -r examples/requirements.txt
	$(BIN)/python examples/train_gpt.py

test: install ctest lint kernels pytest

$(VENV)/.ready: build_tools/make_env.sh
	@build_tools/make_env.sh $(PYTHON) $(VENV)
	@touch $@

install: $(VENV)/.ready
	$(BIN)/python -m pip install -v --no-build-isolation --no-deps -e .

$(VENV)/.dev: $(VENV)/.ready requirements-dev.txt
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	@touch $@

ctest: $(VENV)/.dev
	cmake -S . -B build/cmake -G Ninja -DFLASH_EXT_CUDA=OFF -DFLASH_EXT_WERROR=$(or $(FLASH_EXT_WERROR),OFF)
	cmake --build build/cmake
	ctest --test-dir build/cmake --output-on-failure

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: install $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/python -m build_tools.readme --write

kernels: install
	$(BIN)/python -m bench.bench_build --check

pytest: $(VENV)/.dev
	$(BIN)/python -m pytest --durations=10

bench: install $(VENV)/.dev
	$(BIN)/python -m bench

clean:
	rm -rf build dist *.egg-info flash_ext/_C*.so flash_ext/_build_facts.json
