"""ALE's own vector env behind a pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.envs.atari_vector import AtariVectorTask
from tests.harness.pools import keep_closed

vector_env = pytest.importorskip("ale_py.vector_env")
KWARGS = {"num_threads": 2, "noop_max": 5, "max_num_frames_per_episode": 30}
NUM_ENVS = 3


@pytest.fixture
def make_pool() -> Iterator[Any]:
    """Build pools of Pong, which are closed at the end."""
    yield from keep_closed(
        lambda **options: stepmill.Pool([AtariVectorTask("pong", KWARGS)] * NUM_ENVS, backend="envpool", **options)
    )


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.slow
def test_episodes_are_those_of_the_vector_env_itself(make_pool: Any, mode: str) -> None:
    pool = make_pool(autoreset_mode=mode)
    envs = vector_env.AtariVectorEnv("pong", NUM_ENVS, **KWARGS)
    seeds = np.array([5, 9, 2])
    np.testing.assert_array_equal(pool.reset(seed=seeds.tolist()).obs, envs.reset(seed=seeds)[0])
    num_ended = 0
    for count in range(90):
        actions = np.array([count % 6, 2, 3])
        batch = pool.step(actions)
        obs, reward, terminated, truncated, info = envs.step(actions)
        np.testing.assert_array_equal(batch.reward, reward)
        np.testing.assert_array_equal(batch.terminated, terminated)
        np.testing.assert_array_equal(batch.truncated, truncated)
        num_ended += int((batch.terminated | batch.truncated).sum())
        if num_ended and mode == "SameStep":  # the resets draw other numbers from here on
            np.testing.assert_array_equal(batch.info["final_obs"][0], obs[0])
            break
        np.testing.assert_array_equal(batch.obs, obs)
        np.testing.assert_array_equal(batch.info["lives"], info["lives"])
    assert num_ended >= NUM_ENVS
    envs.close()


def test_some_envs_are_reset_with_seeds_of_their_own(make_pool: Any) -> None:
    pool = make_pool(autoreset_mode="Disabled")
    first = pool.reset(seed=[1, 2, 3]).obs
    pool.step(np.array([2, 2, 2]))
    again = pool.reset(env_ids=[2, 0], seed={2: 3, 0: 1})
    assert again.env_id.tolist() == [0, 2]
    np.testing.assert_array_equal(again.obs, first[[0, 2]])


def test_what_it_cannot_do_is_refused(make_pool: Any) -> None:
    pool = make_pool()
    with pytest.raises(stepmill.EnvError, match="takes no reset options"):
        pool.reset(options={"x": 1})
    with pytest.raises(stepmill.EnvError, match="ALE's seeds have 31 bits"):
        pool.reset(seed=2**40)
    pool.reset(seed=0)
    pool.send(np.array([1]), [0])
    with pytest.raises(stepmill.EnvError, match="steps all of its 3 envs together, but got actions for 1"):
        pool.recv(1)
    with pytest.raises(stepmill.EnvError, match="batch_size of an AtariVectorTask is chosen by the pool"):
        stepmill.Pool([AtariVectorTask("pong", {"batch_size": 2})] * 2, backend="envpool")
    with pytest.raises(stepmill.EnvError, match="use backend='envpool'"):
        stepmill.Pool([AtariVectorTask("pong")] * 2, backend="serial")
