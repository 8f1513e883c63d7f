#!/usr/bin/env bash
# Runs the tests marked torch, in a separate environment with PyTorch. Usage: test_torch.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if [ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" != True ]; then
    echo "the tests with torch need CPython 3.11; remove .venv, then: make venv PYTHON=python3.11" >&2
    exit 2
fi
side=$("$python" scripts/side_env.py .venvs/torch)
"$side" -m pytest -m "torch and not soak" --covers=build/covers/torch.json
