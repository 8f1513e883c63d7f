#!/usr/bin/env bash
# Runs the tests marked mlagents with both generations of mlagents-envs, each in a separate environment with the NumPy and
# the protobuf versions that it needs. Usage: test_mlagents.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
if [ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))')" != True ]; then
    echo "the tests with mlagents-envs need CPython 3.11; remove .venv, then: make venv PYTHON=python3.11" >&2
    exit 2
fi
unset PIP_CONSTRAINT  # its NumPy is newer than what one of these can use
run() {  # FOLDER MLAGENTS_ENVS_VERSION NUMPY
    side=$("$python" scripts/side_env.py ".venvs/$1" --editable)
    "$side" -m pip install -q --no-deps "mlagents-envs==$2" "$3" "protobuf==3.20.3" "grpcio>=1.48" "typing-extensions" "Pillow>=9" "PyYAML>=6"
    "$side" -m pytest -m "mlagents and not soak" --covers="build/covers/$1.json" tests/frontends/mlagents
}
run mlagents28 0.28.0 "numpy>=2,<3"
run mlagents15 0.15.1 "numpy==1.23.5"
