"""stepmill's envs as dm_env environments: dm_env's own tests, bounds, discounts, faults."""

from __future__ import annotations

from functools import partial
from unittest import TestCase

import dm_env
import gymnasium
import numpy as np
import pytest
from dm_env import specs, test_utils
from gymnasium import spaces

import stepmill
from stepmill.frontends.dm_env import DmEnvironment
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import RaisingEnv
from tests.harness.envs_of_other_apis import Catch, Pair, Tag
from tests.harness.pools import BACKENDS, keep_closed

WHERE = {where: BACKENDS[where] for where in ("serial", "fork")}


class Nest(gymnasium.Env):
    """Spaces of many kinds; ends after `length` steps, cut if `is_cut`."""

    observation_space = spaces.Dict(
        {
            "box": spaces.Box(-1, 2, (2,), np.float32),
            "free": spaces.Box(-np.inf, np.inf, (1,), np.float64),
            "which": spaces.Discrete(4),
            "pair": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)]),
        }
    )
    action_space = spaces.Dict({"late": spaces.Discrete(3, start=5), "push": spaces.Box(-1, 1, (2,), np.float32)})

    def __init__(self, length: int = 3, *, is_cut: bool = False) -> None:
        self.length, self.is_cut, self.seeds = length, is_cut, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        ended = self.t == self.length
        return self.observation_space.sample(), float(self.t), ended and not self.is_cut, ended and self.is_cut, {}


class _Contract(test_utils.EnvironmentTestMixin):
    make = Nest
    where = "serial"

    def make_object_under_test(self):
        return DmEnvironment(self.make, **WHERE[self.where])


class TestNestInLine(_Contract, TestCase):
    pass


class TestNestInAWorker(_Contract, TestCase):
    where = "fork"


class TestDmEnvInAWorker(_Contract, TestCase):
    make = Catch
    where = "fork"


@pytest.fixture
def env_of():
    yield from keep_closed(
        lambda env_fn, where="serial", **arguments: DmEnvironment(env_fn, **WHERE[where], **arguments)
    )


def test_spaces_become_specs_with_their_bounds(env_of):
    env = env_of(Nest)
    seen = env.observation_spec()
    assert seen["box"] == specs.BoundedArray((2,), np.float32, -1, 2, name="observation/box")
    assert type(seen["free"]) is specs.Array
    assert (type(seen["which"]), seen["which"].num_values) == (specs.DiscreteArray, 4)
    assert [part.maximum.tolist() for part in seen["pair"]] == [[1, 2], 1]
    late = env.action_spec()["late"]
    assert (late.minimum, late.maximum, late.dtype) == (5, 7, np.int64)


@pytest.mark.parametrize(("is_cut", "last"), [(False, 0.0), (True, 1.0)])
def test_discounts_say_how_an_episode_ended(env_of, is_cut, last):
    env = env_of(partial(Nest, is_cut=is_cut))
    action = {"late": 5, "push": np.zeros(2, np.float32)}
    steps = [env.step(action) for _ in range(6)]
    first, mid, end = dm_env.StepType
    assert [step.step_type for step in steps] == [first, mid, mid, end, first, mid]
    assert [step.reward for step in steps] == [None, 1, 2, 3, None, 1]
    assert [step.discount for step in steps] == [None, 1, 1, last, None, 1]


def test_a_dm_env_environment_comes_out_as_it_went_in(env_of):
    ours, theirs = env_of(partial(Catch, last_discount=0.5), "fork"), Catch(last_discount=0.5)
    assert ours.action_spec()["turn"].num_values == 3
    assert isinstance(ours.observation_spec()["pair"], Pair)
    assert isinstance(ours.observation_spec()["list"], list)
    action = {"turn": np.int32(2), "push": np.ones(2, np.float32)}
    pairs = [(ours.reset(), theirs.reset())] + [(ours.step(action), theirs.step(action)) for _ in range(2)]
    for mine, wanted in pairs:
        assert (mine.step_type, mine.reward, mine.discount) == (wanted.step_type, wanted.reward, wanted.discount)
        assert mine.observation["pair"].right == wanted.observation["pair"].right
        assert type(mine.observation["pair"]) is Pair
        np.testing.assert_array_equal(mine.observation["list"][1], wanted.observation["list"][1])


def test_only_the_first_reset_is_seeded(env_of):
    env = env_of(Nest, "fork", seed=7)
    for _ in range(3):
        env.reset()
    assert env.get_attr("seeds") == [7, None, None]


def test_after_a_fault_the_next_step_begins_an_episode(env_of):
    env = env_of(partial(RaisingEnv, "step", 2))
    env.reset()
    env.step(0)
    with pytest.raises(stepmill.EnvError, match="a deliberate failure"):
        env.step(0)
    assert env.step(0).first()


def test_an_action_of_another_structure_changes_nothing(env_of):
    env = env_of(Nest)
    env.reset()
    with pytest.raises(stepmill.UsageError, match="does not have the structure of the action space"):
        env.step({"late": 5})
    assert env.step({"late": 5, "push": np.zeros(2, np.float32)}).reward == 1


def test_what_dm_env_has_no_place_for_is_refused(env_of):
    with pytest.raises(stepmill.UsageError, match="has agents"):
        env_of(Tag)
    texts = partial(stepmill.testing.SampledEnv, spaces.Text(5), spaces.Discrete(2))
    with pytest.raises(stepmill.UsageError, match="no fixed size, so dm_env has no spec for it"):
        env_of(texts)


def test_close_ends_it_and_can_be_called_twice():
    with DmEnvironment(CountingEnv, **WHERE["fork"]) as env:
        env.reset()
    env.close()
    with pytest.raises(stepmill.UsageError, match="close"):
        env.reset()
