"""Where things lie: environments of the peers, raw results, logs."""

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
OURS = "ours"
FRONTENDS = "frontends"  # stepmill beside the libraries that it has front-ends for

# One thread for every numeric library, in every engine: what is measured is the engine, not a thread pool within an env.
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
    """The Python that drives the engines of an environment; `ours` is the one that runs the benchmark unless set-up built one apart."""
    if venv == OURS:
        apart = VENVS / "stepmill-python"
        return Path(apart.read_text().strip()) if apart.exists() else Path(sys.executable)
    if venv == FRONTENDS:
        return ROOT / ".venvs" / FRONTENDS / "bin" / "python"
    return VENVS / venv / "bin" / "python"


def driver_environment() -> dict[str, str]:
    """Environment variables of a driver: single-threaded libraries, and this package importable from any working directory."""
    env = {**os.environ, **SINGLE_THREAD, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    env.pop("PIP_CONSTRAINT", None)
    return env
