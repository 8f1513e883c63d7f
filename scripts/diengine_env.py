"""Make .venvs/diengine, an environment with DI-engine 0.5.3 on top of .venv and .venvs/torch, and print its Python.

Its packages are those of the benchmarks' environment; stepmill and pytest are those of .venv. A complete environment is kept.
"""

import os
import subprocess
import sys
from pathlib import Path

from side_env import make_side_env

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.setup import DIENGINE_ITSELF, DIENGINE_PACKAGES, TORCH  # noqa: E402 - the root is put on the path first


def make_diengine_env() -> Path:
    """Make the environment if necessary, and return its Python."""
    folder = ROOT / ".venvs" / "diengine"
    python = make_side_env(folder, editable=True, has_torch=True)
    installed = folder / "packages"
    wanted = "\n".join((*DIENGINE_PACKAGES, DIENGINE_ITSELF))
    if installed.exists() and installed.read_text(encoding="utf-8") == wanted:
        return python
    installed.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for packages in ([TORCH, "numpy==1.26.4"], list(DIENGINE_PACKAGES), ["--no-deps", DIENGINE_ITSELF]):
        # The caller reads stdout, so pip's output goes to stderr.
        subprocess.run([*install, *packages], env=environment, stdout=sys.stderr, check=True)
    installed.write_text(wanted, encoding="utf-8")
    return python


if __name__ == "__main__":
    if sys.version_info[:2] != (3, 11):
        sys.exit("DI-engine's environment needs CPython 3.11; remove .venv, then: make venv PYTHON=python3.11")
    print(make_diengine_env())
