# Two commands on a fresh machine: `make run` and `make test`. They need Python 3.10 or newer, a C++ compiler and make;
# everything else, CMake and Ninja too, comes from PyPI into .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
CHAOS_SECONDS ?= 1800
VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STUB := src/stepmill/_native.pyi
PYTHON_CODE := $(wildcard src scripts tests benchmarks examples)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help venv build run test coverage check format stub model sanitize soak test-torch test-frontends test-mlagents test-originals test-jupyter test-versions bench-setup bench dist extras lock clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/.ready: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "stepmill needs Python 3.10 or newer; give one: make PYTHON=python3.12")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "no venv could be made: install your system's python3-venv and run make again" >&2; exit 1; }
	$(PY) -m pip install -q -r constraints.txt
	@touch $@

venv: $(VENV)/.ready  ## the environment in .venv

build: venv  ## the extension, editable; fast when little changed
	@$(PY) scripts/build_editable.py

run: build  ## `stepmill run` on CartPole and Atari Pong, then a table beside Gymnasium's vector envs
	$(PY) -m stepmill.observe.showcase

test: build  ## all tests but the long ones, in three processes
	$(PY) -m pytest -n 3 -m "not soak" --covers=build/covers/main.json $(PYTEST_ARGS)

coverage: venv  ## docs/COVERAGE.md from what the tests have shown
	$(PY) scripts/coverage.py

check: build  ## lint, types, walls, sizes, stub
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	$(BIN)/mypy
	$(BIN)/mypy scripts $(wildcard tests/typing)
	$(BIN)/lint-imports
	$(PY) scripts/check_sizes.py
	$(PY) scripts/check_stub.py

format: venv  ## let ruff mend what it can
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)

stub: build  ## write the stub of the extension anew
	$(PY) scripts/check_stub.py --write

model:  ## the protocol's model and its mutants; needs spin
	$(PYTHON) model/check.py

sanitize: build  ## C++ tests under TSAN and ASAN+UBSAN, Python tests on an ASAN build
	scripts/sanitize.sh $(PY)

soak: build  ## 10 million steps without growth, 30 minutes of chaos, and the tests marked soak
	$(PY) scripts/soak.py
	$(PY) -W ignore::RuntimeWarning -m stepmill.testing.chaos --seconds $(CHAOS_SECONDS)
	$(PY) -m pytest -m soak --timeout 3600 || test $$? -eq 5

test-torch: build  ## the tests marked torch, in an environment of their own
	scripts/test_torch.sh $(PY)

test-frontends: build  ## the tests of front-ends whose libraries .venv does not have, in an environment of their own
	scripts/test_frontends.sh $(PY) $(PYTEST_ARGS)

test-mlagents: build  ## the tests marked mlagents, against both generations of mlagents-envs
	scripts/test_mlagents.sh $(PY)

test-originals: build  ## DI-engine's own tests of its env managers, with its classes and with ours in their place
	$(PY) scripts/test_originals.py

test-jupyter: build  ## the tests of pools in notebooks, in an environment of their own
	scripts/test_jupyter.sh $(PY)

test-versions: venv  ## build and test on the oldest and the newest CPython found
	$(PY) scripts/test_versions.py

bench-setup: build  ## the peers' environments
	$(PY) -m benchmarks.setup

bench: build  ## the tables of benchmarks/
	$(PY) -m benchmarks.run

dist: venv  ## sdist and wheel, each tried in an empty environment
	$(PY) scripts/check_dist.py

extras: venv  ## each extra alone in an empty environment, doing what it promises
	PIP_CONSTRAINT= $(PY) scripts/check_extras.py

lock: venv  ## choose the versions of constraints.txt anew
	scripts/lock.sh $(PY)

clean:  ## remove what was built, but not the environment
	rm -rf build dist .venvs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache $(VENV)/.built
