"""Envs that count their steps, which shows transitions that are lost, doubled or of another env; and that fail on demand."""

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
"""A fault that only traps cause: native code of the env overwrites memory of other workers."""
UNREADABLE = 9
"""The action after which an env with `has_unreadable` returns an info that cannot be unpickled."""
HANG_S = 600.0
LENGTH = 12
IDENTITY, TAG, CLOCK, ACTION, LEVEL, BUMPS = range(6)
"""The columns of an observation; a `ChaosEnv` has the first four."""

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
            fail(int(action), self._hang_s)
        self._clock += 1
        self._action = int(action)
        return self._observe(), float(self._clock), False, self._clock >= self._length, {}

    def locate(self) -> int:
        """Return the identity; for remote calls."""
        return self.identity

    def _observe(self) -> Obs:
        return np.array([self.identity, self._tag, self._clock, self._action], np.int64)


def fail(how: int, hang_s: float = HANG_S) -> None:
    """Kill the process, raise, scribble or hang, as the action says. A hang ends after `hang_s`, because threads cannot be killed."""
    if how == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == RAISE:
        raise ValueError("this env raises, as its action says")
    if how == SCRIBBLE:
        scribble()
    time.sleep(hang_s)


def scribble() -> None:
    """Write zeros to the parts of the slab that belong to other workers, as a stray pointer could."""
    faulthandler.disable()  # it would print a page to stderr
    with open("/proc/self/maps", encoding="utf-8") as file:
        parts = [line.split()[:2] for line in file if "memfd:stepmill-slab" in line]
    for addresses, permissions in parts:
        start, stop = (int(address, 16) for address in addresses.split("-"))
        if "w" not in permissions:
            ctypes.memset(start, 0, stop - start)
    raise RuntimeError("this process can write to the whole slab, or was not ended for a write that is not allowed")


class Unreadable:
    """A value that can be pickled and that raises when it is unpickled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _refuse, (self._number,)


def _refuse(number: int) -> None:
    kinds: tuple[type[BaseException], ...] = (ValueError, SystemExit, KeyboardInterrupt)
    raise kinds[number % len(kinds)]("this value cannot be read")


class Traps:
    """Files that each make one env fail once, in any process: a step, reset or call removes its trap, and fails."""

    def __init__(self, folder: str, hang_s: float = HANG_S) -> None:
        self._folder = Path(folder)
        self._hang_s = hang_s

    def set(self, where: str, identity: int, how: int, times: int = 1) -> None:
        """Make the next `times` steps, resets, calls or builds (`where`) of an env object fail."""
        fresh = self._folder / f"fresh-{where}-{identity}"
        fresh.write_text(f"{how} {times}")
        fresh.rename(self._folder / f"{where}-{identity}")

    def trigger(self, where: str, identity: int) -> None:
        """Fail if there is a trap."""
        trap = self._folder / f"{where}-{identity}"
        try:
            how, times = map(int, trap.read_text().split())
        except FileNotFoundError:
            return
        if times > 1:
            self.set(where, identity, how, times - 1)  # whole, even if another env ends this process now
        else:
            trap.unlink()
        fail(how, self._hang_s)


class TrappedEnv(ChaosEnv):
    """Triggers traps, and has state that calls change; obs [6]: two more columns, the attribute `level` and the bumps.

    Its infos have `at` [3]: the first three columns of the same observation. With `has_unreadable` the action UNREADABLE adds
    a value that cannot be unpickled.
    """

    observation_space = gymnasium.spaces.Box(-1, 2**62, (6,), np.int64)

    def __init__(self, folder: str, identity: int, length: int, hang_s: float, *, has_unreadable: bool = False) -> None:
        super().__init__(identity, length, hang_s)
        self._has_unreadable = has_unreadable
        self._traps = Traps(folder, hang_s)
        self.level = 0
        self._bumps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, dict[str, Any]]:
        self._traps.trigger("reset", self.identity)
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"at": obs[: CLOCK + 1]}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        self._traps.trigger("step", self.identity)
        obs, reward, terminated, truncated, _ = super().step(action)
        info: dict[str, Any] = {"at": obs[: CLOCK + 1]}
        if self._has_unreadable and action == UNREADABLE:
            info["page"] = Unreadable(self._clock)
        return obs, reward, terminated, truncated, info

    def bump(self) -> tuple[int, int]:
        """Count a call; return the identity and the count. A reset does not change the count."""
        self._bumps += 1  # before it may fail, so that a repeated call has the same effect
        self._traps.trigger("call", self.identity)
        return self.identity, self._bumps

    def stumble(self) -> None:
        """Count a call, and raise."""
        self._bumps += 1
        raise ValueError("this call fails")

    def render(self) -> Obs:
        """Return the newest observation."""
        self._traps.trigger("call", self.identity)
        return self._observe()

    def _observe(self) -> Obs:
        return np.array([*super()._observe(), self.level, self._bumps], np.int64)


def length_of(row: int, rows_each: int = 1, *, is_ragged: bool = False) -> int:
    """Return the episode length of a row. The rows of an env object have the same length unless they are ragged."""
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
        folder: where the traps are.
        identity: number of the object.
        rows_each: how many rows it has.
        mode: autoreset mode, for objects with several rows, which reset themselves.
        hang_s: how long a hang lasts.
        is_ragged: whether its rows end at different times.
        has_unreadable: whether some infos have a value that cannot be unpickled; for objects with one row.
    """
    Traps(folder, hang_s).trigger("build", identity)
    if rows_each == 1:
        return TrappedEnv(folder, identity, length_of(identity), hang_s, has_unreadable=has_unreadable)
    rows = range(identity * rows_each, (identity + 1) * rows_each)
    makers = [partial(TrappedEnv, folder, row, length_of(row, rows_each, is_ragged=is_ragged), hang_s) for row in rows]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
