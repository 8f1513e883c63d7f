#!/usr/bin/env bash
# Choose the newest versions that suit every supported Python, and write them to constraints.txt. Usage: lock.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
folder=.venvs/lock
"$python" -m venv "$folder"
PIP_CONSTRAINT='' "$folder/bin/pip" install -q uv
new=$(mktemp)
{
    echo '# What `make venv` installs, exact on every supported Python. Written by `make lock`; do not edit.'
    "$folder/bin/uv" pip compile -q --universal --upgrade --python-version 3.10 --no-header --no-annotate \
        --no-emit-package stepmill --extra dev pyproject.toml
} >"$new"
cp "$new" constraints.txt
rm "$new"
