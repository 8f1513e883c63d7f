"""TorchRL envs over every backend, for tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

import stepmill
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.testing import CountingEnv

BACKENDS = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"backend": "process", "num_workers": 2, "options": stepmill.PoolOptions(context="fork")},
}


class Nested(gymnasium.Env[Any, Any]):
    """Observations three levels deep, with the same names on each; actions of every kind. It echoes what it was given."""

    observation_space = gymnasium.spaces.Dict(
        {
            "a": gymnasium.spaces.Dict(
                {"x": gymnasium.spaces.Box(-9, 9, (2,), np.float32), "y": gymnasium.spaces.Discrete(50, start=10)}
            ),
            "b": gymnasium.spaces.Dict(
                {
                    "x": gymnasium.spaces.Box(0, 255, (1,), np.uint8),
                    "c": gymnasium.spaces.Dict({"x": gymnasium.spaces.Discrete(9)}),
                }
            ),
            "pair": gymnasium.spaces.Tuple([gymnasium.spaces.MultiBinary(3), gymnasium.spaces.MultiDiscrete([3, 4])]),
        }
    )
    action_space = gymnasium.spaces.Dict(
        {
            "turn": gymnasium.spaces.Discrete(5, start=2),
            "keys": gymnasium.spaces.MultiDiscrete([3, 4]),
            "push": gymnasium.spaces.Tuple(
                [gymnasium.spaces.Box(-1, 1, (2,), np.float32), gymnasium.spaces.MultiBinary(3)]
            ),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._t = 0
        return self._observe(2, np.zeros(2, np.int64), np.zeros(2, np.float32), np.zeros(3, np.int8)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        push, bits = action["push"]
        return self._observe(int(action["turn"]), action["keys"], push, bits), 1.0, self._t == 7, False, {}

    def _observe(self, turn: int, keys: Any, push: Any, bits: Any) -> Any:
        return {
            "a": {"x": push, "y": np.int64(10 + self._t)},
            "b": {"x": np.array([turn], np.uint8), "c": {"x": np.int64(turn)}},
            "pair": (bits, keys),
        }


def counting(num: int = 3, length: int = 4, where: str = "serial", cls: Any = StepmillEnv, **kwargs: Any) -> Any:
    """Return CountingEnvs 0 … num-1; their episodes have length, length + 1, … steps."""
    fns = [partial(CountingEnv, i, length + i) for i in range(num)]
    return cls(fns, **{**BACKENDS[where], "categorical_action_encoding": True, **kwargs})


def act(td: Any, *actions: int) -> Any:
    """Return the data with the actions of the envs."""
    return td.set("action", torch.tensor(actions))


def obs_of(td: Any) -> list[Any]:
    return td["observation"].tolist()  # type: ignore[no-any-return]
