"""A pool inside jit, and batches as JAX's arrays."""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from stepmill import Pool, UsageError
from stepmill.jax import as_jax, xla
from stepmill.testing.envs import CountingEnv, ImageEnv


def _warm_up():
    """Let JAX start the threads that live as long as the process, before a test counts its own."""
    token = jax.ShapeDtypeStruct((), np.uint8)
    scan = jax.jit(
        lambda x: lax.scan(
            lambda c, _: (c + io_callback(lambda _: np.uint8(1), token, c, ordered=True), c @ c.T), x, None, 3
        )
    )
    jax.block_until_ready(scan(jnp.ones((64, 64), jnp.uint8)))


_warm_up()


@pytest.fixture(params=["serial", "thread", "forkserver"])
def where(request):
    """Not fork: JAX warns of it, rightly."""
    return request.param


class Nested(gymnasium.Env):
    """A dict with a tuple in it; takes a dict."""

    observation_space = gymnasium.spaces.Dict(
        {
            "a": gymnasium.spaces.Box(-10, 10, (3,), np.float64),
            "b": gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(4), gymnasium.spaces.MultiBinary(2))),
        }
    )
    action_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(0.0), {}

    def step(self, action):
        return self._obs(float(action["x"].sum())), 0.5, False, False, {}

    def _obs(self, value):
        return {"a": np.full(3, value), "b": (2, np.array([1, 0], np.int8))}


def test_steps_inside_jit_are_those_outside(pool_of):
    inside, outside = pool_of([CountingEnv] * 3), pool_of([CountingEnv] * 3)
    handle, _, _, step = xla(inside)
    first = inside.reset(seed=0).obs

    @jax.jit
    def rollout(handle, obs):
        def one(carry, _):
            handle, obs = carry
            handle, (obs, reward, terminated, truncated, env_id) = step(handle, obs[:, -1] + 1)
            return (handle, obs), (obs, reward, terminated | truncated, env_id)

        return lax.scan(one, (handle, obs), None, length=12)[1]

    obs, reward, done, env_id = rollout(handle, jnp.asarray(first))
    latest = outside.reset(seed=0).obs
    for t in range(12):
        batch = outside.step(latest[:, -1] + 1)
        latest = batch.obs
        np.testing.assert_array_equal(obs[t], batch.obs)
        np.testing.assert_array_equal(reward[t], batch.reward)
        np.testing.assert_array_equal(done[t], batch.terminated | batch.truncated)
        assert env_id[t].tolist() == [0, 1, 2]


def test_some_envs_at_a_time_inside_jit():
    with Pool([CountingEnv] * 4, num_workers=2, batch_size=2) as pool:
        handle, recv, send, _ = xla(pool)
        pool.reset_async(seed=0)

        @jax.jit
        def turn(handle):
            handle, (obs, _, _, _, env_id) = recv(handle)
            return send(handle, obs[:, -1], env_id), env_id

        seen = []
        for _ in range(20):
            handle, env_id = turn(handle)
            seen += env_id.tolist()
        assert set(seen) == {0, 1, 2, 3}


def test_spaces_of_any_nesting_work_inside_jit(pool_of):
    pool = pool_of([Nested] * 2)
    handle, _, _, step = xla(pool)
    pool.reset(seed=0)
    _, (obs, *_) = jax.jit(step)(handle, {"x": jnp.full((2, 2), 0.25)})
    assert obs["a"].dtype == jnp.float32
    assert obs["a"].tolist() == [[0.5] * 3] * 2
    assert obs["b"][1].tolist() == [[1, 0]] * 2


def test_batches_become_jax_arrays_that_hold_their_lease(pool_of):
    pool = pool_of([ImageEnv] * 4)
    pool.reset(seed=0)
    batch = as_jax(pool.step([0, 0, 0, 0]))
    assert isinstance(batch.obs, jax.Array)
    seen = np.array(batch.obs)
    for _ in range(6):
        pool.step([0, 0, 0, 0])
    np.testing.assert_array_equal(batch.obs, seen)
    del batch


def test_what_xla_cannot_hold_is_refused(pool_of):
    class Text(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.Text(5)

    with pytest.raises(UsageError, match="without a fixed size"):
        xla(pool_of([Text]))
