"""The loop of `stepmill run`: what is counted, when it ends, how shares are computed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.observe.catalog import act_randomly
from stepmill.observe.run import PolicyError, Run, RunPlan
from stepmill.spec.errors import RecvTimeout
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import keep_closed


class LatePool(stepmill.Pool):
    """Episodes of env i take i + 2 steps. Two calls of `recv` after the first time out."""

    late = False
    num_recv = 0

    def __init__(self, num_envs: int) -> None:
        super().__init__([partial(CountingEnv, i, i + 2) for i in range(num_envs)], backend="serial")

    def recv(self, *arguments, **keywords):
        self.num_recv += 1
        if self.late and self.num_recv in (2, 3):
            raise RecvTimeout("too slow")
        return super().recv(*arguments, **keywords)


@pytest.fixture
def pool_of():
    yield from keep_closed(LatePool)


def act_alike(obs, action_space):
    return np.full(len(obs), 1)


def run_of(pool, policy=act_alike, **plan) -> Run:
    plan = RunPlan(**{"num_envs": pool.num_envs, "batch_size": pool.num_envs, **plan})
    return Run(pool, policy, plan)


def drive(run: Run) -> Run:
    assert list(run.snapshots(math.inf)) == []
    return run


def num_received(pool) -> int:
    """Return how many steps the run has received; those that it has sent since then are received here."""
    taken = sum(pool.get_attr("num_steps"))
    return taken - np.count_nonzero(pool.recv(min_envs=0).obs[:, 2])


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_results_of_resets_are_not_counted_as_steps(pool_of, batch_size):
    pool = pool_of(3)
    totals = drive(run_of(pool, batch_size=batch_size, steps=50)).finish()
    assert totals.steps == num_received(pool)
    assert 50 <= totals.steps < 50 + batch_size


def test_a_run_in_step_ends_with_the_batch_that_reaches_the_limit(pool_of):
    totals = drive(run_of(pool_of(4), steps=5)).finish()
    assert (totals.steps, totals.batches) == (8, 3)


def test_returns_and_lengths_are_those_of_the_episodes_that_ended(pool_of):
    episodes = drive(run_of(pool_of(2), steps=10)).finish().episodes
    # Two episodes of 2 steps in env 0, two of 3 steps in env 1.
    assert (episodes.count, episodes.return_min, episodes.return_max) == (4, 2.0, 3.0)
    assert episodes.return_mean == episodes.length_mean == episodes.recent_return_mean == 2.5


def test_before_the_first_episode_ends_the_means_are_nan(pool_of):
    episodes = drive(run_of(pool_of(2), steps=2)).finish().episodes
    assert episodes.count == 0
    assert math.isnan(episodes.return_mean)
    assert math.isnan(episodes.recent_length_mean)


def test_waiting_in_vain_shows_a_snapshot_and_loses_nothing(pool_of):
    pool = pool_of(4)
    pool.late = True
    run = run_of(pool, batch_size=2, steps=4)
    assert len(list(run.snapshots(0.0))) == 5
    assert run.finish().steps == num_received(pool)


def test_a_limit_of_seconds_ends_a_run_without_a_limit_of_steps(pool_of):
    assert drive(run_of(pool_of(2), seconds=0.05)).finish().elapsed_s >= 0.05


def test_the_policy_gets_the_observation_and_the_batched_space_and_its_actions_are_sent(pool_of):
    seen = []

    def act(obs, action_space):
        seen.append((obs.shape, action_space.sample().shape))
        return [5, 6, 7]

    pool = pool_of(3)
    drive(run_of(pool, act, steps=3))
    assert set(seen) == {((3, 3), (3,))}
    assert pool.recv().reward.tolist() == [5, 6, 7]


def test_the_same_seed_draws_the_same_actions(pool_of):
    first, second = (drive(run_of(pool_of(3), act_randomly, steps=30, seed=7)).finish() for _ in range(2))
    assert first.episodes == second.episodes


def test_a_policy_that_raises_is_named_with_its_cause(pool_of):
    def act(obs, action_space):
        raise ValueError("no idea")

    with pytest.raises(PolicyError, match="policy raised ValueError: no idea") as raised:
        drive(run_of(pool_of(2), act, steps=2))
    assert isinstance(raised.value.__cause__, ValueError)


def test_shares_stay_between_0_and_1_whatever_the_clocks_say(pool_of):
    totals = drive(run_of(pool_of(2), steps=1)).finish()
    waiting = tuple(replace(each, wait_s=1.0) for each in totals.recent.workers)
    for worker in replace(totals, recent=replace(totals.recent, elapsed_s=0.0, workers=waiting)).workers():
        assert 0 <= worker["env_share"] <= 1
        assert 0 <= worker["wait_share"] <= 1


def test_an_interrupted_run_still_tells_what_it_did(pool_of):
    pool = pool_of(2)

    def act(obs, action_space):
        if pool.num_recv == 4:
            raise KeyboardInterrupt
        return action_space.sample()

    run = run_of(pool, act)
    with pytest.raises(KeyboardInterrupt):
        drive(run)
    # The batch that the policy had in its hands is not counted.
    assert run.finish().steps == num_received(pool) - 1 == 4
