"""Envs that count their steps, so that any transition that is lost, doubled or another env's shows; and that break on demand."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

KILL, RAISE, HANG = 10, 11, 12
"""Actions that break a `ChaosEnv`; those below 10 are harmless."""
NUM_ACTIONS = 13
HANG_S = 600.0
LENGTH = 12
IDENTITY, TAG, CLOCK, ACTION, LEVEL, BUMPS = range(6)
"""What the columns of an observation say; a `ChaosEnv` has the first four."""

Obs = NDArray[np.int64]


class ChaosEnv(gymnasium.Env[Obs, np.int64]):
    """Counts its steps; obs [4] int64: identity, a number drawn at reset, clock, last action. The reward is the clock."""

    observation_space = gymnasium.spaces.Box(-1, 2**62, (4,), np.int64)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, identity: int = 0, length: int = LENGTH) -> None:
        self.identity = identity
        self._length = length
        self._tag = self._clock = self._action = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._tag, self._clock, self._action = int(self.np_random.integers(2**62)), 0, -1
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        if action >= KILL:
            break_down(int(action))
        self._clock += 1
        self._action = int(action)
        return self._observe(), float(self._clock), False, self._clock >= self._length, {}

    def locate(self) -> int:
        """Return the identity, as a remote call."""
        return self.identity

    def _observe(self) -> Obs:
        return np.array([self.identity, self._tag, self._clock, self._action], np.int64)


def break_down(how: int) -> None:
    """Do what one of the breaking actions says."""
    if how == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == HANG:
        time.sleep(HANG_S)
    raise ValueError("this env was told to raise")


class Traps:
    """Files that each break one env once, in whatever process: a step or reset that finds its trap takes it away, and fails."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def lay(self, where: str, identity: int, how: int) -> None:
        """Break the next "step" or "reset" of that env object."""
        fresh = self._folder / "fresh"
        fresh.write_text(str(how))
        fresh.rename(self._folder / f"{where}-{identity}")

    def spring(self, where: str, identity: int) -> None:
        """Break down if there is a trap."""
        trap = self._folder / f"{where}-{identity}"
        try:
            how = int(trap.read_text())
        except FileNotFoundError:
            return
        trap.unlink()
        break_down(how)


class TrappedEnv(ChaosEnv):
    """Springs traps, and has a memory that calls change; obs [6]: two columns more, the attribute `level` and the bumps."""

    observation_space = gymnasium.spaces.Box(-1, 2**62, (6,), np.int64)

    def __init__(self, folder: str, identity: int, length: int) -> None:
        super().__init__(identity, length)
        self._traps = Traps(folder)
        self.level = 0
        self._bumps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        self._traps.spring("reset", self.identity)
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        self._traps.spring("step", self.identity)
        return super().step(action)

    def bump(self) -> tuple[int, int]:
        """Count a call; return the identity, and how many there were. No reset takes them back."""
        self._bumps += 1
        return self.identity, self._bumps

    def render(self) -> Obs:
        """Return what was observed last."""
        return self._observe()

    def _observe(self) -> Obs:
        return np.array([*super()._observe(), self.level, self._bumps], np.int64)


def length_of(identity: int, rows_each: int = 1) -> int:
    """How long the episodes of an env object are: rows of one env end together, envs do not."""
    return 8 + identity // rows_each % 5


def make_env(folder: str, identity: int, rows_each: int) -> object:
    """Make env object `identity`, with one row, or with several: row k is number `identity * rows_each + k`."""
    if rows_each == 1:
        return TrappedEnv(folder, identity, length_of(identity))
    rows = range(identity * rows_each, (identity + 1) * rows_each)
    makers = [partial(TrappedEnv, folder, row, length_of(row, rows_each)) for row in rows]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)
