#!/usr/bin/env bash
# Builds the documentation site into build/site/html, in an environment of its own beside .venv. Warnings are errors.
# Usage: build_docs.sh PYTHON. STEPMILL_DOCS_ONLINE=1 takes the inventories of other projects from
# the network, and fetches every page of other sites that is linked.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if [ "$("$python" -c 'import sys; print(sys.version_info >= (3, 11))')" != True ]; then
    echo "the site needs Python 3.11 or newer; remove .venv, then: make venv PYTHON=python3.11" >&2
    exit 2
fi
side=$("$python" scripts/side_env.py build/docs-venv --editable)
PIP_CONSTRAINT='' "$side" -m pip install -q -r docs/requirements.txt
"$side" scripts/docs_pages.py
"$side" -m sphinx --fail-on-warning --keep-going --nitpicky -q --jobs 2 -b html build/site/source build/site/html
online=()
[ "${STEPMILL_DOCS_ONLINE:-}" = 1 ] && online=(--online)
"$side" scripts/docs_links.py build/site/html "${online[@]}"
echo "the site is build/site/html/index.html"
