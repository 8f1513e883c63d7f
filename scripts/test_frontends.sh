#!/usr/bin/env bash
# Runs the tests of front-ends whose libraries cannot be installed in .venv, in a separate environment that has all of them
# (benchmarks/peers.txt). Usage: test_frontends.sh PYTHON [PYTEST ARGUMENTS]
# The tests that are left out use no library of it: `make test` runs them, and `make test-originals` with DI-engine and ML-Agents.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
side=$(scripts/frontends_env.sh "$python")
others=(jax di_engine mlagents multi_env test_dm_env.py test_pettingzoo.py)
"$side" -m pytest -n 4 --dist worksteal tests/frontends "${others[@]/#/--ignore=tests/frontends/}" -m "not soak" \
    --covers=build/covers/frontends.json "$@"
# After JAX is imported, every fork of the process issues a warning, so the tests with JAX run in a separate process.
"$side" -m pytest tests/frontends/jax -m "not soak" --covers=build/covers/jax.json "$@"
