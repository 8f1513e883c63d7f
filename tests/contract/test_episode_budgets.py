"""A budget of episodes: who has played it is never ready again, and a step of all envs leaves its row empty."""

from __future__ import annotations

import os
import signal
from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.spec.options import EnvState
from stepmill.testing.envs import BatchedCountingEnv, CountingEnv
from tests.harness.pools import await_ready, await_restart, begun, counting_envs, kill_worker, make_pool

MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep"])


def drive(pool, max_steps=50):
    """Step every env that may be stepped, as long as there are any; count the ends of episodes, by env."""
    ended = np.zeros(pool.num_envs, int)
    for _ in range(max_steps):
        ids = np.flatnonzero(~pool.exhausted)
        if not len(ids):
            return ended
        pool.send(np.ones(len(ids), int), ids)
        batch = pool.recv(len(ids))
        np.add.at(ended, batch.env_id, batch.terminated | batch.truncated)
    raise AssertionError(f"envs {np.flatnonzero(~pool.exhausted)} are not exhausted after {max_steps} steps")


@MODES
@pytest.mark.covers("D-5", "G-20/budgets")
def test_each_env_plays_its_budget_and_no_episode_more(pool_of, mode):
    env_fns = [partial(CountingEnv, i, 2 + i) for i in range(3)]
    pool = begun(pool_of(env_fns, num_episodes=2, autoreset_mode=mode))
    assert drive(pool).tolist() == [2, 2, 2]
    assert PoolPort(pool).num_ended.tolist() == [2, 2, 2]
    assert pool.exhausted.tolist() == [True] * 3
    assert pool.states == [EnvState.EXHAUSTED] * 3
    assert pool.get_attr("num_resets") == (2, 2, 2)  # none was begun that nobody plays


def test_a_vector_env_steps_on_until_all_are_exhausted(vector_env_of):
    envs = begun(
        vector_env_of([partial(CountingEnv, 0, 1), partial(CountingEnv, 1, 3)], options={"num_episodes": 1}, copy=True)
    )
    ended = [envs.step(np.array([1, 1]))[2].tolist() for _ in range(3)]
    assert ended == [[True, False], [False, False], [False, True]]
    with pytest.raises(stepmill.UsageError, match=r"envs \[0, 1\] are exhausted"):
        envs.step(np.array([1, 1]))
    obs, _ = envs.reset(seed=0)
    assert obs.tolist() == [[0, 0, 0], [1, 0, 0]]
    envs.step(np.array([1, 1]))


def test_who_is_exhausted_is_refused_by_name_and_nothing_is_sent(pool_of):
    pool = begun(pool_of([partial(CountingEnv, 0, 1), partial(CountingEnv, 1, 5)], num_episodes=1))
    pool.step([1, 1])
    with pytest.raises(stepmill.UsageError, match=r"envs \[0\] are exhausted and take no more steps"):
        pool.send([1, 1])
    with pytest.raises(stepmill.UsageError, match="exhausted"):
        pool.send([1], [0])
    assert pool.states == [EnvState.EXHAUSTED, EnvState.IDLE]
    assert pool.get_attr("num_steps") == (1, 1)


@pytest.mark.covers("D-B3")
def test_nothing_waits_for_a_pool_that_is_exhausted(pool_of):
    pool = begun(pool_of(counting_envs(2, 1), num_episodes=1))
    pool.step([1, 1])
    with pytest.raises(stepmill.UsageError, match="all envs are exhausted"):
        pool.recv()
    with pytest.raises(stepmill.UsageError, match="are exhausted"):
        pool.step([1, 1])
    assert pool.recv(min_envs=0).num_rows == 0


