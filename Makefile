# From a clean clone, with Python >= 3.11, a C compiler and make:
#
#   make demo      train a small model, export and verify it, generate text
#   make vision    train two models on pictures, export and verify them, try them on new pictures
#   make test      the C tests and the Python tests; TESTS=tests/test_chat.py: of these one file
#   make lint      formatting, lint and types          make format   rewrite the formatting
#   make sanitize  tests under ASan and UBSan          make coverage coverage of the parsers
#   make clients   third-party clients, and random requests, against the server
#   make ray       the examples for many machines      make bench    measure the speed at 2B scale
#   make versus    other trainers, for comparison      make clean    back to a clean clone
#
# Everything is created in .venv and build. PYTHON=python3.12 chooses the interpreter.

MAKEFLAGS += --no-print-directory
PYTHON ?= python3
BIN := .venv/bin
JOBS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PARSERS := hf gguf packed tokens readers convert export
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal
export PIP_USER := 0# in .venv pip refuses what its configuration may ask for: the user's own folder
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
C_FILES = $(shell find runtime_c -name '*.[ch]')
SOURCES := CMakeLists.txt $(shell find runtime_c/src runtime_c/include bitnet bitnet_cli export \
             python_bindings -name '*.[ch]' -o -name '*.py')

.NOTPARALLEL: # one pip at a time; its builds use all cores

.PHONY: help demo vision test clients ray versus lint format sanitize coverage bench clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

MINUTES ?= 4
demo: .venv/demo
	rm -rf build/demo
	$(BIN)/bitnet train --preset tiny --minutes $(MINUTES) --out build/demo/run
	$(BIN)/bitnet export build/demo/run build/demo/model.bitnet
	$(BIN)/python python_bindings/examples/demo.py build/demo/model.bitnet

# Pictures drawn by the project itself; the unseen ones have combinations that training lacks.
# LOOKING and ANSWERING: minutes of the two trainings.
LOOKING ?= 2.25
ANSWERING ?= 6
PICTURES := build/vision/pictures
UNSEEN := build/vision/unseen
vision: .venv/demo
	rm -rf build/vision
	$(BIN)/python -m bitnet.data.drawn $(PICTURES) --n 20000 --seed 1
	$(BIN)/python -m bitnet.data.drawn $(UNSEEN) --n 240 --seed 2 --held-out
	$(BIN)/bitnet train --preset siglip-tiny --minutes $(LOOKING) --data $(PICTURES)/records.jsonl \
	    --validation 0.02 --out build/vision/siglip
	$(BIN)/bitnet train --preset paligemma-tiny --minutes $(ANSWERING) --data $(PICTURES)/questions.jsonl \
	    --validation 0.02 --vision build/vision/siglip --out build/vision/paligemma
	$(BIN)/bitnet export build/vision/siglip build/vision/siglip.bitnet
	$(BIN)/bitnet export build/vision/paligemma build/vision/paligemma.bitnet
	$(BIN)/bitnet similarity build/vision/siglip.bitnet $(UNSEEN)/images/000000.png --quiet \
	    -p 'a red circle above a blue square' -p 'three green stars' -p 'the word cat in black at the top'
	$(BIN)/bitnet generate build/vision/paligemma.bitnet --image $(UNSEEN)/images/000000.png --quiet \
	    -p 'what is in the picture?' --temperature 0
	$(BIN)/python python_bindings/examples/vision.py build/vision

test: .venv/test
	$(BIN)/cmake -S . -B build/test -DBITNET_TESTS=ON --log-level=WARNING $(CMAKE_OPTIONS)
	$(BIN)/cmake --build build/test --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/test --output-on-failure --parallel $(JOBS)
	$(PYTEST) $(TESTS)

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)

format: .venv/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

coverage: .venv/test
	sh runtime_c/tests/coverage.sh
	$(PYTEST) -q --cov --cov-report=term-missing $(addprefix tests/test_,$(PARSERS:=*.py))

clients: .venv/test build/clients/installed
	PYTHONPATH=tests $(BIN)/python tests/clients.py build/clients/bin/python

