"""Policy raise: the pool stays usable, and revive() or reset() brings back what failed."""

from __future__ import annotations

from functools import partial

import pytest

import stepmill
from stepmill.testing.chaos import KILL, ChaosEnv


def make() -> stepmill.Pool:
    return stepmill.Pool([partial(ChaosEnv, env_id) for env_id in range(4)], backend="process", num_workers=2)


def test_only_the_failed_envs_are_faulted_and_the_rest_is_received() -> None:
    with make() as pool:
        pool.reset(seed=0)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1, KILL, 1])

        assert sorted(pool.recv(2).env_id.tolist()) == [0, 1]
        with pytest.raises(stepmill.UsageError):
            pool.step([1] * 4)


def test_revived_envs_step_after_a_reset_of_theirs() -> None:
    with make() as pool:
        pool.reset(seed=0)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1, KILL, 1])
        pool.recv(2)

        pool.revive([2, 3])
        pool.reset_async(seed=[5, 6], env_ids=[2, 3])
        pool.recv(2)

        assert pool.step([1] * 4).obs[:, 2].tolist() == [2, 2, 1, 1]


def test_a_full_reset_brings_all_envs_back() -> None:
    with make() as pool:
        pool.reset(seed=0)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1, KILL, 1])

        assert pool.reset(seed=1).obs[:, 2].tolist() == [0] * 4
        assert pool.step([1] * 4).obs[:, 2].tolist() == [1] * 4