class FailingEnv(CountingEnv):
    """Raises at action 9, and ends its process at action 8."""

    def step(self, action):
        if action == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action) if action < 9 else 1 / 0


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("overlap_resets", [False, True])
def test_no_episode_is_begun_after_a_last_one_that_raised(pool_of, mode, overlap_resets):
    options = {"num_episodes": 2, "autoreset_mode": mode, "on_fault": "truncate", "resets": {"overlap": overlap_resets}}
    if overlap_resets and mode != "NextStep":
        options.pop("resets")
    pool = begun(pool_of([partial(FailingEnv, i, 3) for i in range(2)], seeding="per_episode", **options))
    pool.step([9, 1])
    if mode == "Disabled":
        pool.reset(env_ids=[0])
    elif mode == "NextStep":
        pool.step([1, 1])
    pool.send([5, 1])
    last = pool.recv(2)

    pool.send([9], [0])
    batch = pool.recv(1)

    assert (batch.truncated.tolist(), batch.reward.tolist()) == ([True], [0.0])
    assert batch.obs.tolist() == last.obs[:1].tolist()
    place = batch.info["final_info"] if mode == "SameStep" else batch.info
    assert place["fault"]["kind"].tolist() == ["raised"]
    assert batch.info["episode"]["r"].tolist() == [5.0]
    if mode == "SameStep":
        assert batch.info["final_obs"][0].tolist() == last.obs[0].tolist()
    assert pool.exhausted.tolist() == [True, False]
    for _ in range(2):  # a worker without commands resets envs after the first call
        assert pool.get_attr("num_resets", env_ids=[0]) == (2,)
    pool.reset(env_ids=[0])
    assert PoolPort(pool).num_ended[0] == 0
    pool.send([4], [0])
    assert pool.recv(1).reward.tolist() == [4.0]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("neighbour", ["idle", "ready"])
def test_no_episode_is_begun_after_a_last_one_that_was_lost_with_a_neighbour(mode, neighbour):
    options = {"num_episodes": 1, "autoreset_mode": mode, "on_fault": "truncate", "num_workers": 1}
    with begun(make_pool("fork", [partial(FailingEnv, i, 9) for i in range(2)], **options)) as pool:
        pool.send([1], [0])
        if neighbour == "idle":
            pool.recv(env_ids=[0])
        else:
            await_ready(pool, 1)
        pool.send([8], [1])
        assert pool.recv(env_ids=[1]).truncated.tolist() == [True]
        if neighbour == "ready":
            assert pool.recv().truncated.tolist() == [False]

        pool.send([7], [0])
        batch = pool.recv()

        assert (batch.truncated.tolist(), batch.obs.tolist()) == ([True], [[0, 0, 1]])
        place = batch.info["final_info"] if mode == "SameStep" else batch.info
        assert place["fault"]["kind"].tolist() == ["neighbour"]
        assert pool.exhausted.all()
        await_restart(pool, 0)
        assert pool.get_attr("num_resets") == (0, 0)  # of the successor's objects


def test_batched_envs_are_refused():
    with pytest.raises(stepmill.UsageError, match="num_episodes=3 does not work with batched envs"):
        make_pool("serial", [BatchedCountingEnv], num_episodes=3)


@pytest.mark.parametrize("where", ["fork"])
def test_a_reset_brings_back_an_exhausted_env_whose_worker_has_died(pool_of, where):
    pool = begun(pool_of(counting_envs(2, 1), num_episodes=1, num_workers=2))
    pool.step([1, 1])
    kill_worker(pool, 1)
    with pytest.warns(RuntimeWarning, match=r"worker of the exhausted envs \[1\] has died"):
        batch = pool.reset(seed=0)
    assert batch.env_id.tolist() == [0, 1]
    assert drive(pool).tolist() == [1, 1]


def test_a_worker_that_is_played_again_does_not_step_those_that_are_exhausted():
    options = {"num_episodes": 1, "num_workers": 1, "on_fault": "replay", "seeding": "per_episode"}
    with begun(make_pool("fork", [partial(CountingEnv, 0, 1), partial(CountingEnv, 1, 9)], **options)) as pool:
        last = pool.step([1, 1]).obs[0].tolist()
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)

        for t in (2, 3):
            batch = pool.step([7, 7])
            assert batch.obs.tolist() == [last, [1, 0, t]]
            assert batch.reward.tolist() == [0.0, 7.0]
            assert not batch.terminated.any()
        assert pool.get_attr("num_steps") == (1, 3)
