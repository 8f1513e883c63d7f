"""Paths of the peers' environments, of raw results and of logs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / "benchmarks" / ".venvs"
RESULTS = ROOT / "benchmarks" / "results"
LOGS = RESULTS / "logs"
PUFFER = VENVS / "pufferlib"
PEERS = "peers"
DIENGINE = "diengine"
ENVPOOL = "envpool"  # the newest, which needs a newer Python than the other peers
OURS = "ours"
FRONTENDS = "frontends"  # stepmill together with the libraries of its front-ends
PROGRAMS = "programs"  # stepmill together with what CleanRL's, RL Zoo's and skrl's programs import

# One thread for every numeric library in every engine, so that the engine is measured and not a thread pool in an env.
SINGLE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "OPENCV_FOR_THREADS_NUM",
    ),
    "1",
)


def interpreter_of(venv: str) -> Path:
    """Return the Python of an environment. For `ours` it is the current one, unless the set-up built stepmill in another."""
    if venv == OURS:
        chosen = VENVS / "stepmill-python"
        return Path(chosen.read_text().strip()) if chosen.exists() else Path(sys.executable)
    if venv in (FRONTENDS, PROGRAMS):
        return ROOT / ".venvs" / venv / "bin" / "python"
    return VENVS / venv / "bin" / "python"


def driver_environment() -> dict[str, str]:
    """Return the environment variables of a driver: single-threaded libraries, and this package on the Python path."""
    return {**user_environment(), **SINGLE_THREAD, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def user_environment() -> dict[str, str]:
    """Return this process's environment variables as a user of an installed package has them: the modules of a checkout are compiled once, too."""
    return {
        name: value for name, value in os.environ.items() if name not in ("PIP_CONSTRAINT", "PYTHONDONTWRITEBYTECODE")
    }
