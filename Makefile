# Two commands for newcomers: `make demo` and `make test`.  Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process a core, each with one thread: the many small tests then run side by side.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto
TORCH := torch==2.13.0
# e.g. TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" for the small build without CUDA
TORCH_ARGS ?=
QUESTION := What is the capital of France?

.PHONY: demo test check lint docs clean

demo: $(VENV)/.installed
	$(BIN)/topg pull smollm2-135m
	@echo "> $(QUESTION)"
	@echo "$(QUESTION)" | $(BIN)/topg chat smollm2-135m --system "You are a helpful AI assistant." --temperature 0 --max-tokens 64

test: $(VENV)/.test-installed lint
	$(PYTEST)

check: $(VENV)/.test-installed lint
	$(PYTEST) -m "not slow and not model"

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
	@echo "Installing into $(VENV); the first time this takes a few minutes, most of it for torch."
	$(BIN)/python -m pip install --quiet $(TORCH) $(TORCH_ARGS)
	$(BIN)/python -m pip install --quiet -e ".[torch]"
	@touch $@

$(VENV)/.test-installed: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[torch,test,lint]"
	@touch $@
