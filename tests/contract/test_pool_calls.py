"""Calls on the envs of a pool: methods, attributes, functions and frames."""

from __future__ import annotations

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.gym_envs import cartpoles
from tests.harness.pools import begun, counting_envs


def test_a_function_is_called_with_the_env(pool_of):
    pool = begun(pool_of([CountingEnv] * 3))

    def name_of(env, prefix, end="."):
        return prefix + type(env).__name__ + end

    assert pool.call(name_of, "a ", end="!", env_ids=[2, 0]) == ("a CountingEnv!",) * 2


def test_functions_read_and_set_what_takes_more_than_an_attribute(pool_of):
    pool = begun(pool_of([CountingEnv] * 3))

    def put(env, value):
        env.unwrapped.pair = (value, value + 1)

    pool.set_attr(put, [1, 5, 9])
    pool.set_attr(put, 7, env_ids=[1])
    assert pool.get_attr("pair") == ((1, 2), (7, 8), (9, 10))
    assert pool.get_attr(lambda env: env.unwrapped.pair[1], env_ids=[2, 0]) == (10, 2)


def test_an_attribute_is_set_in_the_wrapper_that_has_it(pool_of):
    pool = pool_of(cartpoles(2))
    pool.set_attr("gravity", [1.0, 2.0])
    assert pool.get_attr(lambda env: env.unwrapped.gravity) == pool.get_attr("gravity") == (1.0, 2.0)


def test_step_and_reset_are_looked_up_again_after_a_call(pool_of):
    pool = begun(pool_of([_TurncoatEnv]))
    assert pool.step([1]).reward.tolist() == [1.0]
    pool.call("turn")
    assert pool.step([1]).reward.tolist() == [-1.0]


class _TurncoatEnv(CountingEnv):
    def turn(self):
        plain = self.step

        def step(action):
            obs, reward, *rest = plain(action)
            return obs, -reward, *rest

        self.step = step


@pytest.mark.covers("G-10")
def test_futures_resolve_in_any_order_and_repeatedly(pool_of):
    pool = pool_of(counting_envs(2))
    pool.reset()
    futures = [pool.call_async("add", float(i)) for i in range(5)]
    for i in (3, 0, 4, 4, 1, 0, 2):
        assert tuple(futures[i].result()) == (float(i), i + 1.0)


def test_a_call_that_raises_names_the_env_and_the_pool_goes_on(pool_of):
    pool = begun(pool_of(counting_envs(2)))
    with pytest.raises(stepmill.EnvError, match="too bad") as caught:
        pool.call("complain", "too bad", env_ids=[1])
    assert caught.value.env_id == 1
    assert "ValueError" in caught.value.error_type
    assert "in complain" in caught.value.remote_traceback
    with pytest.raises(stepmill.EnvError, match="nonesuch"):
        pool.call("nonesuch")
    assert pool.step([1, 2]).reward.tolist() == [1.0, 2.0]
