#!/usr/bin/env bash
# The tests of front-ends whose libraries cannot live in .venv, in an environment beside it that has them all
# (benchmarks/peers.txt). Usage: test_frontends.sh PYTHON [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
side=$(scripts/frontends_env.sh "$python")
"$side" -m pytest tests/frontends -m "not soak" --covers build/covers/frontends.json "$@"
