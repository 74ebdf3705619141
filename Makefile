# Two commands do everything on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
CORE := .venv/.core
STAMP := .venv/.installed

.PHONY: help demo test test-fast test-all test-engines check bench alarms bench-rivals browser docs field figures pictures mutants format clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# torch first and pinned: resolved later, another package would pull a build with gigabytes of CUDA.
$(CORE): pyproject.toml constraints.txt
	@echo "installing torch and steadystep into .venv, a few minutes the first time"
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[dashboard,tensorboard]'
	@touch $@

$(STAMP): $(CORE)
	@echo "installing what tests, integrations and documents need, a few minutes the first time"
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(CORE) ## a small transformer, broken on purpose and kept on course
	$(BIN)/steadystep demo

# The pages are tested in a real browser. Without one those tests say so and are skipped.
browser:
	@command -v chromium >/dev/null || command -v chromium-headless-shell >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
			&& { apt-get install -y -q chromium || { apt-get update -q && apt-get install -y -q chromium; }; } >/dev/null 2>&1; } \
		|| echo "no Chromium, and it cannot be installed from here: the browser tests are skipped"

test: $(STAMP) browser ## the tests CI runs
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-fast: $(STAMP) ## the tests of what changed since main, and a core; under a minute
	$(BIN)/python tools/changed_tests.py

test-all: $(STAMP) browser ## every test, the slow ones too, and new random examples
	STEADYSTEP_HYPOTHESIS=search $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_host_reads.py

bench: $(STAMP) ## every table, from the beginning or where it was stopped
	for study in stability precision detection recovery overhead; do $(BIN)/steadystep bench $$study || exit 1; done

field: $(STAMP) ## 400 programs of strangers' kinds with and without a guard, from where it was stopped; about an hour
	$(BIN)/python -m tests.field --half both --count 400 --jobs 2 --out build/field.jsonl

alarms: $(STAMP) ## false alarms in a million steps of healthy programs, from where it was stopped; 40 minutes
	$(BIN)/python -m tests.field --alarms 1000000 --jobs 2 --out build/alarms.jsonl

RIVALS := .venv-rivals/bin
RIVALS_PIP := $(RIVALS)/python -m pip install --quiet --disable-pip-version-check -c benchmarks/rivals/constraints.txt
.venv-rivals/.installed: benchmarks/rivals/requirements.txt benchmarks/rivals/constraints.txt
	$(PYTHON) -m venv .venv-rivals
	$(RIVALS_PIP) torch
	$(RIVALS_PIP) -r benchmarks/rivals/requirements.txt
	$(RIVALS_PIP) -e .
	@touch $@

bench-rivals: .venv-rivals/.installed ## other people's packages through the same faults
	PYTHONPATH=benchmarks $(RIVALS)/python -m rivals recovery
	PYTHONPATH=benchmarks $(RIVALS)/python -m rivals overhead

ENGINES := .venv-engines/bin
ENGINES_PIP := $(ENGINES)/python -m pip install --quiet --disable-pip-version-check -c tests/engines/constraints.txt
.venv-engines/.installed: tests/engines/requirements.txt tests/engines/constraints.txt
	$(PYTHON) -m venv .venv-engines
	$(ENGINES_PIP) torch
	$(ENGINES_PIP) -r tests/engines/requirements.txt
	$(ENGINES_PIP) -e .
	@touch $@

test-engines: .venv-engines/.installed ## a guard inside torchtitan, DeepSpeed, torchft, Ray, Lightning and the Trainer; real processes
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(ENGINES)/python -m pytest -q tests/engines

pictures: $(STAMP) browser ## the pictures of the README, from real runs
	$(BIN)/python tools/pictures.py

docs: $(STAMP) ## the documentation as a site, in build/site
	$(BIN)/python -m mkdocs build --strict

figures: $(STAMP) ## the figures of docs/failures, from short runs
	$(BIN)/python tools/failure_figures.py

mutants: $(STAMP) ## break the code on purpose, one change at a time, and see a test go red; from where it was stopped
	$(BIN)/python -m tools.mutate --promises
	$(BIN)/python -m tools.mutate

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## forget the environment and every cache
	rm -rf .venv .venv-rivals .venv-engines build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
