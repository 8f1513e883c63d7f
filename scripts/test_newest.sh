#!/usr/bin/env bash
# Installs stepmill as a user does, with the newest version of every dependency, in .venvs/newest, and runs those tests that other
# versions may break. Usage: test_newest.sh PYTHON [PYTEST_ARGS]
set -euo pipefail
cd "$(dirname "$0")/.."
unset PIP_CONSTRAINT
newest=.venvs/newest/bin/python
[ -x $newest ] || "$1" -m venv .venvs/newest
$newest -m pip install -q --upgrade --upgrade-strategy eager '.[test,atari,mujoco,numba,video]'
$newest -m pip list --format freeze
$newest -m pytest -n 4 --dist worksteal -m "not soak and not slow" tests/unit tests/contract tests/frontends tests/integration tests/kernels "${@:2}"
