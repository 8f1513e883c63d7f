"""Envs that raise can have another policy than workers that die."""

from __future__ import annotations

from functools import partial

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import DyingEnv, RaisingEnv
from tests.harness.pools import begun, make_pool


def pool_of(*env_fns, **options):
    return make_pool("fork", list(env_fns), num_workers=len(env_fns), **options)


def test_deaths_are_repaired_while_exceptions_are_raised():
    with begun(
        pool_of(partial(RaisingEnv, at=1), partial(DyingEnv, at=2), on_fault="truncate", restarts={"on_raise": "raise"})
    ) as pool:
        with pytest.raises(stepmill.EnvError, match="a deliberate failure") as caught:
            pool.step([1, 1])
        assert caught.value.env_id == 0
        assert pool.recv().env_id.tolist() == [1]
        pool.reset(env_ids=[0])
        batch = pool.step([1, 1])
        assert batch.truncated.tolist() == [False, True]
        assert batch.info["fault"]["kind"].tolist() == [None, "died"]


def test_exceptions_end_an_episode_while_deaths_are_raised():
    with begun(pool_of(partial(RaisingEnv, at=1), partial(DyingEnv, at=2), restarts={"on_raise": "truncate"})) as pool:
        batch = pool.step([1, 1])
        assert batch.truncated.tolist() == [True, False]
        assert batch.info["fault"]["kind"].tolist() == ["raised", None]
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1])


def test_an_env_that_raised_can_be_played_again_while_deaths_are_raised():
    arguments = {"restarts": {"on_raise": "replay"}, "seeding": "per_episode"}
    with begun(pool_of(partial(RaisingEnv, at=2, length=9), partial(CountingEnv, 1, 9), **arguments)) as pool:
        for t in (1, 2, 3):
            batch = pool.step([t, t])
            assert batch.reward.tolist() == [t, t]
            assert batch.obs[:, 2].tolist() == [t, t]
        assert "fault" not in batch.info


def test_replay_needs_seeds_if_either_policy_is_replay():
    with pytest.raises(stepmill.UsageError, match="seeding='per_episode'"):
        stepmill.PoolOptions(restarts={"on_raise": "replay"})
    with pytest.raises(stepmill.UsageError, match="on_raise='later' is not one of"):
        stepmill.PoolOptions(restarts={"on_raise": "later"})
