#!/usr/bin/env bash
# Choose the newest versions that suit every supported Python, and write them to constraints.txt. Usage: lock.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
side=$("$python" scripts/side_env.py .venvs/lock)
PIP_CONSTRAINT='' "$side" -m pip install -q uv
{
    echo '# What `make venv` installs, exact on every supported Python. Written by `make lock`; do not edit.'
    "$(dirname "$side")/uv" pip compile -q --universal --upgrade --python-version 3.10 --no-header --no-annotate \
        --no-emit-package stepmill --extra dev pyproject.toml
} >constraints.new
mv constraints.new constraints.txt
