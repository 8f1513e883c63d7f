"""MO-Gymnasium's envs, whose rewards are vectors, and its own wrappers around a VectorEnv."""

from __future__ import annotations

import functools

import mo_gymnasium
import numpy as np
import pytest
from mo_gymnasium.wrappers import LinearReward
from mo_gymnasium.wrappers.vector import MORecordEpisodeStatistics, MOSyncVectorEnv

import stepmill
from tests.harness.pools import assert_equal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Gymnasium, of the envs' own spaces

IDS = ["deep-sea-treasure-v0", "resource-gathering-v0", "fruit-tree-v0", "breakable-bottles-v0", "water-reservoir-v0"]


@pytest.mark.parametrize("env_id", IDS)
def test_data_and_statistics_are_those_of_its_vector_env(made, env_id):
    env_fns = [functools.partial(mo_gymnasium.make, env_id)] * 3
    theirs = made(MORecordEpisodeStatistics(MOSyncVectorEnv(env_fns), gamma=0.9))
    ours = made(MORecordEpisodeStatistics(stepmill.VectorEnv(env_fns, backend="process", num_workers=2), gamma=0.9))
    assert_equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    ours.action_space.seed(1)
    num_ends = 0
    for _ in range(200):
        actions = ours.action_space.sample()
        mine, other = ours.step(actions), theirs.step(actions)
        assert_equal(mine[:4], other[:4])
        assert mine[1].shape == (3, *ours.unwrapped.reward_space.shape)
        num_ends += "episode" in other[4]
        for infos in (mine[4], other[4]):
            infos.get("episode", {}).pop("t", None)  # seconds
        assert_equal(mine[4].get("episode"), other[4].get("episode"))
    assert num_ends


def test_a_linear_reward_is_a_number():
    def make():
        return LinearReward(mo_gymnasium.make("deep-sea-treasure-v0"), weight=np.array([0.75, 0.25]))

    with stepmill.VectorEnv([make] * 2, backend="serial") as envs:
        envs.reset(seed=0)
        _, reward, _, _, infos = envs.step([1, 3])
        assert reward.tolist() == pytest.approx([0.275, -0.25])
        assert infos["vector_reward"].shape == (2, 2)
        assert not hasattr(envs, "reward_space")
