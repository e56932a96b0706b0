# Three ways in: `make train`, `make play` and `make test`. Each makes .venv first if it is not there; a second run starts at once.
#
#   PYTHON   the Python that .venv is made with (3.11 or newer)
#   VENV     the folder of the environment
#   ARGS     goes to the command: make train ARGS='--set train.steps=50', make test ARGS='-k layout'
#
# `make gpu PYTHON=python3` takes an environment that is there, and installs nothing.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
KILLS ?= 100
SEED ?= 1

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Empty files that say what is installed, and when: older than the two lists below, they are made again.
TO_TRAIN := $(VENV)/.installed
TO_PLAY := $(VENV)/.installed-play
TO_TEST := $(VENV)/.installed-test
TO_KERNELS := $(VENV)/.installed-triton
TO_DOCS := $(VENV)/.installed-docs
TO_TRACK := $(VENV)/.installed-trackers
LISTS := pyproject.toml constraints.txt
# What `bench gpu` imports, and the version of a program that is not installed
NEEDED := torch numpy pydantic typer rich tokenizers safetensors
BARE := build/bare/fivefold.dist-info
# Of the 8 minutes of `make gpu`, the last one: times the lectures' kernels, where they can run
lessons = if $(1) -c 'import torch, triton; assert torch.cuda.is_available()' 2>/dev/null; \
	  then timeout 50 $(1) -u examples/kernels/measure.py || \
	    { [ $$? -eq 124 ] && echo "the lectures' kernels: stopped, as their share of the 8 minutes is over"; }; \
	  else echo "no CUDA device with Triton: the lectures' kernels are not timed"; fi

.DEFAULT_GOAL := help
.PHONY: help train play gpu test test-all test-trackers test-chaos test-versions test-mutations check docs notebooks audit sbom release format clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F '|' '{ printf "make %-10s %s\n", $$1, $$2 }'

train: $(TO_TRAIN)  ## train a small language model on this machine: a few minutes
	$(BIN)/fivefold train quickstart $(ARGS)
	@echo "(in a shell where this was typed: . $(BIN)/activate)"

play: $(TO_PLAY)  ## a page in the browser that trains, watches and compares runs
	$(BIN)/fivefold play $(ARGS)

ifeq ($(origin PYTHON),file)
gpu: $(TO_TRAIN)  ## examine this machine's GPUs, in 8 minutes; PYTHON=python3: an environment that is there
	$(BIN)/fivefold bench gpu --limit 7 $(ARGS)
	@$(call lessons,$(BIN)/python)
else
gpu: $(BARE)/METADATA
	@$(PYTHON) -c 'from importlib.util import find_spec; import sys; \
	  lacks = ["Python 3.11"] * (sys.version_info < (3, 11)); \
	  lacks += [name for name in "$(NEEDED)".split() if find_spec(name) is None]; \
	  sys.exit("error: $(PYTHON) lacks " + ", ".join(lacks) + ". Install them, or leave PYTHON out" if lacks else 0)'
	PYTHONPATH="$(CURDIR)/src:$(CURDIR)/build/bare$${PYTHONPATH:+:$$PYTHONPATH}" \
	  $(PYTHON) -P -m fivefold bench gpu --limit 7 $(ARGS)
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)/build/bare$${PYTHONPATH:+:$$PYTHONPATH}"; export PYTHONPATH; $(call lessons,$(PYTHON))
endif

test: $(TO_TEST)  ## run the tests, two at a time (one: ARGS='-n 0')
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: $(TO_TEST) $(TO_KERNELS) $(TO_TRACK)  ## run the tests, and all layouts of 8 ranks: the better part of an hour
	$(BIN)/python -m pytest -m "not chaos" -n 2 --dist worksteal $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep.py

test-trackers: $(TO_TRACK)  ## the tests of trackers, with the real W&B and MLflow, without a network
	$(BIN)/python -c 'import mlflow, wandb'  # were one of them missing, its tests would be skipped
	$(BIN)/python -m pytest tests/test_trackers.py $(ARGS)

test-chaos: $(TO_TEST)  ## kills, damage, power loss, full disks, lost networks (KILLS=100 SEED=1): an hour
	$(BIN)/python -m pytest -m "" tests/chaos
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/fuzz_recipes.py --out benchmarks/results/fuzz_recipes.json
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/run.py damage --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/run.py kills --number $(KILLS) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/run.py elastic --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/run.py layouts
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/run.py soak

test-mutations: $(TO_TEST)  ## wrong lines that tests must notice: ten minutes
	$(BIN)/python tests/mutations/run.py $(ARGS)

test-versions: | $(BIN)/python  ## parallelism, precision, checkpoints, servers, GPU traces on each PyTorch in range: seven minutes each
	$(BIN)/python tests/versions.py $(ARGS)

check: $(TO_TEST)  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_imports.py

docs: $(TO_DOCS)  ## build/site/index.html: the documentation as a site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build
	@echo "open build/site/index.html"

notebooks: $(TO_TRAIN)  ## build/notebooks: a Jupyter notebook of each lecture page
	$(BIN)/python docs/make_notebooks.py

audit: $(TO_TEST)  ## installed versions and files against their pins; known vulnerabilities, if the index answers
	$(BIN)/python .ci/dependencies.py check
	$(BIN)/python .ci/dependencies.py known

sbom: $(TO_TEST)  ## dist/sbom.json: all components, for a release
	@mkdir -p dist
	$(BIN)/python .ci/dependencies.py sbom dist/sbom.json

release: audit sbom  ## dist/: the wheel and its list of components, after the audit
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	@! grep -q 'fivefold\.example' pyproject.toml || \
	  echo "note: [project.urls] of pyproject.toml has no public address yet, so the links of the wheel's page lead nowhere"

format: $(TO_TEST)  ## format the code and mend what ruff can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BARE)/METADATA: pyproject.toml
	@mkdir -p $(BARE)
	@sed -n '1i Metadata-Version: 2.1\nName: fivefold' pyproject.toml > $@
	@sed -n 's/^version = "\(.*\)"/Version: \1/p' pyproject.toml >> $@

$(TO_TRAIN): $(LISTS) | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(TO_PLAY): $(LISTS) | $(BIN)/python
	$(INSTALL) -e '.[play]'
	@touch $(TO_TRAIN) $@

$(TO_TEST): $(LISTS) | $(BIN)/python
	$(INSTALL) -e '.[test,dev]'
	@touch $(TO_TRAIN) $(TO_PLAY) $@

$(TO_KERNELS): $(LISTS) | $(BIN)/python
	$(INSTALL) -e '.[test,dev,triton]'
	@touch $(TO_TRAIN) $(TO_PLAY) $(TO_TEST) $@

$(TO_TRACK): $(LISTS) | $(BIN)/python
	$(INSTALL) -e '.[test,dev,wandb,mlflow]'
	@touch $(TO_TRAIN) $(TO_PLAY) $(TO_TEST) $@

$(TO_DOCS): $(LISTS) | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	@touch $(TO_TRAIN) $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' found. Fivefold needs Python 3.11 or newer; name yours with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Fivefold needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." \
	    "Name another one, such as PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) and installing into it, once. PyTorch is most of it."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
