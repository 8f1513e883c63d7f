#!/usr/bin/env bash
# Runs Python in gdb, with an extension that is not optimised, in .venvs/debug. Builds what has changed first.
# Usage: debug_python.sh PYTHON [ARGUMENTS OF PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
side=$("$python" scripts/side_env.py .venvs/debug)
PATH="$(dirname "$python"):$PATH" "$side" -m pip install -q --no-deps --no-build-isolation --force-reinstall \
    -Cbuild-dir=build/debug -Ccmake.build-type=Debug -Ccmake.define.STEPMILL_WERROR=ON . >&2
exec gdb -q -ex 'set breakpoint pending on' --args "$side" "$@"
