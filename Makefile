# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need only python3 (3.11 to 3.13) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENT := $(VENV)/.ready
KERNELS := deltackpt/_kernels.abi3.so
READY := $(ENVIRONMENT) $(KERNELS)
ARGS ?=
# Number of parallel test processes; 0 runs the tests in pytest's own process.
WORKERS ?= 2
# A crashed worker ends the run: xdist 3.8 would wait forever for the worker that replaces it.
XDIST := -n $(WORKERS) --dist loadgroup --max-worker-restart=0
PYTEST := -m pytest $(XDIST)
# A test that the time limit does not interrupt, since it waits in compiled code, ends its process.
HANGS := -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true
# For test-long: "full" for a recorded run, otherwise a twentieth of it; a seed repeats a run; no
# test starts after so many seconds.
LONG ?= part
LONG_SEED ?=
LONG_SECS ?=

# Tests start hundreds of Python processes; without bytecode each compiles the whole package anew.
export PYTHONDONTWRITEBYTECODE :=

# Besides the Python of .venv: the quick selection of the suite runs on them, and CI requires them.
PYTHONS := 3.12 3.13
SMOKE_PYTHONS := 3.11 $(PYTHONS)

.PHONY: help demo demo-s3 demo-multi demo-ray demo-t5 demo-loops demo-log demo-kafka demo-serving test test-processes test-long test-breaks test-without-jax bench lint types layers notebook docs format clean
.PHONY: servers afresh newest test-pythons $(PYTHONS:%=newest-%) $(PYTHONS:%=test-python-%)
.PHONY: generated kernels smoke test-kernels $(SMOKE_PYTHONS:%=smoke-%)

help:
	@echo "make demo              train a DLRM, kill it in a save, resume, compare bit for bit"
	@echo "make demo-log          WAL record per step, ten random kills: no durable step lost"
	@echo "make demo-kafka        the same with the WAL in Kafka, whose broker is killed, too"
	@echo "make demo-s3           the same against an S3 server; the node is lost in an upload"
	@echo "make demo-multi        the same with 2 processes, resumed on 1 and on 4"
	@echo "make demo-ray          a Ray job on 2 workers: kills, and recovery from memory"
	@echo "make demo-serving      lookups over HTTP while training is killed: no mixed version"
	@echo "make demo-t5           make demo with a T5 on span corruption of text"
	@echo "make demo-loops        optax and NNX loops with Grain data; no sample trained twice"
	@echo "make test              the test suite without further processes"
	@echo "make test-processes    multi-process tests: jobs, kills, Ray, notebook, wheel"
	@echo "make test-long         crash loops: kills, power cuts (LONG=full, LONG_SEED=N)"
	@echo "make test-breaks       break lines that deleted tests protected: others must fail"
	@echo "make servers           object stores and Kafka for tests, which skip without them"
	@echo "make test-kernels      codecs without compiled kernels; kernels with sanitizers"
	@echo "make test-without-jax  reading checkpoints without JAX and Orbax installed"
	@echo "make test-pythons      codecs, saves, restores, kills on Python $(PYTHONS)"
	@echo "make newest            the same with the newest dependencies, then pin them"
	@echo "make bench             measure the tables of the docs (ARGS=--quick-set, names)"
	@echo "make notebook          rerun the notebook in the docs"
	@echo "make smoke             install the wheel into empty environments, save once"
	@echo "make kernels           compile the C kernels in this checkout"
	@echo "make lint types layers docs format clean"
	@echo "ARGS='...' is passed to demos, tests and bench; WORKERS=N sets parallel tests"

# Depends on everything that determines the environment, so a second call does nothing.
MADE_OF := pyproject.toml hatch_build.py $(wildcard constraints*.txt) tools/make_venv.sh tools/pins.sh
$(ENVIRONMENT): $(MADE_OF)
	sh tools/make_venv.sh "$(PYTHON)" "$(VENV)"
	touch $@

# Optional: without a C compiler, numpy and XLA do the same work more slowly.
$(KERNELS): deltackpt/_kernels.c hatch_build.py | $(ENVIRONMENT)
	$(BIN)/python hatch_build.py

kernels: $(KERNELS)

# Naming a Python other than the environment's rebuilds the environment.
ifneq ($(origin PYTHON),file)
ifneq ($(shell $(PYTHON) --version),$(shell $(BIN)/python --version 2>/dev/null))
$(ENVIRONMENT): afresh
endif
endif

# Object stores and Kafka on loopback, for tests.
SERVERS := build/servers
$(SERVERS)/.ready: tools/make_servers.sh
	sh tools/make_servers.sh "$(SERVERS)"
	touch $@

servers: $(SERVERS)/.ready