ray: .venv/tools build/ray/installed
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/ray .
	build/ray/bin/python -m pip --disable-pip-version-check install -qq --force-reinstall --no-deps build/ray/*.whl
	build/ray/bin/python tests/ray_checks.py

bench: .venv/engine
	$(BIN)/bitnet bench --shape bitnet-2b4t

# Builds an instrumented copy of the Python module, which is found before the installed one because
# -S ignores .pth files, and runs the tests that give it damaged files.
SANITIZED := build/sanitize/python
SETTING := --config-settings=# its short form -C needs pip 23.1, and Debian 12 has 23.0
# libstdc++ is loaded before torch, whose exceptions ASan would not know otherwise.
sanitize: .venv/test
	rm -rf $(SANITIZED)
	CC=gcc $(PIP) install --no-deps --no-build-isolation --target $(SANITIZED) \
	    $(SETTING)build-dir=build/sanitize $(SETTING)cmake.build-type=RelWithDebInfo \
	    $(SETTING)cmake.define.BITNET_TESTS=ON "$(SETTING)cmake.define.BITNET_SANITIZE=address;undefined" .
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure --parallel $(JOBS)
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	    ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=4 \
	    PYTHONPATH="$(SANITIZED):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    $(BIN)/python -S -m pytest tests/test_readers.py tests/test_hostile.py tests/test_runtime*.py tests/test_kernels*.py

build/clients/installed: tests/clients.txt
	@echo 'Installing clients for the server, outside .venv: 0.6 GB ...'
	@"$(PYTHON)" -m venv build/clients
	@build/clients/bin/python -m pip install --disable-pip-version-check -qq -r tests/clients.txt
	@touch $@

build/ray/installed: pyproject.toml constraints.txt | .venv/tools
	@echo 'Installing Ray, outside .venv: 0.8 GB ...'
	@"$(PYTHON)" -m venv build/ray
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir build/ray .
	@build/ray/bin/python -m pip --disable-pip-version-check install -qq -c constraints.txt \
	    "$$(ls build/ray/*.whl)[ray]"
	@touch $@

# For benchmarks/versus_trainers.py.
versus: build/versus/bin/python
build/versus/bin/python:
	@echo 'Installing other trainers, outside .venv: 1 GB ...'
	@"$(PYTHON)" -m venv build/versus
	@build/versus/bin/python -m pip install --disable-pip-version-check -qq -c constraints.txt \
	    torch transformers accelerate datasets torchao==0.18.0 || { rm -rf build/versus; exit 1; }

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- the environment, updated when a source or the list of packages changes ----

# Programs of an environment name its place, so in a clone that was moved none starts, and in a copy that of the other.
MOVED := $(shell [ -L .venv ] || [ ! -e .venv/made ] || grep -qsF " $$(pwd -P)/.venv" .venv/pyvenv.cfg || echo moved)
.PHONY: moved
moved:
	@echo 'error: .venv was made in another folder, expected $(CURDIR); this removes it: make clean' >&2; exit 1

# An upgrade of the system may remove the Python that an environment was made with, or put another in its place.
ITS_OWN := import os, sys; sys.exit(not os.path.isdir(".venv/lib/python%d.%d" % sys.version_info[:2]))
LOST := $(shell [ ! -e .venv/made ] || .venv/bin/python -c '$(ITS_OWN)' 2>/dev/null || echo lost)
.PHONY: lost
lost:
	@echo 'error: the Python that .venv was made with is gone; this removes .venv, to be made anew: make clean' >&2; exit 1

.venv/made: $(MOVED) $(LOST)
	@command -v "$(PYTHON)" >/dev/null || \
	    { echo 'error: no $(PYTHON); install Python 3.11 or newer, or name one: make PYTHON=...' >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is $$("$(PYTHON)" -V 2>&1), expected 3.11 or newer: make PYTHON=..." >&2; exit 1; }
	@command -v $(firstword $(CC)) >/dev/null || \
	    { echo 'error: no C compiler ($(CC)); install gcc or clang, or name one: make CC=...' >&2; exit 1; }
	@[ ! -e .venv/bin/activate ] || \
	    { echo 'error: .venv is there, and not from this Makefile; expected none: rename it, or remove it with make clean' >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear .venv || \
	    { rm -rf .venv; echo 'error: could not create .venv; on Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@touch $@

# Our own module is built with the tools in .venv, so that rebuilding compiles only what changed.
# Everything else is built, if at all, as its author specifies. Each file marks a completed step.
.venv/tools: .venv/made constraints.txt
	@echo 'Setting up .venv ...'
	@$(PIP) install -c constraints.txt scikit-build-core cffi cmake ninja
	@touch $@

.venv/engine: .venv/tools pyproject.toml $(SOURCES)
	@echo 'Compiling the engine ...'
	@$(PIP) install --no-build-isolation --no-deps -e .
	@$(PIP) install -c constraints.txt bitnet-edge
	@touch $@

# On Linux pip installs PyTorch with CUDA by default.
PYTORCH := $(if $(filter Linux,$(shell uname -s)),up to 3 GB (5 GB on disk; docs/install.md says how to \
             need a tenth: see "Less to download"),0.3 GB)

# The project itself is installed already: this adds the packages of an extra in pyproject.toml, and
# does not run again when a source changes.
.venv/demo: pyproject.toml constraints.txt | .venv/engine
	@echo 'Installing PyTorch and what training needs: $(PYTORCH) ...'
	@$(PIP) install -c constraints.txt 'bitnet-edge[train]'
	@touch $@

.venv/test: pyproject.toml constraints.txt | .venv/engine
	@echo 'Installing what the tests need: 0.3 GB, plus PyTorch if it is missing, $(PYTORCH) ...'
	@$(PIP) install -c constraints.txt 'bitnet-edge[dev]'
	@touch $@
