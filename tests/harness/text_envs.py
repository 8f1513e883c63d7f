"""Envs whose actions have no fixed size. What they observe depends on their seed and on every byte of all actions of the episode."""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces.graph import GraphInstance

from stepmill.testing.sampled import describe

TEXT = spaces.Text(10_000, min_length=0)
PAIRS = spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32))
SPACES: dict[str, gymnasium.Space[Any]] = {
    "text": TEXT,
    "sequence": PAIRS,
    "graph": spaces.Graph(spaces.Box(-1, 1, (3,)), spaces.Discrete(4)),
    "tree": spaces.Dict(
        {"say": TEXT, "number": spaces.Discrete(5), "rest": spaces.Tuple([PAIRS, spaces.Box(0, 1, (2,))])}
    ),
}
DEEDS: dict[str, Callable[[], object]] = {
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(17),
    "hang": lambda: threading.Event().wait(600),
}


class PlantedBug(Exception):
    """What the action "raise" raises."""


class TalkEnv(gymnasium.Env[Any, Any]):
    """Answers each action with a text about all actions so far; its episodes end after 3 to 12 steps."""

    def __init__(self, kind: str = "text", length: int | None = None) -> None:
        self.action_space = SPACES[kind]
        self.observation_space = spaces.Dict({"heard": TEXT, "clock": spaces.Box(0, 1000, (1,), np.int64)})
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._ends_at = self._length or int(self.np_random.integers(3, 13))
        self._clock, self._memory = 0, f"{self.np_random.random()} {(options or {}).get('topic')}"
        return self._observe(), {"topic": self._memory}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if isinstance(action, str) and action == "raise":
            raise PlantedBug(f"after {self._clock} steps")
        if isinstance(action, str) and action in DEEDS:
            DEEDS[action]()
        self._memory = hashlib.sha256(f"{self._memory}{describe(action)}".encode()).hexdigest()
        self._clock += 1
        is_over = self._clock >= self._ends_at
        return self._observe(), int(self._memory[:6], 16) / 7, is_over, False, {"memory": self._memory}

    def _observe(self) -> dict[str, Any]:
        return {"heard": f"{self._clock}: {self._memory} ♥" * (1 + self._clock % 3), "clock": np.array([self._clock])}


class MutteringEnv(TalkEnv):
    """Says its process in its text, and nowhere else: not replayable."""

    def _observe(self) -> dict[str, Any]:
        return {**super()._observe(), "heard": str(os.getpid())}


def draw_action(kind: str, rng: random.Random) -> Any:
    """Return an action of a space of SPACES; some are larger than a row of the slab."""
    if kind == "text":
        return rng.choice(["", "é", "yes\n"]) + rng.choice("abc") * rng.choice([0, 5, 300, 3000])
    if kind == "sequence":
        return tuple(np.float32([rng.random(), -rng.random()]) for _ in range(rng.choice([0, 1, 60])))
    if kind == "graph":
        num = rng.randint(1, 4)
        return GraphInstance(np.float32([[rng.random()] * 3] * num), np.arange(num) % 4, np.array([[0, 0]] * num))
    say, rest = draw_action("text", rng), (draw_action("sequence", rng), np.float32([rng.random(), 0]))
    return {"say": say, "number": rng.randrange(5), "rest": rest}


def batched(kind: str, actions: list[Any]) -> Any:
    """Return the actions of several envs as a pool takes them."""
    if kind != "tree":
        return actions
    rest = (tuple(each["rest"][0] for each in actions), np.array([each["rest"][1] for each in actions]))
    numbers = np.array([each["number"] for each in actions])
    return {"say": tuple(each["say"] for each in actions), "number": numbers, "rest": rest}
