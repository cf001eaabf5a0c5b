# Two commands set everything up: `make demo` and `make test`. Each makes .venv, installs what it needs, and runs.
#
#   PYTHON=python3.12      the interpreter that .venv is made from (3.10 or newer)
#   TORCH="torch==2.11.0"  another torch; by default the pinned CPU build without an NVIDIA GPU, the newest with one
#   TORCH_ARGS="..."       options of the pip that installs torch, such as --index-url of a CPU index
#   ARGS="..."             passed on to the demo or to pytest
#   JOBS=8                 processes that run GPU tests, which take turns on the GPUs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)
TORCH_ARGS ?=
ARGS ?=
JOBS ?= 8

.PHONY: demo test test-gpu lint format clean
.DELETE_ON_ERROR:

demo: $(BIN)/.plain
	$(BIN)/fp8stack demo $(ARGS)

test: $(BIN)/.test
	$(BIN)/pytest -n auto --dist worksteal --instafail $(ARGS)

test-gpu: $(BIN)/.test
	$(BIN)/pytest -m "gpu and not gpus" -n $(JOBS) $(ARGS)
	$(BIN)/pytest -m "gpu and gpus" $(ARGS)

lint: $(BIN)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python tests/packaging/code_size.py

format: $(BIN)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Setting up takes a third of the time this way: pips of before 24 choose among 140 packages for a minute, and bytecode
# of every module takes another, of which a tenth is ever imported. Python keeps that then, also where it is told not to.
unexport PYTHONDONTWRITEBYTECODE

# torch comes first and alone: with the right build installed, nothing later pulls another one.
$(BIN)/.torch:
	$(PYTHON) -c 'import sys; sys.exit("fp8stack needs Python 3.10 or newer, this is %d.%d; name another with PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --no-compile $(TORCH_ARGS) "$(TORCH)"
	@touch $@

$(BIN)/.plain: pyproject.toml | $(BIN)/.torch
	$(BIN)/pip install --quiet --no-compile --editable .
	@touch $@

$(BIN)/.%: pyproject.toml | $(BIN)/.torch
	$(BIN)/pip install --quiet --no-compile --editable ".[$*]"
	@touch $@
