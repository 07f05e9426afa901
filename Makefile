# Two commands for newcomers: `make demo` and `make test`.  Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
QUESTION := What is gravity?

.PHONY: demo test check lint docs clean

demo: $(VENV)/.installed
	$(BIN)/topg pull smollm2-135m
	@echo "> $(QUESTION)"
	@echo "$(QUESTION)" | $(BIN)/topg chat smollm2-135m --temperature 0 --max-tokens 64

test: $(VENV)/.test-installed lint
	$(BIN)/python -m pytest

check: $(VENV)/.test-installed lint
	$(BIN)/python -m pytest -m "not slow and not model"

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python -m topg.cli.reference docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[torch]"
	@touch $@

$(VENV)/.test-installed: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[torch,test,lint]"
	@touch $@
