#!/usr/bin/env bash
# Installs stepmill as a user does, with the newest version of every dependency, in .venvs/newest, and runs those tests that other
# versions may break. With CI set, only those that look inside of other packages. Usage: test_newest.sh PYTHON [PYTEST_ARGS]
set -euo pipefail
cd "$(dirname "$0")/.."
unset PIP_CONSTRAINT
newest=.venvs/newest/bin/python
tests=(tests/unit tests/contract tests/frontends tests/integration tests/kernels)
if [ -n "${CI:-}" ]; then
    tests=(tests/unit/test_{envs_gymnasium,envs_gymnasium_vector,frontends_gymnasium,functions_that_are_sent,package}.py
        tests/contract/test_{gymnasium_cases,gymnasium_modes,gymnasium_wrappers,real_envs,envs_of_other_apis,saved_kinds}.py
        tests/frontends tests/integration/test_{by_value,changed_modules,registered_envs,traceback_lines,video}.py
        tests/kernels/test_{gymnasium,mujoco,python}.py)
fi
[ -x $newest ] || "$1" -m venv .venvs/newest
$newest -m pip install -q --upgrade --upgrade-strategy eager '.[test,atari,mujoco,numba,video]'
$newest -m pip list --format freeze
$newest -m pytest -n 4 --dist worksteal -m "not soak and not slow" "${tests[@]}" "${@:2}"
