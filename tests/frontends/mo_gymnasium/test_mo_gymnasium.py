"""MO-Gymnasium's envs, whose rewards are vectors, and its own wrappers around a VectorEnv."""

from __future__ import annotations

import functools

import mo_gymnasium
import numpy as np
import pytest
from mo_gymnasium.wrappers import LinearReward
from mo_gymnasium.wrappers.vector import MORecordEpisodeStatistics, MOSyncVectorEnv

import stepmill

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Gymnasium, of the envs' own spaces

IDS = ["deep-sea-treasure-v0", "resource-gathering-v0", "fruit-tree-v0", "breakable-bottles-v0", "water-reservoir-v0"]


def _equal(ours, theirs) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in ours)
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


@pytest.mark.parametrize("env_id", IDS)
def test_data_and_statistics_are_those_of_its_vector_env(made, env_id):
    env_fns = [functools.partial(mo_gymnasium.make, env_id)] * 3
    theirs = made(MORecordEpisodeStatistics(MOSyncVectorEnv(env_fns), gamma=0.9))
    ours = made(MORecordEpisodeStatistics(stepmill.VectorEnv(env_fns, backend="process", num_workers=2), gamma=0.9))
    assert _equal(ours.reset(seed=3)[0], theirs.reset(seed=3)[0])
    ours.action_space.seed(1)
    num_ends = 0
    for _ in range(200):
        actions = ours.action_space.sample()
        mine, other = ours.step(actions), theirs.step(actions)
        assert all(_equal(*pair) for pair in zip(mine[:4], other[:4], strict=True))
        assert mine[1].shape == (3, *ours.unwrapped.reward_space.shape)
        num_ends += "episode" in other[4]
        for key in ("r", "dr", "l") if "episode" in other[4] else ():
            assert _equal(mine[4]["episode"][key], other[4]["episode"][key])
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


def test_q_learning_finds_another_treasure_for_other_weights():
    treasure, time = _train(np.array([1.0, 0.0]))
    assert treasure > 10
    assert time < -5
    assert _train(np.array([0.1, 0.9])) == (pytest.approx(0.7), -1.0)


def _train(weights, num_envs=16, num_steps=4000):
    """Learn vectors of action values, one per objective; return the greedy policy's returns."""
    env_fns = [functools.partial(mo_gymnasium.make, "deep-sea-treasure-v0", float_state=False)] * num_envs
    rng, values = np.random.default_rng(0), np.zeros((11, 11, 4, 2))
    options = stepmill.PoolOptions(autoreset_mode="SameStep")
    with stepmill.VectorEnv(env_fns, backend="process", num_workers=2, options=options) as envs:
        obs, _ = envs.reset(seed=0)
        for step in range(num_steps):
            row, column = obs.T.copy()
            greedy = (values[row, column] @ weights).argmax(-1)
            is_random = rng.random(num_envs) < max(0.1, 1 - 1.5 * step / num_steps)
            actions = np.where(is_random, rng.integers(0, 4, num_envs), greedy)
            obs, reward, terminated, truncated, infos = envs.step(actions)
            after = obs.copy()
            for env in np.flatnonzero(truncated & ~terminated):
                after[env] = infos["final_obs"][env]
            best = (values[after[:, 0], after[:, 1]] @ weights).argmax(-1)
            target = reward + 0.99 * ~terminated[:, None] * values[after[:, 0], after[:, 1], best]
            values[row, column, actions] += 0.3 * (target - values[row, column, actions])
    env = env_fns[0]()
    obs, _ = env.reset(seed=0)
    total, is_over = np.zeros(2), False
    for _ in range(30):
        obs, reward, is_over, _, _ = env.step(int((values[tuple(obs)] @ weights).argmax()))
        total += reward
        if is_over:
            break
    return tuple(total.tolist())
