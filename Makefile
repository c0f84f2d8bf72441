# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need only python3 (3.11 to 3.13) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: help demo demo-multi demo-ray test test-long bench lint types layers docs format clean

help:
	@echo "make demo       train a DLRM, kill it in the middle of a save, resume, compare bit for bit"
	@echo "make demo-multi the same with 2 processes, resumed on 1 and on 4"
	@echo "make demo-ray   a Ray job on 2 workers: kills, and recoveries from memory"
	@echo "make test       the suite without the long loops"
	@echo "make test-long  the kill, power-cut and multi-process loops"
	@echo "make bench      the measured tables of docs/benchmarks.md"
	@echo "make lint types layers docs format clean"
	@echo "ARGS='...' is passed on to demo, demo-multi, demo-ray, test, test-long and bench"

# Keyed on what decides the contents of the environment: nothing happens on a second call.
$(READY): pyproject.toml constraints.txt tools/make_venv.sh
	sh tools/make_venv.sh "$(PYTHON)" "$(VENV)"
	touch $@

demo: $(READY)
	$(BIN)/python examples/dlrm_jax/demo.py $(ARGS)

demo-multi: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_multi.py $(ARGS)

demo-ray: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_ray.py $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

test-long: $(READY)
	$(BIN)/python -m pytest -m long $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/save_restore.py $(ARGS)
	$(BIN)/python benchmarks/codecs.py $(ARGS)
	$(BIN)/python benchmarks/tracking.py $(ARGS)
	$(BIN)/python benchmarks/training.py $(ARGS)
	$(BIN)/python benchmarks/accuracy.py $(ARGS)
	$(BIN)/python benchmarks/scaling.py $(ARGS)
	$(BIN)/python benchmarks/restore_service.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(READY)
	$(BIN)/lint-imports

docs: $(READY)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .coverage .hypothesis .pytest_cache .ruff_cache
