#!/usr/bin/env bash
# The tests of front-ends whose libraries cannot live in .venv, in an environment beside it that has them all
# (benchmarks/peers.txt). Usage: test_frontends.sh PYTHON [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
if [ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" != True ]; then
    echo "the front-ends' tests are run on CPython 3.11; make the environment with it: remove .venv, then make venv PYTHON=python3.11" >&2
    exit 2
fi
side=$("$python" scripts/side_env.py .venvs/frontends --editable)
if ! cmp -s benchmarks/peers.txt .venvs/frontends/peers.txt; then
    "$side" -m pip install -q "$(grep '^torch==' benchmarks/peers.txt)"
    "$side" -m pip install -q -r benchmarks/peers.txt
    cp benchmarks/peers.txt .venvs/frontends/peers.txt
fi
"$side" -m pytest tests/frontends -m "not soak" --covers build/covers/frontends.json "$@"
