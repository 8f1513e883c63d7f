"""`make_vec(..., backend="kernel")` finds the kernels that stepmill brings."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import stepmill

pytest.importorskip("numba")


def test_the_envs_look_like_gymnasiums() -> None:
    ours, theirs = stepmill.make_vec("CartPole-v1", 3, backend="kernel"), gymnasium.make_vec("CartPole-v1", 3)
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.single_action_space == theirs.single_action_space
    obs, info = ours.reset(seed=1)
    assert (obs.shape, obs.dtype, info) == ((3, 4), np.float32, {})
    for _ in range(600):
        obs = ours.step(ours.action_space.sample())[0]
    assert np.abs(obs).max() < 10.0
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("env_id", "arguments", "message"),
    [
        ("LunarLander-v3", {}, "there is no kernel for 'LunarLander-v3'; there are CartPole-v1, MountainCar-v0"),
        ("CartPole-v1", {"wrappers": [gymnasium.wrappers.TimeAwareObservation]}, "of a kernel cannot be wrapped"),
    ],
)
def test_what_kernels_are_not_is_refused(env_id: str, arguments: Any, message: str) -> None:
    with pytest.raises(stepmill.UsageError, match=message):
        stepmill.make_vec(env_id, 2, backend="kernel", **arguments)
