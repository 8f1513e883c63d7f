#!/usr/bin/env bash
# Runs the tests marked ray, and the contract tests with backend="ray", in a separate environment with Ray.
# Usage: test_ray.sh PYTHON [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
if [ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" != True ]; then
    echo "the tests with Ray need CPython 3.11; remove .venv, then: make venv PYTHON=python3.11" >&2
    exit 2
fi
side=$("$python" scripts/side_env.py .venvs/ray --editable)
"$side" -m pip install -q "ray==2.60.0"
if [ $# -gt 0 ]; then
    exec "$side" -m pytest --where ray -m "not soak" "$@"
fi
# The other contract tests take minutes, since each starts actors: make test-ray PYTEST_ARGS="-m ray tests/contract"
"$side" -m pytest --where ray -m "ray and not soak" --covers=build/covers/ray.json tests/ray \
    tests/contract/test_pool_sync.py tests/contract/test_pool_async.py
"$side" -m pytest tests/frontends/test_examples.py -k ray_cartpole
