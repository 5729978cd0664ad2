# Everything runs in one virtual environment, .venv, which `make setup` creates and every target brings up to date.
SHELL := /bin/bash
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
export PYTHONSAFEPATH := 1
export RAY_USAGE_STATS_ENABLED := 0
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-full test-gpu lint types proto chart

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip 'setuptools>=77' wheel
	@echo "==> torch (CPU or CUDA, whichever the registry offers this machine)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt 'torch>=2.9,<2.14'
	@echo "==> twostroke and its dependencies"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: setup
	$(BIN)/python -m twostroke.cluster.main demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/proto.py --check
	$(BIN)/python tools/hygiene.py

types: setup
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest tests/unit tests/property tests/component tests/cluster tests/helm -m 'not gpu and not slow'

test-full: lint types
	$(BIN)/pytest tests -m 'not gpu' --durations=20

test-gpu: setup
	$(BIN)/pytest tests/gpu -m gpu

proto: setup
	$(BIN)/python tools/proto.py

chart: setup
	$(BIN)/pytest tests/helm
