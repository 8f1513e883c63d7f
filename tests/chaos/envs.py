"""Envs that count their steps, which shows transitions that are lost, doubled or of another env; and that fail on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from stepmill.testing.gates import wait_at
from tests.pool_model import envs
from tests.pool_model.envs import HANG_S, ONCE, HistoryEnv, fail

KILL, RAISE, HANG = (verb + ONCE for verb in (envs.KILL, envs.RAISE, envs.HANG))
"""Actions that break a `ChaosEnv`; those below 10 are harmless."""
NUM_ACTIONS = 13
LENGTH = 12
IDENTITY, TAG, CLOCK, ACTION = range(4)
"""The columns of an observation."""

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
            fail(int(action) % ONCE, self._hang_s)
        self._clock += 1
        self._action = int(action)
        return self._observe(), float(self._clock), False, self._clock >= self._length, {}

    def locate(self) -> int:
        """Return the identity; for remote calls."""
        return self.identity

    def _observe(self) -> Obs:
        return np.array([self.identity, self._tag, self._clock, self._action], np.int64)


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
        fail(how % ONCE, self._hang_s)


class Trapped:
    """Triggers the traps of an env; a class beside this one is the env."""

    _traps: Traps
    identity: int

    def reset(self, **arguments: Any) -> Any:
        self._traps.trigger("reset", self.identity)
        return super().reset(**arguments)  # type: ignore[misc]

    def step(self, action: Any) -> Any:
        self._traps.trigger("step", self.identity)
        return super().step(action)  # type: ignore[misc]

    def bump(self) -> Any:
        """Count a call before it may fail, so that a repeated call has the same effect."""
        counted = super().bump()  # type: ignore[misc]
        self._traps.trigger("call", self.identity)
        return counted

    def render(self) -> Any:
        self._traps.trigger("call", self.identity)
        return super().render()  # type: ignore[misc]


class TrappedEnv(Trapped, ChaosEnv):
    """A `ChaosEnv` with traps."""

    def __init__(self, folder: str, identity: int, length: int, hang_s: float) -> None:
        super().__init__(identity, length, hang_s)
        self._traps = Traps(folder, hang_s)


class TrappedHistoryEnv(Trapped, HistoryEnv):
    """A `HistoryEnv` with traps."""

    def __init__(self, folder: str, identity: int, length: int, hang_s: float) -> None:
        super().__init__(identity, folder, length, hang_s)
        self._traps = Traps(folder, hang_s)


def make_fragile(flag: Path, identity: int) -> ChaosEnv:
    """Make a `ChaosEnv`, and raise instead if the flag is there."""
    if flag.exists():
        raise RuntimeError("no second one")
    return ChaosEnv(identity)


def make_gated(flag: Path, gate: Path, identity: int, kind: Callable[[int], ChaosEnv] = ChaosEnv) -> ChaosEnv:
    """Make an env, and wait at the gate before if the flag is there."""
    if flag.exists():
        wait_at(gate)
    return kind(identity)


def length_of(row: int, rows_each: int = 1) -> int:
    """Return the episode length of a row. The rows of an env object have the same length."""
    return 8 + row // rows_each % 5


def make_env(folder: str, identity: int, rows_each: int, *, mode: str = "NextStep") -> object:
    """Make a `TrappedEnv`, or several in one object: row k is number `identity * rows_each + k`."""
    rows = range(identity * rows_each, (identity + 1) * rows_each)
    return make_trapped(TrappedEnv, folder, identity, [length_of(row, rows_each) for row in rows], HANG_S, mode=mode)


def make_trapped(
    kind: Callable[..., Any], folder: str, identity: int, lengths: Sequence[int], hang_s: float, *, mode: str
) -> object:
    """Make env object `identity`, which has one row, or several that reset themselves.

    Args:
        kind: makes the env of a row.
        folder: where the traps are.
        identity: number of the object.
        lengths: of the episodes of each of its rows.
        hang_s: how long a hang lasts.
        mode: autoreset mode of objects with several rows.
    """
    Traps(folder, hang_s).trigger("build", identity)
    makers = [partial(kind, folder, identity * len(lengths) + k, own, hang_s) for k, own in enumerate(lengths)]
    return makers[0]() if len(makers) == 1 else SyncVectorEnv(makers, autoreset_mode=AutoresetMode(mode))
