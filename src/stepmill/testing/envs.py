"""Toy Gymnasium environments with predictable results.

They are made to test engines. The results of an env depend only on its constructor's arguments, the seed of its reset and its
actions, so that a swapped row, a lost step or a repeated reset is visible as a wrong number. Envs that fail on purpose are in
`stepmill.testing.faulty`; envs that wait are in `stepmill.testing.gates`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

NO_SEED = -1
"""The observation of `SeedRecorder` after a `reset` without a seed."""

Info = dict[str, Any]
Options = dict[str, Any]


class CountingEnv(gymnasium.Env[NDArray[np.int64], np.int64]):
    """Counts its episodes and steps.

    Observation: int64 [3] = (identity, episode, t). Reward: the action. A reset with a seed starts again at episode 0.
    Episodes end at step `length` with `terminated`, or with `truncated` if `truncate` is True.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}

    def __init__(
        self, identity: int = 0, length: int = 5, *, truncate: bool = False, render_mode: str | None = None
    ) -> None:
        self.observation_space = spaces.Box(-1, 2**40, (3,), np.int64)
        self.action_space = spaces.Discrete(100)
        self.render_mode = render_mode
        self.identity = identity
        self.length = length
        self.weight = 1.0
        self.num_resets = 0
        self.num_steps = 0
        self._truncate = truncate
        self._episode = -1
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[NDArray[np.int64], Info]:
        super().reset(seed=seed)
        self.num_resets += 1
        self._episode = 0 if seed is not None else self._episode + 1
        self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        self.num_steps += 1
        self._t += 1
        is_over = self._t >= self.length
        return (
            self._observe(),
            float(action),
            is_over and not self._truncate,
            is_over and self._truncate,
            {"t": self._t},
        )

    def render(self) -> NDArray[np.uint8]:
        """Return a frame, uint8 [4, 4, 3], filled with 16 * identity + t."""
        return np.full((4, 4, 3), (16 * self.identity + self._t) % 256, np.uint8)

    def add(self, left: float, right: float = 0.0) -> float:
        """Return left + right + identity, so that the results of two envs differ."""
        return left + right + self.identity

    def locate(self) -> tuple[int, int]:
        """Return the process id and the thread ident that this env runs in."""
        return os.getpid(), threading.get_ident()

    def complain(self, text: str) -> None:
        """Raise a ValueError with the given text."""
        raise ValueError(text)

    def _observe(self) -> NDArray[np.int64]:
        return np.array([self.identity, self._episode, self._t], np.int64)


class SlowEnv(CountingEnv):
    """A counting env that sleeps while it is constructed, reset or stepped.

    `step_s` may be a sequence: step t of an episode then sleeps `step_s[t % len(step_s)]` seconds.
    """

    def __init__(
        self,
        identity: int = 0,
        length: int = 5,
        *,
        construct_s: float = 0.0,
        reset_s: float = 0.0,
        step_s: float | Sequence[float] = 0.0,
    ) -> None:
        time.sleep(construct_s)
        super().__init__(identity, length)
        self._reset_s = reset_s
        self._step_s = tuple(step_s) if isinstance(step_s, Sequence) else (step_s,)

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[NDArray[np.int64], Info]:
        time.sleep(self._reset_s)
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        time.sleep(self._step_s[self._t % len(self._step_s)])
        return super().step(action)


class SeedRecorder(gymnasium.Env[NDArray[np.int64], np.int64]):
    """Records the arguments of its resets.

    Observation: int64 [3] = (last seed or NO_SEED, number of resets, a draw from its own RNG). `seeds` and `options` list
    the arguments of each reset. Episodes last `length` steps.
    """

    def __init__(self, length: int = 2) -> None:
        self.observation_space = spaces.Box(-1, 2**62, (3,), np.int64)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.seeds: list[int | None] = []
        self.options: list[Options | None] = []
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[NDArray[np.int64], Info]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.options.append(options)
        self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.int64], float, bool, bool, Info]:
        self._t += 1
        return self._observe(), 0.0, self._t >= self.length, False, {}

    def _observe(self) -> NDArray[np.int64]:
        seed = self.seeds[-1] if self.seeds[-1] is not None else NO_SEED
        return np.array([seed, len(self.seeds), self.np_random.integers(2**31)], np.int64)


class ImageEnv(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """Returns images of one predictable colour.

    Observation: uint8 `shape`, filled with `ImageEnv.colour(identity, clock)`; a new array each time. `clock` counts
    steps and resets since the last reset with a seed.
    """

    def __init__(self, identity: int = 0, shape: tuple[int, ...] = (84, 84, 4), length: int = 50) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Discrete(4)
        self.identity = identity
        self.length = length
        self._shape = shape
        self._clock = 0
        self._t = 0

    @staticmethod
    def colour(identity: int, clock: int) -> int:
        """Return the colour of env `identity` after `clock` steps and resets."""
        return (identity * 31 + clock * 7) % 251

    def reset(self, *, seed: int | None = None, options: Options | None = None) -> tuple[NDArray[np.uint8], Info]:
        super().reset(seed=seed)
        self._clock = 0 if seed is not None else self._clock + 1
        self._t = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, Info]:
        self._clock += 1
        self._t += 1
        return self._observe(), 1.0, False, self._t >= self.length, {}

    def _observe(self) -> NDArray[np.uint8]:
        return np.full(self._shape, self.colour(self.identity, self._clock), np.uint8)


def _identity(env: CountingEnv) -> CountingEnv:
    return env


class BatchedCountingEnv(gymnasium.vector.VectorEnv[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]):
    """A vector env that a pool's worker runs as one env of `size` rows.

    Row r is a `CountingEnv` of identity `first_identity + r` and length `length + r`. The vector env resets its rows itself,
    at the next step or within the same step.
    """

    def __init__(
        self,
        first_identity: int = 0,
        size: int = 2,
        length: int = 3,
        *,
        autoreset_mode: gymnasium.vector.AutoresetMode = gymnasium.vector.AutoresetMode.NEXT_STEP,
    ) -> None:
        self.num_envs = size
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space = spaces.Box(-1, 2**40, (3,), np.int64)
        self.single_action_space = spaces.Discrete(100)
        self.observation_space = spaces.Box(-1, 2**40, (size, 3), np.int64)
        self.action_space = spaces.MultiDiscrete(np.full(size, 100))
        self._rows = [CountingEnv(first_identity + row, length + row) for row in range(size)]
        self._inner = gymnasium.vector.SyncVectorEnv(
            [partial(_identity, row) for row in self._rows], autoreset_mode=autoreset_mode
        )

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Options | None = None
    ) -> tuple[NDArray[np.int64], Info]:
        return self._inner.reset(seed=seed, options=options)

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        return self._inner.step(actions)

    def locate(self) -> tuple[int, int]:
        """Return the process id and the thread ident that this env runs in."""
        return os.getpid(), threading.get_ident()
