"""The loop of `stepmill run`, with a scripted pool: what is counted, when it ends, how shares are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import gymnasium
import numpy as np
import pytest

from stepmill.observe.catalog import act_randomly
from stepmill.observe.run import PolicyError, Run, RunPlan
from stepmill.spec.batch import Batch
from stepmill.spec.errors import RecvTimeout
from stepmill.spec.stats import FAULT_KINDS, Durations, LearnerStats, PoolStats, WorkerStats


@dataclass
class ScriptedPool:
    """Env i rewards 1 per step, and its episodes take i + 2 steps; autoreset as NEXT_STEP. Workers own one env each."""

    num_envs: int
    single_action_space = gymnasium.spaces.Discrete(2)
    late: list[int] = field(default_factory=list)  # recv calls, counted from 0, that time out
    num_recv: int = 0
    num_reads: int = 0
    pending: list[int] = field(default_factory=list)
    actions: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.length = np.full(self.num_envs, -1)
        self.steps = np.zeros(self.num_envs, np.int64)

    def reset_async(self, *, seed=None) -> None:
        self.seed = seed
        self.pending = list(range(self.num_envs))

    def send(self, actions, env_ids) -> None:
        env_ids = np.arange(self.num_envs) if env_ids is None else env_ids
        assert len(actions) == len(env_ids)
        self.actions.append(actions)
        self.pending.extend(env_ids.tolist())

    def recv(self, batch_size, *, timeout_s) -> Batch:
        self.num_recv += 1
        if self.num_recv - 1 in self.late:
            raise RecvTimeout("too slow", env_ids=self.pending, timeout_s=timeout_s)
        ready, self.pending = self.pending[:batch_size], self.pending[batch_size:]
        return self._results(np.asarray(ready))

    def stats(self):
        self.num_reads += 1
        workers = tuple(
            WorkerStats(i, 100 + i, 0.0, 0.0, 0.0, 1e9 * i * self.num_reads, steps, 0, 0, 0, 0, 0, None, False)
            for i, steps in enumerate(self.steps.tolist())
        )
        none, no_calls = np.zeros(self.num_envs, np.int64), Durations(*np.zeros((4, 1)))
        learner = LearnerStats(0.0, 0.0, 0.0, 0.0, 0, 0)
        faults = np.zeros((self.num_envs, len(FAULT_KINDS)), np.int64)
        return PoolStats(1.0, self.num_envs, workers, learner, no_calls, no_calls, faults, none, none, 0, 0)

    def _results(self, env_id) -> Batch:
        self.length[env_id] += 1
        self.steps[env_id] += self.length[env_id] > 0
        terminated = self.length[env_id] == env_id + 2
        length = np.where(terminated, self.length[env_id], 0)
        info = {"episode": {"r": length.astype(np.float64), "l": length}, "_episode": terminated}
        self.length[env_id[terminated]] = -1
        no = np.zeros(len(env_id), np.bool_)
        return Batch(
            np.zeros((len(env_id), 1)), np.ones(len(env_id)), terminated, no, info if terminated.any() else {}, env_id
        )


def run_of(pool, policy=act_randomly, **plan) -> Run:
    plan = RunPlan(**{"num_envs": pool.num_envs, "batch_size": pool.num_envs, **plan})
    return Run(pool, policy, plan)


def drive(run: Run) -> None:
    assert list(run.snapshots(math.inf)) == []


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_results_of_resets_are_not_counted_as_steps(batch_size):
    pool = ScriptedPool(3)
    run = run_of(pool, batch_size=batch_size, steps=50)
    drive(run)
    totals = run.finish()
    assert totals.steps == pool.steps.sum()
    assert 50 <= totals.steps < 50 + batch_size


def test_a_run_in_step_ends_with_the_batch_that_reaches_the_limit():
    pool = ScriptedPool(4)
    run = run_of(pool, steps=5)
    drive(run)
    assert (run.finish().steps, run.finish().batches) == (8, 3)


def test_returns_and_lengths_are_those_of_the_episodes_that_ended():
    run = run_of(ScriptedPool(2), steps=10)
    drive(run)
    episodes = run.finish().episodes
    # Two episodes of 2 steps in env 0, two of 3 steps in env 1.
    assert (episodes.count, episodes.return_min, episodes.return_max) == (4, 2.0, 3.0)
    assert episodes.return_mean == episodes.length_mean == episodes.recent_return_mean == 2.5


def test_before_the_first_episode_ends_the_means_are_nan():
    run = run_of(ScriptedPool(2), steps=2)
    drive(run)
    episodes = run.finish().episodes
    assert episodes.count == 0
    assert math.isnan(episodes.return_mean)
    assert math.isnan(episodes.recent_length_mean)


def test_waiting_in_vain_shows_a_snapshot_and_loses_nothing():
    pool = ScriptedPool(4, late=[1, 2])
    run = run_of(pool, batch_size=2, steps=4)
    assert len(list(run.snapshots(0.0))) == 5
    assert run.finish().steps == pool.steps.sum()


def test_a_limit_of_seconds_ends_a_run_without_a_limit_of_steps():
    run = run_of(ScriptedPool(2), seconds=0.05)
    drive(run)
    assert run.finish().elapsed_s >= 0.05


def test_the_policy_gets_the_observation_and_the_batched_space_and_its_actions_are_sent():
    seen = []

    def act(obs, action_space):
        seen.append((obs.shape, action_space.sample().shape))
        return np.full(3, 1)

    pool = ScriptedPool(3)
    drive(run_of(pool, act, steps=3))
    assert set(seen) == {((3, 1), (3,))}
    assert pool.actions[0].tolist() == [1, 1, 1]


def test_the_same_seed_draws_the_same_actions():
    pools = [ScriptedPool(3), ScriptedPool(3)]
    for pool in pools:
        drive(run_of(pool, steps=30, seed=7))
    assert np.array_equal(pools[0].actions, pools[1].actions)


def test_a_policy_that_raises_is_named_with_its_cause():
    def act(obs, action_space):
        raise ValueError("no idea")

    with pytest.raises(PolicyError, match="policy raised ValueError: no idea") as raised:
        drive(run_of(ScriptedPool(2), act, steps=2))
    assert isinstance(raised.value.__cause__, ValueError)


def test_shares_stay_between_0_and_1_whatever_the_clocks_say():
    pool = ScriptedPool(2)
    run = run_of(pool, steps=1)
    drive(run)
    for worker in run.finish().workers():
        assert 0 <= worker["env_share"] <= 1
        assert 0 <= worker["wait_share"] <= 1


def test_an_interrupted_run_still_tells_what_it_did():
    pool = ScriptedPool(2)

    def act(obs, action_space):
        if len(pool.actions) == 3:
            raise KeyboardInterrupt
        return action_space.sample()

    run = run_of(pool, act)
    with pytest.raises(KeyboardInterrupt):
        drive(run)
    # The batch that the policy had in its hands is not counted.
    assert run.finish().steps == pool.steps.sum() - 1 == 4
