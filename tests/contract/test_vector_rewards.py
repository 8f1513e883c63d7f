"""Envs whose rewards are vectors, as MO-Gymnasium's: the env declares a `reward_space`."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import stepmill
from stepmill.observe.run import EpisodeTally
from stepmill.pool.port import PoolPort
from stepmill.spec.errors import SpecMismatch
from tests.harness.pools import begun, make_vector_env

LENGTH = 3


class TwoGoals(gymnasium.Env):
    """Gives (number of the step, -action) as its reward."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(5)

    def __init__(self, dtype=np.float32, low=-9.0):
        self.reward_space = spaces.Box(low, 9, (2,), dtype)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        reward = np.array([self.t, -action], self.reward_space.dtype)
        return np.full(1, self.t, np.float32), reward, self.t == LENGTH, False, {}


class Sum(gymnasium.RewardWrapper):
    """Makes a number of the vector, and says so."""

    reward_space = None

    def reward(self, reward):
        return float(reward.sum())


class LinearReward(gymnasium.RewardWrapper):
    """Has the name of MO-Gymnasium's wrapper, which does not say so."""

    def reward(self, reward):
        return float(reward @ [1.0, 0.5])


class OneNumber(TwoGoals):
    """Its reward is an array of one number."""

    def __init__(self):
        self.reward_space = spaces.Box(-9, 9, (1,), np.float32)

    def step(self, action):
        obs, _reward, *rest = super().step(action)
        return obs, np.array([self.t]), *rest


@pytest.mark.parametrize("where", ["serial", "thread", "fork"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_rewards_have_a_dimension_of_objectives(where, mode):
    with make_vector_env(where, [TwoGoals] * 3, autoreset_mode=mode) as envs:
        assert envs.reward_space == spaces.Box(-9, 9, (2,), np.float32)
        envs.reset(seed=0)
        found = [envs.step([0, 1, 2])[1] for _ in range(4)]
    assert all(reward.shape == (3, 2) and reward.dtype == np.float32 for reward in found)
    assert [reward[2].tolist() for reward in found] == [
        [1, -2],
        [2, -2],
        [3, -2],
        [0, 0] if mode == "NextStep" else [1, -2],
    ]


def test_rewards_of_other_dtypes_are_float64():
    with begun(make_vector_env("serial", [functools.partial(TwoGoals, np.int64)])) as envs:
        assert envs.step([1])[1].dtype == np.float64


def test_wrappers_pass_the_space_on_or_say_that_the_reward_is_a_number():
    def wrapped():
        return gymnasium.wrappers.TimeLimit(TwoGoals(), 2)

    with make_vector_env("serial", [wrapped]) as envs:
        assert envs.reward_space.shape == (2,)
    for wrapper, expected in ((Sum, -1.0), (LinearReward, 0.0)):
        with begun(make_vector_env("serial", [lambda wrapper=wrapper: wrapper(TwoGoals())])) as envs:
            assert envs.step([2])[1].tolist() == [expected]
            assert not hasattr(envs, "reward_space")


def test_a_reward_of_one_number_in_an_array_is_a_number():
    with begun(make_vector_env("serial", [OneNumber] * 2)) as envs:
        assert envs.step([1, 1])[1].tolist() == [1.0, 1.0]


class Undeclared(TwoGoals):
    def __init__(self, reward):
        super().__init__()
        del self.reward_space
        self.reward = reward

    def step(self, action):
        return np.zeros(1, np.float32), self.reward, False, False, {}


@pytest.mark.parametrize("reward", [np.array([1.0, 2.0]), [1.0, 2.0], (1.0, 2.0)], ids=["array", "list", "tuple"])
def test_a_vector_without_a_reward_space_is_refused_with_the_remedy(reward):
    with make_vector_env("serial", [functools.partial(Undeclared, reward)]) as envs:
        envs.reset(seed=0)
        with pytest.raises(stepmill.BadOutput, match=r"the reward must be a number.*has a Box as its reward_space"):
            envs.step([1])


def test_envs_with_other_numbers_of_objectives_do_not_share_a_pool():
    with pytest.raises(SpecMismatch, match="reward"):
        stepmill.Pool([TwoGoals, OneNumber], backend="serial")


def test_a_front_end_that_needs_numbers_refuses_vectors():
    from stepmill.frontends.gymnasium.spaces import read_spaces

    with (
        stepmill.Pool([TwoGoals], backend="serial") as pool,
        pytest.raises(stepmill.UsageError, match=r"has 2 numbers, and this front-end needs one; wrap .*LinearReward"),
    ):
        read_spaces(PoolPort(pool).env_specs)


def test_returns_that_are_vectors_count_with_their_sum():
    tally = EpisodeTally()
    tally.add(np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([4, 6]))
    summary = tally.summary()
    assert (summary.return_mean, summary.return_max, summary.length_mean) == (2.5, 3.0, 5.0)
