"""A throw-away process of `benchmarks.faults`: one engine, one fault; it tells on stdout what its caller saw, and when.

    python -m benchmarks.fault_victim ADAPTER OPTIONS SCENARIO FOLDER

Env 1 fails when a file says so, and notes the moment on the clock that all processes share.
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
CULPRIT = 1
TIMEOUT_S = 1.0  # for engines that have a limit for a step
WARM_STEPS = 20
AFTER_STEPS = 5
WAIT_S = 3.0


class FaultEnv(gymnasium.Env[Any, Any]):
    """Observes (steps since construction, own number)."""

    observation_space = gymnasium.spaces.Box(0.0, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, number: int, folder: str) -> None:
        self._number, self._count, self._folder = number, 0, Path(folder)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.array([self._count, self._number], np.float64), {}

    def step(self, action: Any) -> Any:
        if self._number == CULPRIT and (self._folder / "fault").exists():
            self._fail()
        self._count += 1
        return np.array([self._count, self._number], np.float64), 1.0, False, False, {}

    def _fail(self) -> None:
        (self._folder / "fault").rename(self._folder / "done")  # once: an env that is played again must not fail again
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
    """Envs that fail, in place of the measured ones; `timed`, so that adapters note what they observe."""

    folder: str = ""

    @property
    def env_fns(self) -> list[EnvFn]:
        return [partial(FaultEnv, number, self.folder) for number in range(self.num_envs)]


class Stepmill(Adapter):
    """stepmill's Pool, stepped synchronously, under a policy; what is ready after an error is received."""

    def start(self) -> None:
        import stepmill

        options = stepmill.PoolOptions(envs_per_worker=1, seeding="per_episode", **self.job.options)  # type: ignore[arg-type]
        self.pool = stepmill.Pool(self.job.env_fns, backend="process", options=options)
        self.note_times(self.pool.reset(seed=0).obs)

    def advance(self) -> int:
        self.note_times(self.pool.step(self.next_actions()).obs)
        return self.num_envs

    def recover(self) -> None:
        """What a user does after an error: take what the others have, reset what failed."""
        if self.pool.ready_ids or any(state == 1 for state in self.pool.states):
            with contextlib.suppress(ValueError):
                self.note_times(self.pool.recv().obs)
        failed = [env_id for env_id, state in enumerate(self.pool.states) if state == 3]
        if failed:
            self.pool.reset(env_ids=failed)

    def close(self) -> None:
        self.pool.close()


def make_engine(adapter: str, options: dict[str, Any], folder: str, *, is_limited: bool) -> Any:
    """Build the engine of an adapter over failing envs; with a limit for steps, if it is to have one and can."""
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


def tell(event: str, **facts: object) -> None:
    """One line for the driver."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n")
    sys.stdout.flush()


def inflict(engine: Any, scenario: str, folder: Path) -> None:
    """Let env 1 fail, and tell what the caller sees, whether the others go on, and how it closes."""
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
    tell("told", error=None if error is None else type(error).__name__, text=text[:160])
    tell("others", **go_on(engine, before))
    start = time.monotonic()
    trouble = None
    try:
        engine.close()
    except Exception as exc:
        trouble = type(exc).__name__
    tell("closed", seconds=time.monotonic() - start, error=trouble)


def go_on(engine: Any, before: dict[float, float]) -> dict[str, Any]:
    """Whether the other envs go on from where they were, without having lost a step, and env 1 serves again."""
    try:
        if hasattr(engine, "recover"):
            engine.recover()
        reached = dict(engine._used_s)
        for _ in range(AFTER_STEPS):
            engine.advance()
    except Exception as exc:
        return {"error": type(exc).__name__, "text": str(exc)[:160]}
    after = engine._used_s
    others = [number for number in range(NUM_ENVS) if number != CULPRIT]
    kept = [number for number in others if after.get(number, 0) >= before.get(number, 0) + AFTER_STEPS]
    return {"error": None, "kept": kept, "is_whole": after.get(CULPRIT) != reached.get(CULPRIT)}


def loop(engine: Any) -> None:
    """Step until somebody ends it."""
    for _ in range(WARM_STEPS):
        engine.advance()
    tell("stepping", pid=os.getpid())
    while True:
        engine.advance()


def main() -> None:
    """Run one scenario; killed from outside if it does not end."""
    adapter, options, scenario, folder = sys.argv[1:5]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has started in the background
    engine = make_engine(adapter, json.loads(options), folder, is_limited=scenario == "hang")
    engine.start()
    tell("ready")
    if scenario in ("parent", "ctrl-c"):
        loop(engine)
    inflict(engine, scenario, Path(folder))


if __name__ == "__main__":
    main()
