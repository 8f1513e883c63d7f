#!/usr/bin/env bash
# The tests of front-ends whose libraries cannot live in .venv, in an environment beside it that has them all
# (benchmarks/peers.txt). Usage: test_frontends.sh PYTHON [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
side=$(scripts/frontends_env.sh "$python")
"$side" -m pytest tests/frontends --ignore tests/frontends/jax -m "not soak" --covers=build/covers/frontends.json "$@"
# JAX makes every later fork of its process a warning, so it has one of its own.
"$side" -m pytest tests/frontends/jax -m "not soak" --covers=build/covers/jax.json "$@"
