# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need only python3 (3.11 to 3.13) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# Tests run in as many processes at once; 0: in the one that pytest was started as.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadgroup
# Of test-long: "full" for a run that is recorded, else a twentieth of it; a seed to have a run again.
LONG ?= part
LONG_SEED ?=

# Beside the one that .venv is made of: the suite's quick selection runs on them, and CI fails without.
PYTHONS := 3.12 3.13

.PHONY: help demo demo-s3 demo-multi demo-ray demo-t5 demo-loops demo-log test test-processes test-long test-without-jax bench lint types layers notebook docs format clean
.PHONY: servers afresh newest test-pythons $(PYTHONS:%=newest-%) $(PYTHONS:%=test-python-%)

help:
	@echo "make demo       train a DLRM, kill it in the middle of a save, resume, compare bit for bit"
	@echo "make demo-log   a mark at every step, ten kills at random: no acknowledged step is lost"
	@echo "make demo-s3    the same against a real S3 server: the node is lost in the middle of an upload"
	@echo "make demo-multi the same with 2 processes, resumed on 1 and on 4"
	@echo "make demo-ray   a Ray job on 2 workers: kills, and recoveries from memory"
	@echo "make demo-t5    the first with a T5 on span corruption of text"
	@echo "make demo-loops loops of optax and nnx with grain data: no sample is trained twice"
	@echo "make test       every promise once, without further processes"
	@echo "make test-processes  what starts processes: jobs, kills, Ray, a notebook, a browser, a wheel, Orbax's suites"
	@echo "make test-long  the kill, power-cut and multi-process loops; LONG=full, LONG_SEED=N"
	@echo "make servers    object stores that tests of buckets start; without them these are skipped"
	@echo "make test-without-jax  what reads checkpoints, in an environment without jax and Orbax"
	@echo "make test-pythons      every codec, save, restore, kill and inspect on Python $(PYTHONS)"
	@echo "make newest     the same with the newest versions of everything, which become the pins of these Pythons"
	@echo "make bench      the measured tables of docs/benchmarks.md"
	@echo "make notebook   run the notebook of the docs afresh"
	@echo "make lint types layers docs format clean"
	@echo "ARGS='...' is passed on to the demos, tests and bench; WORKERS=N tests run at once"

# Keyed on what decides the contents of the environment: nothing happens on a second call.
MADE_OF := pyproject.toml $(wildcard constraints*.txt) tools/make_venv.sh tools/pins.sh
$(READY): $(MADE_OF)
	sh tools/make_venv.sh "$(PYTHON)" "$(VENV)"
	touch $@

# A Python that is named, and is not that of the environment, makes it afresh.
ifneq ($(origin PYTHON),file)
ifneq ($(shell $(PYTHON) --version),$(shell $(BIN)/python --version 2>/dev/null))
$(READY): afresh
endif
endif

# Object stores on loopback, for what speaks to buckets.
SERVERS := build/servers
$(SERVERS)/.ready: tools/make_servers.sh
	sh tools/make_servers.sh "$(SERVERS)"
	touch $@

servers: $(SERVERS)/.ready

demo: $(READY)
	$(BIN)/python examples/dlrm_jax/demo.py $(ARGS)

demo-log: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_log.py $(ARGS)

demo-s3: $(READY) servers
	$(BIN)/python examples/dlrm_jax/demo_s3.py $(ARGS)

demo-multi: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_multi.py $(ARGS)

demo-ray: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_ray.py $(ARGS)

demo-t5: $(READY)
	$(BIN)/python examples/t5x/demo.py $(ARGS)

demo-loops: $(READY)
	$(BIN)/python examples/loops/demo.py $(ARGS)

# Each test is in exactly one of these three.
test: $(READY)
	$(BIN)/python $(PYTEST) -m "not processes and not long" --in-memory $(ARGS)

test-processes: $(READY)
	$(BIN)/python $(PYTEST) -m processes $(ARGS)

test-long: $(READY)
	$(BIN)/python $(PYTEST) -m long --long $(LONG) $(if $(LONG_SEED),--long-seed $(LONG_SEED)) $(ARGS)

# Runs that this environment writes are read by one that has neither jax nor Orbax.
BARE := build/bare
$(BARE)/.ready: $(READY) tools/make_bare_venv.sh
	sh tools/make_bare_venv.sh "$(BIN)/python" "$(BARE)"
	touch $@

test-without-jax: $(READY) $(BARE)/.ready
	rm -rf build/runs && $(BIN)/python tests/without_jax/make_runs.py build/runs
	$(BARE)/bin/python -m pytest tests/without_jax --runs build/runs $(ARGS)

# Codecs, formats, saves, restores and the log: what another Python or jax may change, in minutes.
QUICK := $(addprefix tests/, test_block_codes.py test_chain.py test_codecs.py test_dense_layout.py test_fingerprint.py test_golden.py test_inspect.py \
	test_log.py test_manager.py test_merge.py test_root.py test_tables.py test_touched.py)
# Without ray and what else only development needs.
$(PYTHONS:%=build/py%/.ready): build/py%/.ready: pyproject.toml constraints-%.txt tools/make_venv.sh tools/pins.sh
	python=$$(sh tools/find_python.sh $*) && sh tools/make_venv.sh "$$python" build/py$* test
	touch $@

$(PYTHONS:%=test-python-%): test-python-%: build/py%/.ready
	build/py$*/bin/python $(PYTEST) $(QUICK) $(ARGS)

test-pythons: $(PYTHONS:%=test-python-%)

$(PYTHONS:%=newest-%): newest-%:
	sh tools/newest.sh $* -n $(WORKERS) --dist loadgroup $(QUICK) $(ARGS)

newest: $(PYTHONS:%=newest-%)

bench: $(READY)
	$(BIN)/python benchmarks/step.py $(ARGS)
	$(BIN)/python benchmarks/save_restore.py $(ARGS)
	$(BIN)/python benchmarks/bases.py $(ARGS)
	$(BIN)/python benchmarks/many.py $(ARGS)
	$(BIN)/python benchmarks/codecs.py $(ARGS)
	$(BIN)/python benchmarks/dense.py $(ARGS)
	$(BIN)/python benchmarks/tracking.py $(ARGS)
	$(BIN)/python benchmarks/training.py $(ARGS)
	$(BIN)/python benchmarks/accuracy.py $(ARGS)
	$(BIN)/python benchmarks/scaling.py $(ARGS)
	$(BIN)/python benchmarks/restore_service.py $(ARGS)
	$(BIN)/python benchmarks/service_memory.py $(ARGS)
	$(BIN)/python benchmarks/inspect_rows.py $(ARGS)
	$(BIN)/python benchmarks/extents.py $(ARGS)
	$(BIN)/python benchmarks/tiers.py $(ARGS)
	$(BIN)/python benchmarks/log.py $(ARGS)

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

notebook: $(READY)
	$(BIN)/python tools/run_notebook.py docs/guide/inspecting.ipynb --pictures docs/assets

docs: $(READY)
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .coverage .hypothesis .pytest_cache .ruff_cache
