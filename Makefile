# Two commands on a fresh machine: `make run` and `make test`. They need Python 3.10 or newer, a C++ compiler and make.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
CACHE_TAG = $(shell $(PY) -c 'import sys; print(sys.implementation.cache_tag)')
BUILD_DIR = build/$(CACHE_TAG)

.PHONY: help venv build

$(VENV)/.ready: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check scikit-build-core nanobind ninja cmake "numpy>=2"
	touch $@

venv: $(VENV)/.ready

build: venv
	$(PY) scripts/build_editable.py
