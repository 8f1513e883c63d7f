"""Runs one engine in its own process. Requests come over stdin and answers go to stdout, one JSON object per line.

    -> {"op": "start", "adapter": "gym_async", "env": "noop", "num_envs": 8, "options": {...}}    <- {"start_s": 0.2, "num_threads": 1}
    -> {"op": "run", "seconds": 1.5}                                                            <- {"steps": ..., "wall_s": ..., "env_s": ...}
    -> {"op": "steps", "count": 10000000}                                                       <- {"steps": ...}
    -> {"op": "close"}                                                                          <- {"close_s": 0.1}

An answer with "error" describes a failure. The output of engines and env libraries to stdout goes to the log.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.adapters.base import Adapter, Job

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Driver:
    """Owns one engine and runs it on request."""

    def __init__(self) -> None:
        self._engine: Adapter | None = None

    def start(self, adapter: str, env: str, num_envs: int, options: dict[str, Any]) -> dict[str, Any]:
        """Import the adapter, then construct the engine and reset all envs. The import is not timed."""
        module = importlib.import_module(f"benchmarks.adapters.{adapter}")
        _limit_threads()
        engine: Adapter = module.Engine(Job(env, num_envs, options))
        begin = time.perf_counter()
        self._engine = engine
        engine.start()
        return {"start_s": time.perf_counter() - begin}

    def prepare(self, adapter: str, env: str) -> dict[str, Any]:
        """Import the modules that a learner imports before it makes its envs, so that they do not count as memory of envs."""
        importlib.import_module(f"benchmarks.adapters.{adapter}")
        return {"ready": env}

    def run(self, seconds: float) -> dict[str, Any]:
        return dataclasses.asdict(self._started_engine().run(seconds))

    def steps(self, count: int) -> dict[str, Any]:
        """Step until at least `count` env steps are done."""
        advance = self._started_engine().advance
        done = 0
        while done < count:
            done += advance()
        return {"steps": done}

    def close(self) -> dict[str, Any]:
        begin = time.perf_counter()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        return {"close_s": time.perf_counter() - begin}

    def _started_engine(self) -> Adapter:
        if self._engine is None:
            raise RuntimeError("no engine: send start first")
        return self._engine


def _limit_threads() -> None:
    # Only for libraries that the adapter imported: an engine without torch must not load torch.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(1)


def _answer(ops: dict[str, Callable[..., dict[str, Any]]], line: str) -> dict[str, Any]:
    request = json.loads(line)
    try:
        return ops[request.pop("op")](**request)
    except Exception as exc:
        traceback.print_exc(file=sys.stderr)
        return {"error": f"{type(exc).__name__}: {exc}"}


def _private_stdout() -> TextIO:
    # File descriptor 1 becomes the log, so that output of an engine or its workers cannot be mistaken for an answer.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def main() -> None:
    """Answer requests until `close` or the end of stdin."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If a launcher ends, its workers stay in this tree, where their CPU time is counted and where they can be killed.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    replies = _private_stdout()
    driver = Driver()
    ops: dict[str, Callable[..., dict[str, Any]]] = {
        "start": driver.start,
        "prepare": driver.prepare,
        "run": driver.run,
        "steps": driver.steps,
        "close": driver.close,
    }
    # A private working directory: PufferLib, for example, leaves a link in the directory in which it is imported.
    with tempfile.TemporaryDirectory(prefix="stepmill-bench-", ignore_cleanup_errors=True) as scratch:
        os.chdir(scratch)
        for line in sys.stdin:
            answer = _answer(ops, line)
            replies.write(json.dumps(answer) + "\n")
            if "close_s" in answer:
                break
        with contextlib.suppress(Exception):
            driver.close()


if __name__ == "__main__":
    main()
