# Everything runs in .venv, which is made on first use and brought up to date when pyproject.toml or constraints.txt change.
# Use another interpreter (3.11 to 3.13) with `make PYTHON=python3.12 test` after a `make clean`.

SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
DEMO_DATA := data/python-stdlib.parquet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all test-units test-processes test-nodes gpu-test gpu-bench check docs wheel-test clean

help:  ## lists the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## makes .venv with raypipe, its dependencies and the development tools

demo: $(INSTALLED) $(DEMO_DATA)  ## trains a small GPT on the source of Python's standard library, on the CPU
	$(BIN)/raypipe train examples/gpt_python_stdlib.yaml

# Options for pytest, such as SELECTED='-m "not slow"', which is what CI runs.
SELECTED ?=
PURE := --ignore=tests/processes --ignore=tests/on_ray --ignore=tests/multinode --ignore=tests/gpu

# A file's tests run in one process, which remembers the orders that it has searched for.
test: $(INSTALLED)  ## runs the tests that a change needs first: laws, units, threads and a few runs on Ray
	$(BIN)/pytest -n auto --dist loadfile -m "not slow" --durations=10 $(PURE)
	$(BIN)/pytest -m smoke tests/on_ray

test-all: test-units test-processes test-nodes  ## runs all tests that need no GPU

test-units: $(INSTALLED)
	$(BIN)/pytest $(SELECTED) -n auto --dist loadfile --durations=20 $(PURE)

# All tests on the shared Ray run in one process. A stand-in for a GPU is compiled; without a C++ compiler its tests are skipped.
test-processes: $(INSTALLED)
	$(BIN)/pytest $(SELECTED) -n auto --dist loadgroup --durations=20 tests/gpu tests/processes tests/on_ray

# Several nodes are network namespaces; without root and iproute2 these tests are skipped.
test-nodes: $(INSTALLED)
	$(BIN)/pytest $(SELECTED) --durations=10 tests/multinode

# GPU machines often have a torch and a Ray of their own and no network: where there is no .venv, their Python is used as it is.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
GPU_RESULTS ?= build/gpu

gpu-test:  ## runs the tests that need a GPU, with .venv or else the python3 of this machine; skips without one
	@mkdir -p $(GPU_RESULTS)
	set -o pipefail; $(GPU_PYTHON) -m pytest -v -W default tests/gpu --durations=20 --junitxml=$(GPU_RESULTS)/tests.xml 2>&1 | tee $(GPU_RESULTS)/tests.log

gpu-bench:  ## prints the figures of stages on a GPU, and writes them as JSON: each part in a process of its own, for ten minutes at most
	@mkdir -p $(GPU_RESULTS)
	@set -o pipefail; failed=""; for part in stage host profile fault share; do \
	  PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} timeout -k 5 600 $(GPU_PYTHON) benchmarks/gpu.py --parts $$part --json $(GPU_RESULTS)/$$part.json 2>&1 \
	    | tee $(GPU_RESULTS)/$$part.log || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

check: $(INSTALLED)  ## checks style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy raypipe tests benchmarks examples

docs: $(INSTALLED)  ## builds the site of docs/ into build/docs; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs

wheel-test: $(INSTALLED)  ## builds sdist and wheel, and tries the wheel in an empty venv
	$(BIN)/python tests/try_wheel.py

clean:  ## removes .venv, builds and caches; keeps data/ and runs/
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find . -name __pycache__ -prune -exec rm -rf {} +

# Of pip's output: one line for each package that is fetched or built, and everything from the first error on.
PIP_PROGRESS := awk '/^ *(Downloading|Using cached|Building|Installing collected)/ {print substr($$0, 1, 100); fflush(); next} \
                     /^ *(ERROR|error|Traceback)/ {failed = 1} failed'

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing raypipe and its dependencies into .venv; the first time takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@set -o pipefail; \
	$(BIN)/pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' 2>&1 | $(PIP_PROGRESS)
	@touch $@

# Which packages are installed does not change the tokens: the installation must come first, but is no reason to prepare them again.
$(DEMO_DATA): | $(INSTALLED)
	@mkdir -p $(@D)
	$(BIN)/raypipe data prepare python-stdlib -o $@
