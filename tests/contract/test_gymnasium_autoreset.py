"""Gymnasium's cases of automatic resets and merged infos, in our words, on every backend."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from stepmill.testing.envs import ImageEnv
from tests.harness.gym_envs import CountToMaxEnv
from tests.harness.pools import assert_equal, begun

# ---------------------------------------------------------------- autoreset


@pytest.mark.covers("G-6")
def test_with_copies_a_partial_reset_repeats_observations_that_the_program_has_overwritten(vector_env_of):
    """As in Gymnasium. Without `copy=True`, there is no other copy of a lent observation: docs/results.md."""
    seen = []
    for make in (SyncVectorEnv, partial(vector_env_of, copy=True)):
        envs = make([partial(ImageEnv, identity) for identity in range(4)], autoreset_mode=AutoresetMode.DISABLED)
        envs.reset(seed=1)
        observations, *_ = envs.step(np.zeros(4, np.int64))
        last = observations.copy()
        observations[:] = 255
        partly, _ = envs.reset(options={"reset_mask": np.array([False, True, False, True])})
        assert np.array_equal(partly[::2], last[::2])
        seen.append(partly.copy())
        envs.close()
    assert_equal(*seen)


@pytest.mark.covers("G-6")  # the other modes: test_differential.py
def test_same_step_resets_within_the_step_and_hands_out_the_last_observation(vector_env_of):
    envs = vector_env_of([CountToMaxEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.set_attr("max_count", [2, 3, 3])
    envs.reset()
    assert envs.step([1, 2, 3])[4] == {}
    for observations, ends, last in (
        ([0, 2, 2], [True, False, False], [2, None, None]),
        ([1, 0, 0], [False, True, True], [None, 3, 3]),
        ([0, 1, 1], [True, False, False], [2, None, None]),
    ):
        result = envs.step([1, 2, 3])
        assert (result[0].tolist(), result[2].tolist()) == (observations, ends)
        infos = result[4]
        assert infos.pop("final_obs").tolist() == last
        assert_equal(infos, {"_final_obs": np.array(ends), "final_info": {}, "_final_info": np.array(ends)})


class _ReusingEnv:
    """Returns the same arrays, list and info each time; obs["at"] is episode and step. Episodes have two steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Dict(
        at=spaces.Box(0, 99, (2,), np.int64), mark=spaces.Box(0, 99, (3,), np.uint8), said=spaces.Sequence(action_space)
    )

    def __init__(self):
        self.obs = {"at": np.array([-1, 0]), "mark": np.zeros(3, np.uint8), "said": []}
        self.info = {}

    def reset(self, *, seed=None, options=None):
        return self._observe(int(self.obs["at"][0]) + 1, 0), self.info

    def step(self, action):
        episode, step = self.obs["at"].tolist()
        return self._observe(episode, step + 1), 1.0, step == 1, False, self.info

    def _observe(self, episode, step):
        self.obs["at"][:], self.obs["mark"][:], self.obs["said"][:] = (episode, step), step, range(step)
        self.info["t"] = step
        return self.obs


class _ReusingCoroutines(_ReusingEnv):
    async def reset(self, *, seed=None, options=None):
        return super().reset()

    async def step(self, action):
        return super().step(action)


@pytest.mark.parametrize("env_class", [_ReusingEnv, _ReusingCoroutines])
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_final_observation_is_the_last_one_also_if_the_env_writes_the_next_one_to_the_same_memory(backend, env_class):
    with begun(stepmill.Pool([env_class] * 2, backend=backend, autoreset_mode="SameStep")) as pool:
        for episode in range(2):
            pool.step([1, 1])
            batch = pool.step([1, 1])
            for final in batch.info["final_obs"]:
                assert [list(part) for part in final.values()] == [[episode, 2], [2, 2, 2], [0, 1]]
            assert batch.info["final_info"]["t"].tolist() == [2, 2]
            assert batch.obs["at"].tolist() == [[episode + 1, 0]] * 2
            assert batch.info["t"].tolist() == [0, 0]


# ---------------------------------------------------------------- infos
