"""Gymnasium's vector wrappers do on a `stepmill.VectorEnv` what they do on its own vector env."""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from stepmill.testing.envs import ImageEnv
from tests.harness.gym_envs import FixedEpisodeEnv, cartpoles
from tests.harness.pools import assert_equal

FIXED = [partial(FixedEpisodeEnv, 3, 0.5), partial(FixedEpisodeEnv, 4, 0.25), partial(FixedEpisodeEnv, 5)]
IMAGES = [partial(ImageEnv, i, (8, 6, 3), length=4) for i in range(2)]
BOUNDS = {"min_obs": np.zeros(3, np.float32), "max_obs": np.ones(3, np.float32)}


def _play(envs, num_steps=30):
    envs.action_space.seed(7)
    results = [envs.reset(seed=3)] + [envs.step(envs.action_space.sample()) for _ in range(num_steps)]
    envs.close()
    return results


def _without_times(results):
    for *_, infos in results:
        if isinstance(infos, dict) and "episode" in infos:
            infos["episode"] = {key: value for key, value in infos["episode"].items() if key not in ("t", "_t")}
    return results


@pytest.mark.parametrize("where", ["fork"])
@pytest.mark.parametrize(
    ("wrap", "env_fns"),
    [
        (wrappers.NormalizeObservation, FIXED),
        (wrappers.NormalizeReward, FIXED),
        (wrappers.FlattenObservation, IMAGES),
        (wrappers.GrayscaleObservation, IMAGES),
        (partial(wrappers.ReshapeObservation, shape=(6, 24)), IMAGES),
        (partial(wrappers.RescaleObservation, **BOUNDS), FIXED),
        (partial(wrappers.DtypeObservation, dtype=np.int32), IMAGES),
        (partial(wrappers.ClipReward, min_reward=0.5, max_reward=2.0), FIXED),
        (wrappers.ClipAction, FIXED),
        (partial(wrappers.RescaleAction, min_action=1, max_action=2), FIXED),
        (partial(wrappers.TransformObservation, func=lambda batch: batch * 2), FIXED),
        (wrappers.DictInfoToList, cartpoles(3)),
    ],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", ""),
)
def test_a_wrapper_sees_the_same_data(vector_env_of, wrap, env_fns):
    ours = _play(wrap(vector_env_of(env_fns)))
    theirs = _play(wrap(SyncVectorEnv(env_fns)))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episode_statistics_are_recorded(vector_env_of, mode):
    ours = wrappers.RecordEpisodeStatistics(vector_env_of(FIXED, autoreset_mode=mode))
    theirs = wrappers.RecordEpisodeStatistics(SyncVectorEnv(FIXED, autoreset_mode=mode))
    left, right = _without_times(_play(ours)), _without_times(_play(theirs))
    assert_equal(left, right)
    assert any("episode" in infos for *_, infos in left)
    assert list(ours.return_queue) == list(theirs.return_queue)
    assert list(ours.length_queue) == list(theirs.length_queue)


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_numpy_to_torch_gives_tensors(vector_env_of):
    import torch

    envs = wrappers.NumpyToTorch(vector_env_of(IMAGES))
    observation, _ = envs.reset(seed=0)
    assert isinstance(observation, torch.Tensor)
    assert observation.shape == (2, 8, 6, 3)
    held = [observation.clone()]
    seen = [observation]
    for _ in range(12):
        observation, reward, terminated, truncated, _ = envs.step(torch.tensor([0, 1]))
        assert reward.dtype == torch.float64
        assert terminated.dtype == torch.bool
        seen.append(observation)
        held.append(observation.clone())
    assert all(torch.equal(one, other) for one, other in zip(seen, held, strict=True))
    del envs, seen, held, observation, reward, terminated, truncated
