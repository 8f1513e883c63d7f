# On a fresh machine, `make run` and `make test` need Python 3.10 or newer, a C++ compiler and make. Everything else,
# including CMake and Ninja, is installed from PyPI into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
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
# What is imported is compiled then.
export PIP_COMPILE := 0
# Prints a line per package, so that a slow network does not look like a hang.
INSTALL = $(PY) -m pip install --progress-bar off
SHOW_PACKAGES := sed -un 's/^Collecting \([^ ]*\).*/fetching \1/p; s/^Installing collected packages.*/unpacking packages/p'
# The dependencies and the extra `atari` of pyproject.toml: all that `make run` imports.
RUN_PACKAGES := numpy gymnasium cloudpickle click rich ale-py opencv-python-headless
# Containers often set it; each of the hundreds of processes that the tests start would compile stepmill again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv build run test coverage check format stub model sanitize soak test-torch test-frontends test-newest test-slow test-mlagents test-ray test-originals test-envs test-jupyter test-versions bench-setup bench docs docs-shots dist extras lock clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/.tools: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "stepmill needs Python 3.10 or newer; choose one: make PYTHON=python3.12")'
	@test -x $(PY) || { echo "making $(VENV)" && $(PYTHON) -m venv $(VENV); } || \
	    { rm -rf $(VENV); echo "cannot make a venv: install your system's python3-venv package and run make again" >&2; exit 1; }
	@$(INSTALL) cmake nanobind ninja numpy scikit-build-core | $(SHOW_PACKAGES)
	@touch $@

$(VENV)/.runs: $(VENV)/.tools
	@$(INSTALL) $(RUN_PACKAGES) | $(SHOW_PACKAGES)
	@$(PY) -c "import ale_py, click, cloudpickle, cv2, gymnasium, rich"  # compiles them, beside the extension
	@touch $@

$(VENV)/.ready: $(VENV)/.tools
	@$(INSTALL) -r constraints.txt | $(SHOW_PACKAGES)
	@touch $@

venv: $(VENV)/.ready  ## the environment in .venv
	@:

build:  ## build the extension in place; fast if little has changed. Packages are installed meanwhile, if they are missing
	@$(MAKE) --no-print-directory --jobs 2 venv extension

.PHONY: extension
extension: $(VENV)/.tools
	@MAKEFLAGS= $(PY) scripts/build_editable.py  # the jobs of Ninja are its own

run:  ## a training that is killed beside one that is not, CartPole and Atari Pong, and comparisons with Gymnasium's vector envs
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.runs extension
	$(PY) examples/kill_me.py --kills 2 --worker-kills 2 --updates 40
	$(BIN)/stepmill run CartPole-v1 --num-envs 64 --seconds 3 --seed 0
	$(BIN)/stepmill bench Acrobot-v1 --num-envs 64 --rounds 2
	-$(BIN)/stepmill run ALE/Pong-v5 --num-envs 8 --seconds 4 --seed 0 && $(BIN)/stepmill bench ALE/Pong-v5 --num-envs 8 --rounds 2

# On a fresh clone two processes compile half of the tests each; otherwise each of the four would compile them all.
TEST_HALVES := "crash contract kernels" "evaluation frontends fuzz integration property unit"

test: build  ## all tests but the long ones, in four processes
	@test -d tests/unit/__pycache__ || for half in $(TEST_HALVES); do (cd tests && $(PY) -m pytest -q --collect-only $$half >/dev/null) & done; wait
	$(PY) -m pytest -n 4 --dist worksteal -m "not soak and not slow" --covers=build/covers/main.json $(PYTEST_ARGS)

coverage: venv  ## build/COVERAGE.md: which test shows which behaviour of docs/coverage.toml
	$(PY) scripts/coverage.py

# Each on one core, the longest first.
CHECKS := check-prose check-pyright check-budget check-types check-sizes check-imports check-stub check-model check-numbers check-lint

check: build  ## lint, types, imports, sizes, budget, prose, stub, names in the model, measured numbers; two at a time
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target $(CHECKS)

# The extension is a unity build, in which a file finds the includes of others. CXX=clang++ does the same with Clang.
ALONE_FLAGS = -std=c++20 -fvisibility=hidden -fsyntax-only -Wall -Wextra -Werror -Isrc/stepmill/_native $(shell $(PY) -c \
	'import nanobind, numpy, sysconfig; print("-isystem", numpy.get_include(), "-isystem", nanobind.include_dir(), "-isystem", sysconfig.get_path("include"))')

check-alone: venv  ## compile each C++ file of the extension alone, which finds a missing include
	find src/stepmill/_native -name '*.cpp' -print0 | xargs -0 -P 2 -n 1 $(CXX) $(ALONE_FLAGS)

.PHONY: $(CHECKS) check-alone
check-lint:
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
check-types:  # one after the other: both write the same cache
	$(BIN)/mypy
	$(BIN)/mypy scripts $(wildcard tests/typing)
