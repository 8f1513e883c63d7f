"""`pool.stats()`: where the time goes, per worker, per env and in the learner."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import stepmill
from stepmill import _native
from stepmill.pool.port import PoolPort
from stepmill.spec.stats import FAULT_KINDS, LearnerStats, NodeStats, PoolStats, WorkerStats
from stepmill.spec.stats_text import notes
from stepmill.testing.envs import CountingEnv, ImageEnv
from stepmill.testing.faulty import RaisingEnv
from tests.harness.pools import BACKENDS, begun, counting_envs, kill_worker, make_pool

BUSY_S = 0.002


class BusyEnv(CountingEnv):
    """Steps of env 1 take 2 ms of computation, its resets 4 ms; other envs take no time."""

    def reset(self, **arguments):
        self._compute(2 * BUSY_S)
        return super().reset(**arguments)

    def step(self, action):
        self._compute(BUSY_S)
        return super().step(action)

    def _compute(self, seconds):
        until = time.monotonic() + seconds * (self.identity == 1)
        while time.monotonic() < until:
            pass


class WordyEnv(CountingEnv):
    """Its infos do not fit in a row of the slab."""

    def step(self, action):
        return (*super().step(action)[:4], {"text": "x" * 5000})


def busy_pool(where="forkserver", num_envs=3, **options):
    return make_pool(where, [partial(BusyEnv, i, 100) for i in range(num_envs)], **options)


def play(pool, num_steps):
    pool.reset(seed=0)
    for _ in range(num_steps):
        pool.step([0] * pool.num_envs)


@pytest.mark.parametrize("where", ["serial", "thread", "forkserver"])
def test_durations_of_a_slow_env_are_found_by_env_id(where):
    with busy_pool(where) as pool:
        play(pool, 20)
        stats = pool.stats()
    slow = stats.step.of(1)
    assert slow.num_calls == 20
    assert slow.percentile(1) >= BUSY_S
    assert slow.max_s >= slow.percentile(50) >= BUSY_S
    assert stats.reset.of(1).mean_s >= 2 * BUSY_S
    assert stats.step.of(0).percentile(1) < BUSY_S  # other programs may take the core in most of them


def test_the_slowest_envs_are_those_that_take_twice_the_median():
    with make_pool("serial", counting_envs(5)) as pool:
        stats = pool.stats()
    calls = np.array([[2, 0], [0, 2], [2, 0], [1, 1], [0, 0]])
    stats = replace(stats, step=replace(stats.step, counts=calls, total_s=np.array([2.0, 9.0, 2.2, 5.0, 0.0])))
    assert stats.slowest == [1]
    assert replace(stats, step=replace(stats.step, counts=calls[:, :0])).slowest == []
    stats = replace(stats, step=replace(stats.step, total_s=np.array([2.0, 9.0, 2.2, 9.2, 0.0])))
    assert stats.slowest == []


@pytest.mark.covers("X-1/stats")
@pytest.mark.parametrize("where", BACKENDS)
def test_the_time_of_workers_and_learner_is_divided_without_rest(where):
    with busy_pool(where) as pool:
        play(pool, 20)
        stats = pool.stats()
        owner = stats.workers[PoolPort(pool).worker_of[1]]
    assert owner.step_s >= 20 * BUSY_S
    assert owner.reset_s >= 2 * BUSY_S
    assert owner.step_s + owner.reset_s + owner.publish_s + owner.wait_s <= stats.elapsed_s
    learner = stats.learner
    assert (
        learner.send_s + learner.wait_s + learner.elsewhere_s >= 20 * BUSY_S
    )  # the learner may be preempted before it waits
    assert learner.wait_s > 0
    assert learner.send_s > 0
    assert learner.gather_s > 0
    parts = learner.send_s + learner.wait_s + learner.gather_s + learner.elsewhere_s
    assert parts == pytest.approx(stats.elapsed_s, rel=0.01)
    assert (learner.sends, learner.batches) == (21, 21)


class RarelySlowEnv(CountingEnv):
    """Every 150th step takes 4 ms; a timed one counts for all steps that were not timed before it."""

    num_steps = 0

    def step(self, action):
        self.num_steps += 1
        if self.num_steps % 150 == 0:
            until = time.monotonic() + 0.004
            while time.monotonic() < until:
                pass
        return super().step(action)


def test_estimates_do_not_add_up_to_more_than_the_time_there_was():
    for num_steps in range(300, 700, 50):
        with make_pool("serial", [partial(RarelySlowEnv, i, 100) for i in range(3)]) as pool:
            play(pool, num_steps)
            stats = pool.stats()
        assert stats.workers[0].step_s + stats.workers[0].reset_s <= stats.elapsed_s


def test_short_steps_are_sampled_and_still_all_counted():
    with make_pool("serial", counting_envs(2)) as pool:
        play(pool, 5000)
        stats = pool.stats()
    for env_id in range(2):
        num_steps = stats.workers[0].steps / 2
        assert num_steps - 300 < stats.step.of(env_id).num_calls <= num_steps
    assert stats.workers[0].step_s <= stats.workers[0].busy_s + 1e-6


def test_a_difference_has_only_what_happened_between():
    with busy_pool("serial") as pool:
        play(pool, 10)
        earlier = pool.stats()
        for _ in range(5):
            pool.step([0] * 3)
        between = pool.stats() - earlier
    assert (between.steps, between.resets) == (15, 0)
    assert between.step.of(1).num_calls == 5
    assert between.reset.num_calls == 0
    assert between.reset.max_s.max() == 0
    assert (between.learner.sends, between.workers[0].steps) == (5, 15)
    assert between.elapsed_s < earlier.elapsed_s + between.elapsed_s


def test_faults_are_counted_once_by_env_and_kind():
    envs = [partial(RaisingEnv, at=3 if i == 1 else 100, identity=i) for i in range(3)]
    with make_pool("forkserver", envs, on_fault="truncate") as pool:
        play(pool, 4)
        stats = pool.stats()
        pool.step([0] * 3)
        assert pool.stats().faults.sum() == stats.faults.sum()
    assert stats.faults_by_kind == {"raised": 1}
    assert stats.faults[1, FAULT_KINDS.index("raised")] == 1


def test_deaths_and_restarts_of_workers_are_counted():
    with make_pool("forkserver", counting_envs(4), on_fault="truncate") as pool:
        play(pool, 1)
        pid = pool.stats().workers[1].pid
        kill_worker(pool, 1)
        for _ in range(3):
            pool.step([0] * 4)
        stats = pool.stats()
    assert [worker.deaths for worker in stats.workers] == [0, 1]
    assert [worker.restarts for worker in stats.workers] == [0, 1]
    assert stats.workers[1].pid != pid
    assert not stats.workers[1].is_dead


def end_own_process(_env):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_call(pool):
    with pytest.raises(stepmill.WorkerDied):
        pool.call(end_own_process, env_ids=[2])


def die_before_a_revival(pool):
    kill_worker(pool, 1)
    pool.revive()


def die_before_a_step(pool):
    kill_worker(pool, 1)
    with pytest.raises(stepmill.WorkerDied):
        pool.step([0] * 4)


@pytest.mark.parametrize("die", [die_in_a_call, die_before_a_revival, die_before_a_step])
def test_a_death_is_counted_once_whatever_finds_it(die):
    with make_pool("forkserver", counting_envs(4)) as pool:
        play(pool, 1)
        die(pool)
        play(pool, 1)
        assert [worker.deaths for worker in pool.stats().workers] == [0, 1]


def test_workers_that_the_user_restarts_have_not_died():
    with make_pool("forkserver", counting_envs(4)) as pool:
        play(pool, 1)
        pool.revive(restart_living=True)
        play(pool, 1)
        assert [worker.deaths for worker in pool.stats().workers] == [0, 0]


def test_infos_that_do_not_fit_in_the_slab_are_counted():
    with make_pool("forkserver", [partial(WordyEnv, i, 100) for i in range(2)]) as pool:
        play(pool, 3)
        assert pool.stats().spilled.tolist() == [3, 3]


def test_copies_because_no_slot_was_free_are_counted():
    with begun(make_pool("serial", [ImageEnv] * 4, tuning={"slots": 2})) as pool:
        assert pool.stats().lease_copies == 0
        held = [pool.step([0] * 4).obs for _ in range(5)]
        stats = pool.stats()
    assert len(held) == 5
    assert stats.leased_slots == 2
    assert stats.lease_copies == 3


def test_kernels_count_these_copies_too():
    with stepmill.Pool([stepmill.kernels.find("CartPole-v1")] * 1024, backend="kernel", tuning={"slots": 2}) as pool:
        pool.reset(seed=0)
        held = [pool.step(np.zeros(1024, np.int64)).obs for _ in range(5)]
        assert len(held) == 5
        assert pool.stats().lease_copies == 3


def test_used_spares_are_counted_by_env():
    with begun(make_pool("serial", counting_envs(3, length=1), resets={"spare_envs": 1})) as pool:
        pool.step([0, 0])
        pool.step([0, 0])
        stats = pool.stats()
    assert stats.spares.sum() == stats.spares_used == stats.totals["spares"] == 2
    assert 0 <= stats.spares_waited <= 2


def test_a_worker_that_steps_shows_which_env():
    with busy_pool("serial") as pool:
        pool.reset()
        assert pool.stats().workers[0].current is None


def test_statistics_are_json_and_text():
    with busy_pool("forkserver") as pool:
        play(pool, 20)
        stats = pool.stats()
    assert json.loads(json.dumps(stats.to_dict()))["steps"] == 60
    text = str(stats)
    assert "slow envs 1 (" in text
    assert "worker 1 " in text
    assert "learner   send" in text
    assert all(isinstance(value, float) for value in stats.to_scalars().values())
    assert stats.to_scalars()["step/p99_s"] >= BUSY_S


def test_prometheus_text_has_base_units_and_cumulative_buckets():
    with make_pool(
        "forkserver", [partial(RaisingEnv, at=3, identity=i) for i in range(2)], on_fault="truncate"
    ) as pool:
        play(pool, 10)
        text = pool.stats().to_prometheus()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(samples['stepmill_faults_total{kind="raised"}']) == 2
    assert float(samples["stepmill_envs"]) == 2
    buckets = [float(value) for name, value in samples.items() if name.startswith("stepmill_step_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == float(samples["stepmill_step_seconds_count"])
    assert 0 < float(samples["stepmill_step_seconds_sum"]) < 10
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


WORDS = {"worker.current", "worker.running", "worker.serving", "worker.busy_ns", "process.pid", "process.dead"}
TABLES = (PoolStats, LearnerStats, WorkerStats, NodeStats)


def test_every_number_in_the_slab_is_a_statistic():
    structures = ("learner", "env", "process", "worker", "server")
    counted = {f"{of}.{name}" for of in structures for name in _native.counter_formats()[of]["names"]}
    assert counted == {each.metadata["at"] for kind in TABLES for each in fields(kind)} - {""} | WORDS


@pytest.mark.parametrize("kind", TABLES)
def test_every_statistic_is_exported_and_documented(kind):
    node = NodeStats(0, "", (0,), 1, 2, 3, 4, 5)
    with make_pool("thread", counting_envs(2)) as pool:
        play(pool, 3)
        stats = replace(pool.stats(), nodes=(node,))
    text, plain = stats.to_prometheus(), stats.to_dict()
    exported = {PoolStats: plain, LearnerStats: plain["learner"], WorkerStats: plain["workers"][0]}
    for each in fields(kind):
        assert each.name in exported.get(kind, plain["nodes"][0]) or each.name == "backend"
        assert f"\n        {each.name}: {each.metadata['text']}." in kind.__doc__
        if each.metadata["family"]:
            assert f"# TYPE stepmill_{each.metadata['family'].format(each.name)} " in text
        elif each.name.endswith("_s"):
            assert f'state="{each.name.removesuffix("_s")}"}} ' in text
    assert f'"{kind.__module__}.{kind.__name__}"' in Path("scripts/docs_api.py").read_text()


def test_a_count_with_a_note_is_in_summaries():
    with make_pool("serial", counting_envs(2)) as pool:
        stats = pool.stats()
    noted = {each.name: each.metadata["note"] for each in fields(stats) if each.metadata["note"]}
    counted = replace(stats, **{name: np.int64(7 + place) for place, name in enumerate(noted)})
    assert notes(counted) == [f"{7 + place} {note}" for place, note in enumerate(noted.values())]
    assert set(notes(counted)) <= set(str(counted).splitlines())
    assert notes(counted - counted) == notes(stats) == []


def test_statistics_of_many_envs_are_whole():
    with make_pool("thread", counting_envs(300), num_workers=3) as pool:
        play(pool, 2)
        stats = pool.stats()
    assert stats.step.counts.shape[0] == stats.faults.shape[0] == 300
    assert np.count_nonzero(stats.step.max_s) == 300
