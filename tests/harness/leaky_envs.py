"""Envs that leak memory, and show in their values everything that a restart between episodes could change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

STATM = Path("/proc/self/statm")


class LeakyEnv(gymnasium.Env[Any, Any]):
    """obs [4] int64: identity, clock, a number drawn in this call, level. Episodes have `length` steps, or 1 to 5, drawn at reset.

    Each reset keeps `leak_mb` MiB without limit. Its info has the seed that it was given, -1 for none. `folder` gets a file for each env object
    that is closed.
    """

    observation_space = gymnasium.spaces.Box(-1, 2**40, (4,), np.int64)
    action_space = gymnasium.spaces.Discrete(10)

    def __init__(self, identity: int = 0, length: int = 0, leak_mb: int = 0, folder: Path | None = None) -> None:
        self.identity, self.length, self.leak_mb, self.folder = identity, length, leak_mb, folder
        self.clock = self.end = self.level = 0
        self.kept: list[bytearray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.leak_mb:
            self.kept.append(bytearray(b"x") * (self.leak_mb << 20))
        self.clock = 0
        self.end = self.length or int(self.np_random.integers(1, 6))
        return self.observe(), {"seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.clock += 1
        return self.observe(), float(action) + 0.5, self.clock >= self.end, False, {"clock": self.clock}

    def observe(self) -> Any:
        return np.array([self.identity, self.clock, self.np_random.integers(1 << 30), self.level], np.int64)

    def locate(self) -> int:
        return os.getpid()

    def measure_mb(self) -> int:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20

    def close(self) -> None:
        if self.folder is not None:
            (self.folder / f"{self.identity}-{os.getpid()}").touch()
