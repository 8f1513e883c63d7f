#!/usr/bin/env bash
# Makes .venvs/frontends, an environment on top of .venv and .venvs/torch with every library of benchmarks/peers.txt, and prints
# its Python.
# Usage: frontends_env.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if [ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" != True ]; then
    echo "the front-ends' libraries need CPython 3.11; remove .venv, then: make venv PYTHON=python3.11" >&2
    exit 2
fi
side=$("$python" scripts/side_env.py .venvs/frontends --editable --torch)
if ! cmp -s benchmarks/peers.txt .venvs/frontends/peers.txt; then
    "$side" -m pip install -q -r benchmarks/peers.txt >&2
    cp benchmarks/peers.txt .venvs/frontends/peers.txt
fi
echo "$side"
