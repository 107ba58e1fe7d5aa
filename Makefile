# The house's commands. `make` alone lists them.
#
# `make env` never lets pip choose a torch: an unpinned one is a CUDA build of several GB. torch is
# installed first, at the exact version of the constraints, and everything else beside it.

PYTHON ?= python3
VENV ?= .venv
RANKS ?= 4
PYTEST_ARGS ?=
# One more than CI's machine has cores: half of what tests take is waiting, for deadlines of tenths of
# seconds and for processes that start.
WORKERS ?= 3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CONSTRAINTS := constraints-cpu.txt
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
DATA := runs/data/stdlib
RUN := runs/first-run-$(shell date +%Y%m%d-%H%M%S)
# Tests start many interpreters: without bytecode each compiles this package anew, 0.6 s a trainer.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
FAST := not full and not slow and not gpu and not multi_gpu

.DEFAULT_GOAL := help
.PHONY: help env env-dev train test test-all lint check format bench chaos wheels peers-wheels docs hooks clean

help: ## list these commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) \
	    | while IFS='|' read -r name text; do printf '  make %-10s %s\n' "$$name" "$$text"; done

env: $(CORE) ## make the environment that training needs (.venv)

env-dev: $(DEV) ## the same and what the tests and checks need

$(CORE): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' $(CONSTRAINTS)) -c $(CONSTRAINTS)
	$(PIP) --editable '.[cluster,telemetry]' -c $(CONSTRAINTS)
	@touch $@

$(DEV): $(CORE)
	$(PIP) --editable '.[dev]' -c $(CONSTRAINTS)
	@touch $@

train: $(CORE) | $(DATA) ## train a small model on real text with 4 processes, and sample from it
	$(BIN)/megascale run recipes/first-run.toml --nodes 1 --procs-per-node $(RANKS) \
	    --set job.run_dir=$(RUN)
	$(BIN)/megascale generate $(RUN) --prompt "def "
	@echo
	@echo "The run is in $(RUN): its configuration, metrics, events and checkpoints."
	@echo "See it: $(BIN)/megascale dashboard $(RUN)"

$(DATA): | $(CORE)
	$(BIN)/megascale data prepare --input stdlib --tokenizer train:BPE:4096 --output $(DATA)

test: $(DEV) ## every test that needs no GPU and is not slow: what CI runs
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(DEV) ## the slow tests too, and those for the GPUs that are here (one worker)
	$(BIN)/python -m pytest -m "" $(PYTEST_ARGS)

check: lint ## format, lint, types, import direction, generated pages, fast tests
	$(PYTEST) -q -m "$(FAST)" $(PYTEST_ARGS)

lint: $(DEV) ## `make check` without its tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.config_reference --check
	$(BIN)/python -m tools.tables --check

format: $(DEV) ## format the code and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DEV) ## write the generated pages and tables anew
	$(BIN)/python -m tools.config_reference
	$(BIN)/python -m tools.tables
	$(BIN)/python -m tools.plan_examples

bench: ## measure the rows of benchmarks/results/ that this machine allows
	PYTHON=$(or $(wildcard $(BIN)/python),$(PYTHON)) bash tools/bench.sh

chaos: $(DEV) ## faults on purpose: the short schedule and every kind once; rows of chaos.jsonl
	$(BIN)/python -m benchmarks.chaos chaos/short.toml chaos/matrix.toml

wheels: ## fetch the wheels that an offline GPU machine (Python 3.12) lacks into wheels/
	PYTHON=$(PYTHON) bash tools/wheels.sh

peers-wheels: ## fetch Megatron-Core and TorchTitan for an offline GPU machine into .peers/
	PYTHON=$(PYTHON) bash benchmarks/peers/wheels.sh

hooks: ## run `make check` before each commit
	bash tools/install-hooks.sh

clean: ## remove the environment, caches and fetched wheels (not runs/)
	rm -rf $(VENV) wheels .peers build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
