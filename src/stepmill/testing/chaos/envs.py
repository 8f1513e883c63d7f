"""Envs that count their steps, so that any transition that is lost, doubled or another env's shows; and that break on demand."""

from __future__ import annotations

import ctypes
import faulthandler
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
SCRIBBLE = 13
"""A way to break an env that only traps have: native code of it writes over memory of other workers."""
UNREADABLE = 9
"""The action whose info cannot be read, of an env that is to have such infos."""
HANG_S = 600.0
LENGTH = 12
IDENTITY, TAG, CLOCK, ACTION, LEVEL, BUMPS = range(6)
"""What the columns of an observation say; a `ChaosEnv` has the first four."""

Obs = NDArray[np.int64]


class ChaosEnv(gymnasium.Env[Obs, np.int64]):
    """Counts its steps; obs [4] int64: identity, a number drawn at reset, clock, last action. The reward is the clock."""

    observation_space = gymnasium.spaces.Box(-1, 2**62, (4,), np.int64)
    action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)

    def __init__(self, identity: int = 0, length: int = LENGTH, hang_s: float = HANG_S) -> None:
        self.identity = identity
        self._length = length
        self._hang_s = hang_s
        self._tag = self._clock = self._action = -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self._tag, self._clock, self._action = int(self.np_random.integers(2**62)), 0, -1
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        if action >= KILL:
            break_down(int(action), self._hang_s)
        self._clock += 1
        self._action = int(action)
        return self._observe(), float(self._clock), False, self._clock >= self._length, {}

    def locate(self) -> int:
        """Return the identity, as a remote call."""
        return self.identity

    def _observe(self) -> Obs:
        return np.array([self.identity, self._tag, self._clock, self._action], np.int64)


def break_down(how: int, hang_s: float = HANG_S) -> None:
    """Do what one of the breaking actions says. An env that hangs returns in the end: in a thread that was given up."""
    if how == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == RAISE:
        raise ValueError("this env was told to raise")
    if how == SCRIBBLE:
        scribble()
    time.sleep(hang_s)


def scribble() -> None:
    """Fill the slab with zeros from the first byte on that belongs to other workers, as a stray pointer would."""
    faulthandler.disable()  # it would print a page to stderr
    with open("/proc/self/maps", encoding="utf-8") as file:
        parts = [line.split()[:2] for line in file if "memfd:stepmill-slab" in line]
    for addresses, permissions in parts:
        start, stop = (int(address, 16) for address in addresses.split("-"))
        if "w" not in permissions:
            ctypes.memset(start, 0, stop - start)
    raise RuntimeError("this process can write everywhere in the slab, or was not ended for doing so")


class Unreadable:
    """A value that can be pickled, and raises when it is unpickled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _refuse, (self._number,)


def _refuse(number: int) -> None:
    kinds: tuple[type[BaseException], ...] = (ValueError, SystemExit, KeyboardInterrupt)
    raise kinds[number % len(kinds)]("this value cannot be read")


class Traps:
    """Files that each break one env once, in whatever process: a step, reset or call that finds its trap takes it away, and fails."""

    def __init__(self, folder: str, hang_s: float = HANG_S) -> None:
        self._folder = Path(folder)
        self._hang_s = hang_s

    def lay(self, where: str, identity: int, how: int, times: int = 1) -> None:
        """Break the next so many of "step", "reset", "call" or "build" of that env object."""
        fresh = self._folder / "fresh"
        fresh.write_text(f"{how} {times}")
        fresh.rename(self._folder / f"{where}-{identity}")

    def spring(self, where: str, identity: int) -> None:
        """Break down if there is a trap."""
        trap = self._folder / f"{where}-{identity}"
        try:
            how, times = map(int, trap.read_text().split())
        except FileNotFoundError:
            return
        if times > 1:
            trap.write_text(f"{how} {times - 1}")
        else:
            trap.unlink()
        break_down(how, self._hang_s)


class TrappedEnv(ChaosEnv):
    """Springs traps, and has a memory that calls change; obs [6]: two columns more, the attribute `level` and the bumps.

    Its infos say `at` [3]: the first three columns of the observation that they come with. With `has_unreadable` the action
    UNREADABLE adds a value that cannot be unpickled.
    """

    observation_space = gymnasium.spaces.Box(-1, 2**62, (6,), np.int64)

    def __init__(self, folder: str, identity: int, length: int, hang_s: float, *, has_unreadable: bool = False) -> None:
        super().__init__(identity, length, hang_s)
        self._has_unreadable = has_unreadable
        self._traps = Traps(folder, hang_s)
        self.level = 0
        self._bumps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        self._traps.spring("reset", self.identity)
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"at": obs[: CLOCK + 1]}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        self._traps.spring("step", self.identity)
        obs, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {"at": obs[: CLOCK + 1]}
        if self._has_unreadable and action == UNREADABLE:
            info["page"] = Unreadable(self._clock)
        return obs, reward, terminated, truncated, info

    def bump(self) -> tuple[int, int]:
        """Count a call; return the identity, and how many there were. No reset takes them back."""
        self._bumps += 1  # before it may fail: what is called again must come to the same
        self._traps.spring("call", self.identity)
        return self.identity, self._bumps

    def stumble(self) -> None:
        """Count a call, and fail, whenever it is made."""
        self._bumps += 1
        raise ValueError("this call fails")

    def render(self) -> Obs:
        """Return what was observed last."""
        self._traps.spring("call", self.identity)
        return self._observe()

    def _observe(self) -> Obs:
        return np.array([*super()._observe(), self.level, self._bumps], np.int64)


def length_of(row: int, rows_each: int = 1, *, is_ragged: bool = False) -> int:
    """How long the episodes of a row of the env objects are: rows of one end together, unless they are ragged."""
    return 8 + (row if is_ragged else row // rows_each) % 5


def make_env(
    folder: str,
    identity: int,
    rows_each: int,
    *,
    mode: str = "NextStep",
    hang_s: float = HANG_S,
    is_ragged: bool = False,
    has_unreadable: bool = False,
) -> object:
    """Make env object `identity`, with one row, or with several: row k is number `identity * rows_each + k`.

    Args:
        folder: of the traps.
        identity: number of the object.
        rows_each: how many rows it has.
        mode: of autoreset, which objects with several rows see to themselves.
        hang_s: how long one that hangs does so.
        is_ragged: whether its rows end at different times.
        has_unreadable: whether some infos have a value that cannot be unpickled; of objects with one row.
    """
    Traps(folder, hang_s).spring("build", identity)
    if rows_each == 1:
        return TrappedEnv(folder, identity, length_of(identity), hang_s, has_unreadable=has_unreadable)
    rows = range(identity * rows_each, (identity + 1) * rows_each)
    makers = [partial(TrappedEnv, folder, row, length_of(row, rows_each, is_ragged=is_ragged), hang_s) for row in rows]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
