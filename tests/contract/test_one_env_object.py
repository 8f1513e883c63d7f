"""One env object for several functions is refused: a step of one env would move the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun, make_pool


class PlainWrapper:
    """A wrapper that derives from nothing."""

    def __init__(self, env: Any) -> None:
        self.env, self.observation_space, self.action_space = env, env.observation_space, env.action_space

    def reset(self, **kwargs: Any) -> Any:
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.env.step(action)


class BrokenUnwrapped(CountingEnv):
    @property
    def unwrapped(self) -> Any:
        raise RuntimeError("no")


@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.Wrapper, PlainWrapper])
@pytest.mark.parametrize(("where", "num_envs"), [("serial", 4), ("thread", 4), ("fork", 4), ("thread", 2)])
def test_one_env_for_several_functions_is_refused(where, num_envs, wrap: Callable[[Any], Any]):
    env = CountingEnv()
    with pytest.raises(ValueError, match=r"envs \d and \d are one object.*CountingEnv.*return a new env") as caught:
        make_pool(where, [lambda: wrap(env)] * num_envs, num_workers=2)
    assert isinstance(caught.value, stepmill.EnvError)


def test_a_process_for_each_function_gives_each_its_own_copy():
    env = CountingEnv()
    with begun(make_pool("forkserver", [lambda: env] * 2, num_workers=2)) as pool:
        assert pool.step([1, 2]).obs[:, 2].tolist() == [1, 1]


def test_an_env_whose_property_unwrapped_raises_is_stepped():
    with begun(make_pool("serial", [BrokenUnwrapped] * 2)) as pool:
        assert pool.step([1, 2]).reward.tolist() == [1.0, 2.0]
