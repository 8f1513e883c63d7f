"""Envs whose episodes depend on their seed, their options and the actions alone, and that can fail on purpose."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """Walks to a goal whose distance the seed decides; it succeeds if it is there before its time is over."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = spaces.Box(-100, 100, (3,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode: str | None = None, speed: int = 1) -> None:
        self.render_mode = render_mode
        self.speed = speed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        options = options or {}
        self.at, self.num_steps = 0.0, 0
        self.goal = float(self.np_random.integers(3, 12)) + options.get("further", 0)
        self.limit = options.get("limit", 15)
        return self._obs(), {}

    def step(self, action):
        self.num_steps += 1
        self.at += self.speed * (int(action) - 1) + 0.1 * self.np_random.standard_normal()
        terminated = self.at >= self.goal
        info: dict[str, Any] = {}
        if terminated or self.num_steps >= self.limit:
            info = {"is_success": terminated, "at": self.at}
        return self._obs(), -abs(self.goal - self.at) / 7, terminated, self.num_steps >= self.limit, info

    def render(self):
        return np.full((32, 48, 3), self.num_steps, np.uint8)

    def _obs(self):
        return np.array([self.at, self.goal, self.num_steps])


class FailsOnce(Walk):
    """Fails in the third step of each episode that is played for the first time: raises, dies or hangs, as the seed says."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.num_steps == 2 and self.seed % 2 == 0:
            mark = self.folder / f"{self.seed}"
            if not mark.exists():
                mark.touch()
                self.fail(self.seed // 2 % 3)
        return super().step(action)

    def fail(self, how: int) -> None:
        if how == 0:
            raise ValueError("for the first time")
        if how == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


class FailsAlways(Walk):
    """Raises whenever it is reset with seed 3."""

    def reset(self, *, seed=None, options=None):
        if seed == 3:
            raise RuntimeError("never with 3")
        return super().reset(seed=seed, options=options)


def forward(obs):
    """Go forward; a policy that computes each row by itself."""
    return np.where(obs[:, 0] < obs[:, 1], 2, 1)


class Unlucky(Walk):
    """In one of a hundred episodes kills its process, in one of two hundred hangs; which ones no seed decides."""

    def reset(self, *, seed=None, options=None):
        chance = int.from_bytes(os.urandom(4), "little") / 2**32
        self.fails_at = 1 + int(chance * 1e6) % 5 if chance < 0.015 else -1
        self.kills = chance < 0.01
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.num_steps == self.fails_at:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().step(action)
