"""The process that `benchmarks.faults` starts for one engine and one fault. It reports events and their times on stdout.

    python -m benchmarks.fault_victim ADAPTER OPTIONS SCENARIO FOLDER

Env 1 fails when the file FOLDER/fault exists, and writes the time of the monotonic clock to FOLDER/moment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.adapters.base import Adapter, Job
from benchmarks.envs import EnvFn

NUM_ENVS = 4
FAILING_ENV = 1
TIMEOUT_S = 1.0  # for engines that have a limit for a step
WARM_STEPS = 20
AFTER_STEPS = 5
WAIT_S = 3.0


class FaultEnv(gymnasium.Env[Any, Any]):
    """Its observation is (steps since construction, its number)."""

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, number: int, folder: str) -> None:
        self._number, self._count, self._folder = number, 0, Path(folder)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.array([self._count, self._number], np.float64), {}

    def step(self, action: Any) -> Any:
        if self._number == FAILING_ENV and (self._folder / "fault").exists():
            self._fail()
        self._count += 1
        return np.array([self._count, self._number], np.float64), 1.0, False, False, {}

    def _fail(self) -> None:
        (self._folder / "fault").rename(self._folder / "done")  # only once: a replayed env must not fail again
        kind = (self._folder / "done").read_text()
        (self._folder / "moment").write_text(str(time.monotonic()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind in ("hang", "wait"):
            time.sleep(600 if kind == "hang" else WAIT_S)
        if kind == "wait":
            return
        raise RuntimeError("a deliberate failure")


@dataclass(frozen=True)
class FaultJob(Job):
    """A job with envs that fail. It is a timed job, so that adapters record the observations."""

    folder: str = ""

    @property
    def env_fns(self) -> list[EnvFn]:
        return [partial(FaultEnv, number, self.folder) for number in range(self.num_envs)]


class Stepmill(Adapter):
    """stepmill's Pool with a fault policy, stepped synchronously."""

    def start(self) -> None:
        import stepmill

        options = stepmill.PoolOptions(envs_per_worker=1, seeding="per_episode", **self.job.options)  # type: ignore[arg-type]
        self.pool = stepmill.Pool(self.job.env_fns, backend="process", options=options)
        self.record_times(self.pool.reset(seed=0).obs)

    def advance(self) -> int:
        self.record_times(self.pool.step(self.next_actions()).obs)
        return self.num_envs

    def recover(self) -> None:
        """Do what a user does after an error: receive the results of the other envs, and reset the failed ones."""
        if self.pool.ready_ids or any(state == 1 for state in self.pool.states):
            with contextlib.suppress(ValueError):
                self.record_times(self.pool.recv().obs)
        failed = [env_id for env_id, state in enumerate(self.pool.states) if state == 3]
        if failed:
            self.pool.reset(env_ids=failed)

    def close(self) -> None:
        self.pool.close()


def make_engine(adapter: str, options: dict[str, Any], folder: str, *, is_limited: bool) -> Any:
    """Build the engine of an adapter over failing envs, with a time limit for steps if `is_limited` and if it supports one."""
    if adapter == "stepmill":
        limit = {"step_timeout_s": TIMEOUT_S} if is_limited else {}
        return Stepmill(FaultJob("sleep1ms", NUM_ENVS, {**options, **limit}, folder))
    job = FaultJob("sleep1ms", NUM_ENVS, options, folder)
    engine = importlib.import_module(f"benchmarks.adapters.{adapter}").Engine(job)
    if adapter == "gym_async" and is_limited:
        start = engine.start

        def start_with_limit() -> None:
            start()
            envs = engine.envs

            def step(actions: Any) -> Any:
                envs.step_async(actions)
                return envs.step_wait(timeout=TIMEOUT_S)

            envs.step = step

        engine.start = start_with_limit
    return engine


def report(event: str, **facts: object) -> None:
    """Write one event with its time to stdout."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")
    sys.stdout.flush()


def run_scenario(engine: Any, scenario: str, folder: Path) -> None:
    """Let env 1 fail, and report the caller's error, whether the other envs go on, and how the engine closes."""
    for _ in range(WARM_STEPS):
        engine.advance()
    (folder / "wanted").write_text(scenario)
    (folder / "wanted").rename(folder / "fault")
    before = dict(engine._used_s)
    error = None
    try:
        while not (folder / "moment").exists():
            engine.advance()
        engine.advance()
    except Exception as exc:
        error = exc
    text = "" if error is None else str(error).strip().splitlines()[0] if str(error).strip() else ""
    report("reported", error=None if error is None else type(error).__name__, text=text[:160])
    report("others", **go_on(engine, before))
    start = time.monotonic()
    close_error = None
    try:
        engine.close()
    except Exception as exc:
        close_error = type(exc).__name__
    report("closed", seconds=time.monotonic() - start, error=close_error)


def go_on(engine: Any, before: dict[float, float]) -> dict[str, Any]:
    """Step on, and return which other envs continue without a lost step, and whether env 1 works again."""
    try:
        if hasattr(engine, "recover"):
            engine.recover()
        reached = dict(engine._used_s)
        for _ in range(AFTER_STEPS):
            engine.advance()
    except Exception as exc:
        return {"error": type(exc).__name__, "text": str(exc)[:160]}
    after = engine._used_s
    others = [number for number in range(NUM_ENVS) if number != FAILING_ENV]
    kept = [number for number in others if after.get(number, 0) >= before.get(number, 0) + AFTER_STEPS]
    return {"error": None, "kept": kept, "is_whole": after.get(FAILING_ENV) != reached.get(FAILING_ENV)}


def loop(engine: Any) -> None:
    """Step until the process is killed."""
    for _ in range(WARM_STEPS):
        engine.advance()
    report("stepping", pid=os.getpid())
    while True:
        engine.advance()


def main() -> None:
    """Run one scenario. `benchmarks.faults` kills this process if it does not end."""
    adapter, options, scenario, folder = sys.argv[1:5]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background processes with SIGINT ignored
    engine = make_engine(adapter, json.loads(options), folder, is_limited=scenario == "hang")
    engine.start()
    report("ready")
    if scenario in ("parent", "ctrl-c"):
        loop(engine)
    run_scenario(engine, scenario, Path(folder))


if __name__ == "__main__":
    main()
