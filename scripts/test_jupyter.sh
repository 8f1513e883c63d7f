#!/usr/bin/env bash
# Runs the tests of pools in notebooks, in a separate environment with Jupyter's kernel. Usage: test_jupyter.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
side=$("$1" scripts/side_env.py .venvs/jupyter --editable)
"$side" -m pip install -q "ipykernel>=6.29" "jupyter-client>=8"
"$side" -m pytest tests/integration/test_jupyter.py
