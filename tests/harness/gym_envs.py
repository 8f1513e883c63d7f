"""Envs of the cases that Gymnasium publishes for its own vector envs."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

TESTED_SPACES: dict[str, gymnasium.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from -1": spaces.Discrete(3, start=-1),
    "discrete int32": spaces.Discrete(4, dtype=np.int32, start=1),
    "box": spaces.Box(0.0, 1.0),
    "box half bounded": spaces.Box(0.0, np.inf, (2, 2)),
    "box float64": spaces.Box(np.array([-10.0, 0.0]), np.array([10.0, 10.0]), dtype=np.float64),
    "box uint8": spaces.Box(0, 255, (2, 2, 3), np.uint8),
    "box bool": spaces.Box(np.array([0, 0, 1]), np.array([1, 0, 1]), dtype=np.bool_),
    "box int32": spaces.Box(np.array([-np.inf, -np.inf, 0, -10]), np.array([np.inf, 0, np.inf, 10]), dtype=np.int32),
    "multi discrete": spaces.MultiDiscrete([2, 2]),
    "multi discrete 2d": spaces.MultiDiscrete(np.array([[2, 3], [3, 2]]), start=np.array([[10, 20], [30, 40]])),
    "multi discrete int8": spaces.MultiDiscrete([2, 3], dtype=np.int8),
    "multi binary": spaces.MultiBinary(8),
    "multi binary 2d": spaces.MultiBinary([2, 3]),
    "text": spaces.Text(6),
    "text 3 to 6": spaces.Text(min_length=3, max_length=6),
    "text of abc": spaces.Text(6, charset="abcdef"),
    "tuple": spaces.Tuple([spaces.Discrete(5), spaces.Discrete(4)]),
    "tuple of tuple": spaces.Tuple(
        (spaces.Discrete(5), spaces.Tuple((spaces.Box(0.0, 1.0, (3,)), spaces.Discrete(2))))
    ),
    "tuple of dict": spaces.Tuple(
        (spaces.Discrete(3), spaces.Dict(position=spaces.Box(0.0, 1.0), velocity=spaces.Discrete(2)))
    ),
    "tuple of graph": spaces.Tuple((spaces.Graph(spaces.Box(-1, 1, (2, 1)), None), spaces.Discrete(2))),
    "dict": spaces.Dict({"position": spaces.Discrete(5), "velocity": spaces.Box(0.0, 5.0, (2,), np.float64)}),
    "dict of dict": spaces.Dict(
        {
            "a": spaces.Box(0, 1, (3, 3)),
            "b": spaces.Dict({"b_1": spaces.Box(-100, 100, (2,)), "b_2": spaces.Box(-1, 1, (2,))}),
            "c": spaces.Discrete(4),
        }
    ),
    "dict of graph": spaces.Dict(
        a=spaces.Dict(a=spaces.Graph(spaces.Box(-100, 100, (2, 2)), None), b=spaces.Box(-100, 100, (2, 2))),
        b=spaces.Tuple((spaces.Box(-100, 100, (2,)), spaces.Box(-100, 100, (2,)))),
    ),
    "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    "graph with edges": spaces.Graph(spaces.Discrete(5), spaces.Box(-100, 100, (3, 4))),
    "graph of dict": spaces.Graph(
        spaces.Dict({"pos": spaces.Box(-10, 10, (3,)), "label": spaces.Discrete(5)}), spaces.Discrete(3)
    ),
    "sequence": spaces.Sequence(spaces.Discrete(4)),
    "sequence of dict": spaces.Sequence(spaces.Dict({"feature": spaces.Box(0, 1, (3,))})),
    "sequence of graph": spaces.Sequence(spaces.Graph(spaces.Box(-100, 100, (2, 2)), spaces.Discrete(4))),
    "stacked sequence": spaces.Sequence(
        spaces.Dict({"a": spaces.Box(0, 1, (3,)), "b": spaces.Discrete(5)}), stack=True
    ),
    "one of": spaces.OneOf([spaces.Discrete(3), spaces.Box(0.0, 1.0)]),
}


def cartpole(seed: int, **arguments: Any) -> gymnasium.Env[Any, Any]:
    """Build a CartPole that was reset with a seed already."""
    env = gymnasium.make("CartPole-v1", disable_env_checker=True, **arguments)
    env.action_space.seed(seed)
    env.reset(seed=seed)
    return env


def cartpoles(num_envs: int, **arguments: Any) -> list[partial[gymnasium.Env[Any, Any]]]:
    return [partial(cartpole, i, **arguments) for i in range(num_envs)]


class SampleEnv(gymnasium.Env[Any, Any]):
    """Shows samples of its observation space, and checks that actions are in its action space."""

    def __init__(self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.metadata = {"render_modes": []}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        return self.observation_space.sample(), 0, False, False, {}


class WordSpace(gymnasium.Space[str]):
    """A space that Gymnasium does not know."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "word"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordSpace)

    __hash__ = None  # type: ignore[assignment]


class WordEnv(gymnasium.Env[str, str]):
    """Talks in strings."""

    def __init__(self) -> None:
        self.observation_space = WordSpace()
        self.action_space = WordSpace()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "reset", {}

    def step(self, action: str) -> Any:
        return f"step({action:s})", 0.0, False, False, {}


class FixedEpisodeEnv(gymnasium.Env[Any, Any]):
    """Episodes of `length` steps, reward `step number + offset`; samples its observation space."""

    def __init__(self, length: int = 3, offset: float = 0.0) -> None:
        self.observation_space = spaces.Box(np.array([0, -10, -5], np.float32), np.array([10, -5, 10], np.float32))
        self.action_space = spaces.Box(-1, 1, (2,))
        self._length = length
        self._offset = offset
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self.observation_space.sample(), self._t + self._offset, self._t >= self._length, False, {}
