"""DI-engine's `PoolEnvManager` over stepmill: EnvPool's envs with DI-engine's timesteps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import envpool
import numpy as np
import pytest

from stepmill.frontends.di_engine import PoolEnvManager, create_env_manager, get_env_manager_cls
from stepmill.spec.errors import UsageError
from tests.harness.pools import keep_closed

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
    pytest.mark.covers("D-29/env_pool"),
]
CARTPOLE = {"env_id": "CartPole-v1", "env_num": 4, "batch_size": 4}


@pytest.fixture
def made() -> Iterator[Any]:
    """Make managers, which are closed at the end."""
    yield from keep_closed(lambda **cfg: PoolEnvManager({**CARTPOLE, **cfg}))


def test_timesteps_are_those_of_envpool(made: Any) -> None:
    theirs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=5)
    obs, _ = theirs.reset()
    ours = made()
    ours.seed(5)
    ours.launch()
    assert {env_id: own.tolist() for env_id, own in ours.ready_obs.items()} == dict(enumerate(obs.tolist()))
    returns = np.zeros(4)
    num_ended = 0
    for _ in range(60):
        timesteps = ours.step({env_id: np.array([1]) for env_id in ours.ready_obs})
        obs, reward, terminated, truncated, _ = theirs.step(np.ones(4, np.int64))
        returns += reward
        assert list(timesteps) == [0, 1, 2, 3]
        for env_id, timestep in timesteps.items():
            assert timestep.obs.tolist() == obs[env_id].tolist()
            assert (timestep.obs.dtype, timestep.reward.dtype, timestep.reward.shape) == (np.float32, np.float32, (1,))
            assert timestep.reward == reward[env_id]
            assert timestep.done == (terminated | truncated)[env_id]
            assert timestep.info["env_id"] == env_id
            assert ("eval_episode_return" in timestep.info) is timestep.done
            if timestep.done:
                assert timestep.info["eval_episode_return"] == returns[env_id]
                returns[env_id] = 0.0
                num_ended += 1
            assert ours.ready_obs[env_id] is timestep.obs
    assert num_ended > 4


def test_an_asynchronous_manager_returns_batch_size_envs_at_a_time(made: Any) -> None:
    manager = made(batch_size=2)
    manager.launch()
    assert sorted(manager.ready_obs) == [0, 1, 2, 3]
    seen = set()
    timesteps = manager.step(dict.fromkeys(manager.ready_obs, 1))
    for _ in range(8):
        assert len(timesteps) == len(manager.ready_obs) == 2
        seen |= set(timesteps)
        timesteps = manager.step(dict.fromkeys(manager.ready_obs, 1))
    assert seen == {0, 1, 2, 3}


def test_the_same_seed_gives_the_same_episodes_and_another_one_others(made: Any) -> None:
    first = []
    for seed in (3, 3, 4):
        manager = made()
        manager.seed(seed)
        manager.launch()
        first.append(np.stack(list(manager.ready_obs.values())))
    np.testing.assert_array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])


def test_settings_of_atari_tasks_reach_envpool(made: Any) -> None:
    manager = made(env_id="Pong-v5", env_num=2, batch_size=2, stack_num=2, frame_skip=2, gray_scale=True)
    manager.launch()
    assert manager.ready_obs[0].shape == (2, 84, 84)
    manager.step({0: 0, 1: 0})


def test_a_manager_is_launched_once_and_closed_more_than_once(made: Any) -> None:
    manager = made()
    with pytest.raises(AssertionError, match="env manager is closed"):
        manager.step({0: 1})
    manager.launch()
    with pytest.raises(AssertionError, match="Please first close the env manager"):
        manager.launch()
    manager.close()
    manager.close()
    manager.launch()
    assert len(manager.ready_obs) == manager.env_num == 4


def test_actions_for_envs_that_do_not_exist_or_are_busy_are_refused(made: Any) -> None:
    manager = made(batch_size=2)
    manager.launch()
    with pytest.raises(UsageError, match="4"):
        manager.step({4: 1})
    manager.step(dict.fromkeys(range(4), 1))
    busy = next(env_id for env_id in range(4) if env_id not in manager.ready_obs)
    with pytest.raises(UsageError, match=str(busy)):
        manager.step({busy: 1})


def test_the_factory_makes_one_and_needs_no_env_functions() -> None:
    cfg = {"type": "env_pool", **CARTPOLE}
    manager = create_env_manager(cfg, [])
    assert type(manager) is get_env_manager_cls(cfg) is PoolEnvManager
    assert PoolEnvManager.default_config()["batch_size"] == 8


def test_a_missing_task_or_a_batch_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="env_id"):
        PoolEnvManager({"env_num": 2, "batch_size": 2})
    with pytest.raises(UsageError, match="batch_size=3 is more than env_num=2"):
        PoolEnvManager({"env_id": "CartPole-v1", "env_num": 2, "batch_size": 3})
