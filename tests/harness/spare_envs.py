"""Envs that say which object they are, and pools of them with spares."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode as GymnasiumMode
from gymnasium.vector import SyncVectorEnv

import stepmill
from stepmill.testing.gates import wait_at

RAISE, KILL = 8, 9
"""Actions that break a `Named`."""


class Named(gymnasium.Env[Any, Any]):
    """obs [5] int64: identity, resets, clock, a number drawn at reset, level. Its episodes have 1 to 5 steps, drawn too."""

    observation_space = gymnasium.spaces.Box(-1, 2**62, (5,), np.int64)
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, identity: int, gate: str | None = None, length: int = 0, marks: str | None = None) -> None:
        self.identity, self.gate, self.length, self.marks = identity, gate, length, marks
        self.num_resets = self.clock = self.tag = self.end = self.level = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.num_resets += 1
        if self.gate is not None and self.num_resets > 1:
            wait_at(self.gate)
        if self.marks is not None and self.num_resets > 1 and take_mark(self.marks, self.identity):
            raise ValueError("no next episode")
        self.clock = 0
        self.end = self.length or int(self.np_random.integers(1, 6))
        self.tag = int(self.np_random.integers(1000))
        return self.observe(), {"given": -1 if seed is None else seed, "big": np.full(300, self.identity)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == RAISE:
            raise ValueError("told to")
        if action == KILL:
            os.kill(os.getpid(), 9)
        self.clock += 1
        return self.observe(), float(action), self.clock >= self.end, False, {}

    def render(self) -> Any:
        return self.identity

    def observe(self) -> Any:
        return np.array([self.identity, self.num_resets, self.clock, self.tag, self.level], np.int64)


def take_mark(folder: str, identity: int) -> bool:
    """Whether a mark for this identity was there; it is gone then, so that only one reset finds it, in whatever process."""
    try:
        (Path(folder) / str(identity)).unlink()
    except FileNotFoundError:
        return False
    return True


def leave_mark(folder: object, identity: int) -> None:
    """Make the next reset of this identity raise."""
    (Path(str(folder)) / str(identity)).touch()


def named_pool(
    num_envs: int,
    num_spares: int,
    *,
    backend: str = "thread",
    num_workers: int | None = None,
    env: Any = None,
    **options: Any,
) -> stepmill.Pool:
    """A pool of `Named`, or of what `env(identity)` makes."""
    if backend == "process":
        options.setdefault("context", "fork")
    fns = [partial(env or Named, identity) for identity in range(num_envs + num_spares)]
    return stepmill.Pool(
        fns,
        backend=backend,
        num_workers=num_workers,
        options=stepmill.PoolOptions(resets={"spare_envs": num_spares}, **options),
    )


def batched(first: int, length: int = 3) -> SyncVectorEnv:
    """Two rows that end together."""
    return SyncVectorEnv(
        [partial(Named, 2 * first + row, None, length) for row in range(2)], autoreset_mode=GymnasiumMode.NEXT_STEP
    )
