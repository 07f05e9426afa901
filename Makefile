# Two commands for newcomers: `make demo` and `make test`.  Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process a core, each with one thread of torch: the many small tests then run side by side.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto
TORCH := torch==2.13.0
# e.g. TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu" for the small build without CUDA
TORCH_ARGS ?=
QUESTION := What is the capital of France?

# What compiles the native code; from the package index, so that a machine needs a C++ compiler only.
BUILD_TOOLS := "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
NATIVE_SOURCES := CMakeLists.txt $(wildcard native/*/*.h native/*/*.cpp)
# Two builds at once in one folder would spoil it.
LOCK := $(if $(shell command -v flock),flock $(VENV)/.lock)

.PHONY: demo test check lint native sanitize docs clean

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

native: $(VENV)/.installed

sanitize: $(VENV)/.test-installed
	tests/native/sanitize.sh $(BIN)/python

docs: $(VENV)/.installed
	$(BIN)/python -m topg.cli.reference docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.build-tools:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(BUILD_TOOLS)
	@touch $@

$(VENV)/.installed: $(VENV)/.build-tools pyproject.toml $(NATIVE_SOURCES)
	@echo "Compiling and installing into $(VENV): about a minute."
	PATH="$(CURDIR)/$(BIN):$$PATH" $(LOCK) $(BIN)/python -m pip install --quiet --no-build-isolation -e .
	@touch $@

$(VENV)/.test-installed: pyproject.toml | $(VENV)/.installed
	@echo "Installing what the tests need; the first time this takes a few minutes, most of it for torch."
	$(BIN)/python -m pip install --quiet $(TORCH) $(TORCH_ARGS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(LOCK) $(BIN)/python -m pip install --quiet --no-build-isolation -e ".[torch,test,lint]"
	@touch $@
