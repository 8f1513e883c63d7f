"""Budgets, kept options, properties, agents and infos of fixed shape, where spare envs take the place of finished ones."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from stepmill.pool.port import PoolPort
from stepmill.testing.envs import CountingEnv, SeedRecorder
from tests.harness.agents import Agents, FixedInfo
from tests.harness.pools import begun


def test_a_budget_counts_the_episodes_of_the_env_and_not_of_the_object(pool_of):
    pool = begun(pool_of([partial(CountingEnv, i, 2) for i in range(4)], resets={"spare_envs": 2}, num_episodes=3))
    ended = np.zeros(2, int)
    for _ in range(20):
        if pool.exhausted.all():
            break
        ended += pool.step([1, 1]).terminated
    assert ended.tolist() == [3, 3]
    assert PoolPort(pool).num_ended.tolist() == [3, 3]
    pool.reset(seed=0)
    assert not pool.exhausted.any()
    assert pool.step([1, 1]).obs.tolist() == [[0, 0, 1], [1, 0, 1]]


@pytest.mark.covers("D-15")
def test_options_kept_for_all_are_the_spares_too(pool_of):
    pool = pool_of([lambda: SeedRecorder(1)] * 4, resets={"spare_envs": 2})
    pool.reset(options={"level": 1}, persist_options=True)
    for _ in range(6):
        pool.step([0, 0])
    given = [options for log in pool.get_attr("options", env_ids=range(4)) for options in log]
    # The very first reset of a spare may have come before the options.
    assert given.count({"level": 1}) >= len(given) - 2
    assert all(log[-1] == {"level": 1} for log in pool.get_attr("options", env_ids=range(4)))


@pytest.mark.covers("U-7")
def test_properties_for_all_are_the_spares_too(pool_of):
    pool = begun(pool_of([partial(CountingEnv, i, 1) for i in range(4)], resets={"spare_envs": 2}))
    pool.properties.set("gravity", 3)
    for _ in range(5):
        pool.step([1, 1])
        assert pool.properties.get("gravity") == (3, 3)


def test_agents_of_a_spare_are_alive_when_it_moves_in(pool_of):
    pool = begun(pool_of([Agents] * 3, resets={"spare_envs": 1}))
    act = np.ones((2, 3), int)
    for episode in range(3):
        for _ in range(3):
            batch = pool.step(act)
        assert not batch.alive.any(), episode
        assert batch.info["episode"]["r"].tolist() == [[1, 4, 9]] * 2
        first = pool.step(act)
        assert first.alive.all()
        assert not first.reward.any()


def test_infos_of_fixed_shape_come_from_who_serves_the_env(pool_of):
    pool = begun(pool_of([partial(FixedInfo, identity, 2) for identity in (0, 2, 3)], resets={"spare_envs": 1}))
    served = []
    for _ in range(6):
        batch = pool.step([0, 0])
        served.append(batch.info["place"][:, 0].astype(int).tolist())
        assert batch.info["nest"]["count"].tolist() == batch.obs.tolist()
    assert served == [[0, 2], [0, 2], [3, 0], [3, 0], [3, 0], [2, 3]]