check-pyright:
	$(BIN)/basedpyright
check-imports:
	$(BIN)/lint-imports
	$(PY) scripts/check_floors.py
check-sizes:
	$(PY) scripts/check_sizes.py
check-budget:
	$(PY) scripts/budget.py
check-prose:
	$(PY) scripts/check_prose.py
check-stub:
	$(PY) scripts/check_stub.py
check-model:
	$(PY) scripts/check_model_names.py
check-numbers:  # in tables of measured values, and in text
	$(PY) -m benchmarks.readme --check
	$(PY) -m benchmarks.programs --check
	$(PY) -m benchmarks.verdicts --check
	$(PY) -m benchmarks.faults --check
	$(PY) scripts/check_figures.py

format: venv  ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)

stub: build  ## rewrite the stub of the extension
	$(PY) scripts/check_stub.py --write

model:  ## the protocol's model and its mutants; needs spin
	$(PYTHON) model/check.py

sanitize: build  ## C++ tests under TSAN and ASAN+UBSAN, Python tests with an ASAN build
	scripts/sanitize.sh $(PY)

soak: build  ## 10 million steps without growth, 30 minutes of chaos, 106,000 random programs, an hour of AsyncPool, and the tests marked soak
	$(PY) scripts/soak.py
	$(PY) -W ignore::RuntimeWarning -m tests.chaos --seconds $(CHAOS_SECONDS)
	$(PY) -m tests.fuzz --programs 100000
	$(PY) -m tests.fuzz.doors --programs 2000
	$(PY) -m tests.aio.soak
	$(PY) -W ignore::RuntimeWarning -m tests.kills --minutes 60
	$(PY) -m tests.forged --files 3000
	$(PY) -m pytest -m soak --timeout 3600 || test $$? -eq 5

test-torch: build  ## the tests marked torch, in a separate environment
	scripts/test_torch.sh $(PY)

test-frontends: build  ## the tests of front-ends whose libraries .venv does not have, in a separate environment
	scripts/test_frontends.sh $(PY) $(PYTEST_ARGS)

test-newest: venv  ## the tests of what other versions may break, with the newest of every dependency, in a separate environment
	scripts/test_newest.sh $(PY) $(PYTEST_ARGS)

test-slow: build  ## the tests marked slow: context="spawn", each MuJoCo task as a kernel, chaos, doctor, tune, bench, pages, examples
	$(PY) -m pytest -n 4 --dist worksteal -m "slow and not soak" --covers=build/covers/slow.json $(PYTEST_ARGS)

test-mlagents: build  ## the tests marked mlagents, against both generations of mlagents-envs
	scripts/test_mlagents.sh $(PY)

test-ray: build  ## the tests marked ray, and the contract of a backend, on Ray clusters; needs CPython 3.11
	scripts/test_ray.sh $(PY) $(PYTEST_ARGS)

test-originals: build  ## the originals' own tests with our classes in place of theirs; sources in $$STEPMILL_ORIGINALS, SUITES="alf sb3"
	$(PY) scripts/test_originals.py $(ORIGINALS_ARGS) $(SUITES)

test-envs: build  ## envs of other packages, bit for bit as in Gymnasium, with doctor and speeds; ENVS='MiniGrid "PettingZoo MPE"' runs some
	$(PY) scripts/test_envs.py $(ENVS)

test-jupyter: build  ## the tests of pools in notebooks, in a separate environment
	scripts/test_jupyter.sh $(PY)

test-versions: venv  ## build and test on the oldest and the newest CPython found, and on newer ones in a chroot (root, debootstrap); VERSIONS_ARGS=--whole
	$(PY) scripts/test_versions.py $(VERSIONS_ARGS)

bench-setup: build  ## the peers' environments
	$(PY) -m benchmarks.setup

bench: build  ## the tables of benchmarks/
	$(PY) -m benchmarks.run

docs: build  ## the documentation site, in build/site/html; warnings are errors
	scripts/build_docs.sh $(PY)

docs-shots: docs  ## pictures of each page of the site, in build/shots, and a check of its search; needs Chromium
	PIP_CONSTRAINT= build/docs-venv/bin/python -m pip install -q playwright
	build/docs-venv/bin/python scripts/docs_search.py build/site/html
	build/docs-venv/bin/python scripts/docs_shots.py build/site/html build/shots

dist: venv  ## build sdist and wheel, and test the wheel in an empty environment
	$(PY) scripts/check_dist.py

extras: venv  ## test each extra alone in an empty environment
	PIP_CONSTRAINT= $(PY) scripts/check_extras.py

lock: venv  ## update the versions in constraints.txt
	scripts/lock.sh $(PY)

clean:  ## remove what was built, except the environment
	rm -rf build dist .venvs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache $(VENV)/.built
