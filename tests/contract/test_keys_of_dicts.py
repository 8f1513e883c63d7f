"""Keys of a Dict that its space lacks: ignored in observations, as in Gymnasium, and named in errors of actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from tests.harness.pools import make_pool

WHERE = ["serial", "thread", "fork"]


class Keys(gymnasium.Env[Any, Any]):
    """Returns the observation that it was given, in reset and step."""

    observation_space = spaces.Dict(
        a=spaces.Box(0, 9, (1,), np.float32), deep=spaces.Dict(b=spaces.Box(0, 9, (), np.float32))
    )
    action_space = spaces.Dict(x=spaces.Discrete(2), y=spaces.Dict(z=spaces.Discrete(2)))
    obs: Any = {"a": np.full(1, 4, np.float32), "debug": 5, "deep": {"more": object(), "b": 2.0}}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.obs, 0.0, True, False, {}


class LacksKeys(Keys):
    obs = {"A": np.zeros(1, np.float32), "deep": {"b": 2.0}}


ACTION = {"x": np.zeros(1, int), "y": {"z": np.zeros(1, int)}}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_keys_of_observations_that_the_space_lacks_are_ignored(where, mode):
    with make_pool(where, [Keys], autoreset_mode=mode) as pool:
        for batch in (pool.reset(), pool.step(ACTION)):
            assert list(batch.obs) == ["a", "deep"]
            assert list(batch.obs["deep"]) == ["b"]
            assert batch.obs["a"].tolist() == [[4]]
            assert batch.obs["deep"]["b"].tolist() == [2]


@pytest.mark.parametrize("where", WHERE)
def test_keys_that_an_observation_lacks_are_named_with_those_that_it_has(where):
    with make_pool(where, [LacksKeys]) as pool:
        wanted = r"lacks the keys \['a'\] of its space, and has the keys \['A'\], which its space lacks"
        with pytest.raises(stepmill.BadOutput, match=wanted):
            pool.reset()


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        ({**ACTION, "w": 1}, r"the dict has the keys \['w'\], which its space lacks"),
        ({"x": ACTION["x"]}, r"the dict lacks the keys \['y'\] of its space"),
        ({**ACTION, "y": {"Z": 1}}, r"\['y'\] lacks the keys \['z'\] of its space, and has the keys \['Z'\]"),
    ],
)
def test_keys_of_actions_that_are_missing_or_more_are_named(action, wanted):
    with make_pool("serial", [Keys]) as pool:
        pool.reset()
        with pytest.raises(stepmill.StepmillError, match=wanted):
            pool.step(action)
