"""The environments of the cells, which are the same for every engine.

Every factory is a picklable callable without arguments, so that it works with fork, forkserver and spawn. Envs whose time is measured
(`SleepEnv`, `BusyEnv`, `SlowResetEnv`) report in their observation how much env time they have used so far, and a number of the object.
The driver thus learns the env time of a round from the observations, with every engine.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

EnvFn = Callable[[], gymnasium.Env[Any, Any]]
_serials = itertools.count()

# A sleep counts at most this much longer than requested: a longer delay is caused by the engine, which occupies the core.
LATE_WAKE_S = 150e-6


class NoopEnv(gymnasium.Env[Any, Any]):
    """Always returns the same result; a step costs one method call."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        if dtype == "uint8":
            self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        else:
            self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, shape, np.dtype(dtype).type)
        self.action_space = gymnasium.spaces.Discrete(4)
        obs = np.zeros(shape, dtype)
        self._first: tuple[Any, dict[str, Any]] = (obs, {})
        self._result: tuple[Any, float, bool, bool, dict[str, Any]] = (obs, 1.0, False, False, {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._first

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._result


class TimedEnv(gymnasium.Env[Any, Any]):
    """An env that draws the duration of each step: lognormal, coefficient of variation 1, seeded by its index."""

    def __init__(self, index: int, mean_s: float) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, np.inf, (2,), np.float64)
        self.action_space = gymnasium.spaces.Discrete(4)
        self._rng = random.Random(index)
        self._sigma = math.sqrt(math.log(2.0))
        self._mu = math.log(mean_s) - self._sigma**2 / 2
        self.used_s = 0.0
        self.serial = float(os.getpid() * 4096 + next(_serials))

    def _draw_s(self) -> float:
        return self._rng.lognormvariate(self._mu, self._sigma)

    def _obs(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array((self.used_s, self.serial))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._obs(), {}


class SleepEnv(TimedEnv):
    """A step sleeps: as many envs can run at once as there are threads."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        planned_s = self._draw_s()
        start = time.perf_counter()
        time.sleep(planned_s)
        self.used_s += min(time.perf_counter() - start, planned_s + LATE_WAKE_S)
        return self._obs(), 1.0, False, False, {}


class BusyEnv(TimedEnv):
    """A step burns CPU time of its own thread: as many envs can run at once as there are cores."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.used_s += burn(self._draw_s())
        return self._obs(), 1.0, False, False, {}


class SlowResetEnv(TimedEnv):
    """Steps of 20 microseconds and resets of 10 ms of CPU time; episodes of half to one and a half `length` steps."""

    STEP_S = 20e-6
    RESET_S = 10e-3

    def __init__(self, index: int, length: int) -> None:
        super().__init__(index, self.STEP_S)
        self._length = length
        # The first episodes have different lengths, so that the envs are out of phase as in a long run.
        self._left = self._rng.randint(1, length)
        self._was_reset = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._was_reset:
            self._left = self._rng.randint(self._length // 2, 3 * self._length // 2)
            self.used_s += burn(self.RESET_S)
        self._was_reset = True
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.used_s += burn(self.STEP_S)
        self._left -= 1
        return self._obs(), 1.0, self._left <= 0, False, {}


def burn(cpu_s: float) -> float:
    """Use `cpu_s` seconds of CPU time of the calling thread, and return `cpu_s`. Time while preempted does not count."""
    clock = time.thread_time
    end = clock() + cpu_s
    while clock() < end:
        pass
    return cpu_s


def make_cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def make_halfcheetah() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5")


def make_pong() -> gymnasium.Env[Any, Any]:
    """Return Pong with the standard preprocessing: frame skip 4, grayscale 84x84, stack 4, no sticky actions."""
    import ale_py
    import cv2

    cv2.setNumThreads(1)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84, grayscale_obs=True)
    return gymnasium.wrappers.FrameStackObservation(env, 4)


NUM_ACTIONS = {"cartpole": 2, "pong": 6}


def _make_unity(shape: tuple[int, ...]) -> Any:
    from benchmarks.unity import NoopUnity  # not every peer's environment has stepmill

    return NoopUnity(shape)


def env_fns(name: str, num_envs: int) -> list[EnvFn]:
    """Return the factories of the envs of a cell, one per env. The index seeds the random durations."""
    indexed: dict[str, Callable[[int], EnvFn]] = {
        "noop": lambda _: functools.partial(NoopEnv, (4,), "float32"),
        "image84": lambda _: functools.partial(NoopEnv, (84, 84, 4), "uint8"),
        "image210": lambda _: functools.partial(NoopEnv, (210, 160, 3), "uint8"),
        "sleep1ms": lambda i: functools.partial(SleepEnv, i, 1e-3),
        "cpu200us": lambda i: functools.partial(BusyEnv, i, 200e-6),
        "slowreset": lambda i: functools.partial(SlowResetEnv, i, 10),
        "slowreset500": lambda i: functools.partial(SlowResetEnv, i, 500),
        "cartpole": lambda _: make_cartpole,
        "halfcheetah": lambda _: make_halfcheetah,
        "pong": lambda _: make_pong,
        "unity84": lambda _: functools.partial(_make_unity, (84, 84, 3)),
    }
    return [indexed[name](i) for i in range(num_envs)]


def action_ring(name: str, num_envs: int, length: int = 64) -> list[np.ndarray[Any, Any]]:
    """Return random actions for `length` steps, the same for all engines: [num_envs] int64, or [num_envs, 6] float32."""
    rng = np.random.default_rng(0)
    if name == "halfcheetah":
        return list(rng.uniform(-1.0, 1.0, (length, num_envs, 6)).astype(np.float32))
    return list(rng.integers(0, NUM_ACTIONS.get(name, 4), (length, num_envs)))