demo: $(READY)
	$(BIN)/python examples/dlrm_jax/demo.py $(ARGS)

demo-log: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_log.py $(ARGS)

demo-kafka: $(READY) servers
	$(BIN)/python examples/dlrm_jax/demo_log.py --kafka $(ARGS)

demo-s3: $(READY) servers
	$(BIN)/python examples/dlrm_jax/demo_s3.py $(ARGS)

demo-multi: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_multi.py $(ARGS)

demo-ray: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_ray.py $(ARGS)

demo-serving: $(READY)
	$(BIN)/python examples/dlrm_jax/demo_serving.py $(ARGS)

demo-t5: $(READY)
	$(BIN)/python examples/t5x/demo.py $(ARGS)

demo-loops: $(READY)
	$(BIN)/python examples/loops/demo.py $(ARGS)

# Most of the suite's time goes to compiling small programs, which takes a third less without these
# emitters; encoded rows, their errors and fingerprints keep their bits. Other targets use the default.
test: export XLA_FLAGS += --xla_cpu_use_fusion_emitters=false
# Each test is in exactly one of these three.
test: $(READY)
	$(BIN)/python $(PYTEST) -m "not processes and not long" --in-memory $(HANGS) $(ARGS)

test-processes: $(READY)
	$(BIN)/python $(PYTEST) -m processes $(HANGS) $(ARGS)

test-long: $(READY)
	$(BIN)/python $(PYTEST) -m long --long $(LONG) $(if $(LONG_SEED),--long-seed $(LONG_SEED)) \
		$(if $(LONG_SECS),--long-secs $(LONG_SECS)) $(ARGS)

# Breaks random lines that deleted tests protected: another test of each must fail.
BREAKS ?= --sample 8
test-breaks: $(READY)
	$(BIN)/python tools/replay_breaks.py $(BREAKS)

# The codecs without compiled kernels, and the kernels compiled with sanitizers.
test-kernels: $(READY)
	$(BIN)/python $(PYTEST) --kernels off tests/test_codecs.py tests/test_block_codes.py $(ARGS)
	sh tools/sanitize_kernels.sh $(BIN)/python $(ARGS)

# An environment without JAX and Orbax reads the runs that this one writes.
BARE := build/bare
$(BARE)/.ready: $(ENVIRONMENT) tools/make_bare_venv.sh
	sh tools/make_bare_venv.sh "$(BIN)/python" "$(BARE)"
	touch $@

test-without-jax: $(READY) $(BARE)/.ready
	rm -rf build/runs && $(BIN)/python tests/without_jax/make_runs.py build/runs
	$(BARE)/bin/python -m pytest tests/without_jax --runs build/runs $(ARGS)

# Codecs, formats, saves, restores and the WAL: what another Python or JAX may affect, in minutes.
QUICK := $(addprefix tests/, test_block_codes.py test_chain.py test_codecs.py test_dense_layout.py test_fingerprint.py test_golden.py test_inspect.py \
	test_wal.py test_manager.py test_merge.py test_root.py test_tables.py test_touched.py)
# Without ray and other development-only packages.
$(PYTHONS:%=build/py%/.ready): build/py%/.ready: pyproject.toml hatch_build.py constraints-%.txt tools/make_venv.sh tools/pins.sh
	python=$$(sh tools/find_python.sh $*) && sh tools/make_venv.sh "$$python" build/py$* test
	touch $@

$(PYTHONS:%=test-python-%): test-python-%: build/py%/.ready
	build/py$*/bin/python $(PYTEST) $(QUICK) $(ARGS)

test-pythons: $(PYTHONS:%=test-python-%)

$(PYTHONS:%=newest-%): newest-%:
	sh tools/newest.sh $* $(XDIST) $(QUICK) $(ARGS)

newest: $(PYTHONS:%=newest-%)

bench: $(READY) servers
	$(BIN)/python benchmarks/run.py $(ARGS)

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
	$(BIN)/python tools/run_notebook.py docs/tutorials/inspecting.ipynb --pictures docs/assets

# Generated pages, tables and figures of the docs; tests compare them.
generated: $(READY)
	$(BIN)/python tools/options_page.py docs/reference/options.md
	$(BIN)/python tools/figures.py docs/assets
	$(BIN)/python tools/tables.py

docs: generated
	$(BIN)/mkdocs build --strict

# Builds the wheel from the sdist, installs it into an empty environment and saves once.
smoke: $(SMOKE_PYTHONS:%=smoke-%)

$(SMOKE_PYTHONS:%=smoke-%): smoke-%: $(READY)
	sh tools/smoke.sh $* $(BIN)/python

clean:
	rm -rf $(KERNELS) $(VENV) build dist site .cache .coverage .hypothesis .pytest_cache .ruff_cache
