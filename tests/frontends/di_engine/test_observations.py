"""DI-engine's managers: observations and rewards come as the env gave them."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from stepmill.frontends.di_engine import SyncSubprocessEnvManager
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import LateSpaces, ObjectEnv, TreeEnv
from tests.frontends.di_engine.test_managers import act


@pytest.mark.covers("D-B12", "D-23")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_observations_of_any_depth_and_dtype_come_as_the_env_gave_them(
    launched: MakeManager, shared_memory: bool
) -> None:
    manager = launched(SyncSubprocessEnvManager, [partial(TreeEnv, i) for i in range(2)], shared_memory=shared_memory)
    timestep = act(manager)[1]
    pose, pair = timestep.obs["pose"], timestep.obs["pair"]
    assert (pose["place"].dtype, pose["place"].tolist()) == (np.float16, [1, 1])
    assert (pose["turn"], pair[0].tolist(), pair[1].dtype) == (1, [1, 0], np.uint8)
    assert pair[1].tolist() == [[1, 1], [1, 1]]
    assert (timestep.reward.dtype, timestep.reward.tolist()) == (np.float32, [1.5, 2])


@pytest.mark.covers("D-23", "D-B12")
def test_without_a_space_any_object_comes_as_it_is(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, [partial(ObjectEnv, i) for i in range(2)])
    assert manager.ready_obs[1] == {"words": ["t", 0], "set": {1}}
    timestep = act(manager)[0]
    assert timestep.obs == {"words": ["t", 1], "set": {0}}
    assert (timestep.reward, type(timestep.reward), timestep.info) == (7, int, [{"agent": 0}, {"agent": 1}])


@pytest.mark.covers("D-23")
@pytest.mark.parametrize("copy_on_get", [True, False])
def test_observations_that_are_held_are_never_overwritten(launched: MakeManager, copy_on_get: bool) -> None:
    big = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)

    manager = launched(SyncSubprocessEnvManager, [partial(ImageDing, big)] * 2, copy_on_get=copy_on_get)
    kept = [act(manager)[0].obs for _ in range(8)]
    assert [int(obs[0, 0, 0]) for obs in kept] == list(range(1, 9))
    assert (manager._client.pool.stats().leased_slots > 0) is not copy_on_get


class ImageDing(LateSpaces):
    """An image filled with the number of the step."""

    def __init__(self, space: Any) -> None:
        super().__init__(0, 100)
        self._box = space

    def _obs(self) -> Any:
        return np.full((64, 64, 3), self._t, np.uint8)
