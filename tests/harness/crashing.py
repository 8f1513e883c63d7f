"""An env that fails in the way its action says; its observations depend on seed and all actions since the reset."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

RAISE, BAD_OUTPUT, SEGFAULT, ABORT, EXIT, HANG, HANG_C, DIE_IN_RESET = 90, 91, 92, 93, 94, 95, 96, 97


class PlantedBug(Exception):
    """What RAISE raises."""


def _segfault() -> None:
    ctypes.string_at(0)


DEEDS: dict[int, Callable[[], Any]] = {
    SEGFAULT: _segfault,
    ABORT: os.abort,
    EXIT: lambda: os._exit(17),
    HANG: lambda: threading.Event().wait(600),
    HANG_C: lambda: ctypes.CDLL(None).sleep(600),
}


class CrashingEnv(gymnasium.Env[NDArray[np.float64], np.int64]):
    """Observes [random number, sum of actions]; its episode ends after `length` steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, length: int = 1000, *, offset: float = 0.0, is_broken: bool = False) -> None:
        if is_broken:
            raise PlantedBug("in the constructor")
        self.length, self.offset = length, offset
        self.fails_in_reset = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if self.fails_in_reset:
            raise PlantedBug("in a reset")
        self.count, self.sum = 0, float((options or {}).get("start", 0.0))
        return self._observe(), {}

    def step(self, action: np.int64) -> Any:
        if action == RAISE:
            raise PlantedBug(f"after {self.count} steps")
        if action == BAD_OUTPUT:
            return np.zeros(3), 0.0, False, False, {}
        if action == DIE_IN_RESET:
            self.fails_in_reset = True
            self.count = self.length
        elif int(action) in DEEDS:
            DEEDS[int(action)]()
        self.count += 1
        self.sum += float(action)
        return self._observe(), float(action) + self.offset, self.count >= self.length, False, {}

    def _observe(self) -> NDArray[np.float64]:
        return np.array([self.np_random.random(), self.sum])


class SeedlessFailure(CrashingEnv):
    """Fails in a reset without a seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.fails_in_reset = seed is None
        return super().reset(seed=seed, options=options)


class RestlessEnv(CrashingEnv):
    """Observes something else in each life: the pid is part of it."""

    def _observe(self) -> NDArray[np.float64]:
        return np.array([float(id(self)), float(os.getpid())])


def make_whole() -> CrashingEnv:
    """The constructor that a user gives when the capsule has none."""
    return CrashingEnv()


def make_other() -> gymnasium.Env[Any, Any]:
    """An env with another action space."""
    return gymnasium.make("Pendulum-v1")


def steps(actions: Sequence[int], num_envs: int, env_id: int) -> list[NDArray[np.int64]]:
    """Return rows of actions in which one env gets these, and all others 1."""
    return [np.array([action if i == env_id else 1 for i in range(num_envs)]) for action in actions]
