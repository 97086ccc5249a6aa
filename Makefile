# `make demo` and `make test` set everything up in .venv; Python ≥ 3.11 is all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# MLX's Linux wheel brings a slow reference BLAS; Debian's OpenBLAS is used where it is installed.
OPENBLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0))
FAST := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS) OPENBLAS_NUM_THREADS=1,)

.PHONY: help demo test lint format docs reports clean

help:
	@echo "make demo     the whole pipeline on the embedded model; ends with the report's path"
	@echo "make test     the tests"
	@echo "make lint     lint, format and type checks"
	@echo "make format   put the code into the project's format"
	@echo "make docs     write docs/cli.md anew"
	@echo "make reports  write reports/, docs/results.md and the table in README.md anew (half an hour)"

$(VENV)/pyvenv.cfg:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "reap needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(VENV)/pyvenv.cfg pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(VENV)/.run
	$(FAST) $(BIN)/reap demo --force

test: $(VENV)/.dev
	$(FAST) $(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy reap

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/python tools/write_cli_docs.py

reports: $(VENV)/.run
	$(FAST) $(BIN)/python benchmarks/plain_recipes.py --write
	$(FAST) $(BIN)/python benchmarks/domains.py --write
	$(FAST) $(BIN)/python benchmarks/low_bit.py --kl --write

clean:
	rm -rf $(VENV) demo runs
