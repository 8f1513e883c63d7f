"""Spares whose reset raises, and spares whose worker dies: the faults are those of the env that they serve next."""

import os
import signal
from functools import partial

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from stepmill.pool.port import PoolPort
from tests.harness.kills import kill_process
from tests.harness.pools import begun, kill_worker
from tests.harness.spare_envs import KILL, RAISE, Named, leave_mark, named_pool

FAST = {"restarts": {"max_restarts": 1000}}


class Repeatable(Named):
    def observe(self):
        return np.array([self.clock, self.end, self.clock, self.tag, 0], np.int64)


def step_often(pool, times):
    for _ in range(times):
        pool.step([0] * pool.num_envs)


def short(marks, identity):
    return Named(identity, None, 1, str(marks))


def test_a_reset_that_raises_in_the_queue_is_reported_when_its_server_is_next(tmp_path):
    leave_mark(tmp_path, 0)
    with begun(named_pool(1, 1, env=partial(short, tmp_path), num_workers=2)) as pool:
        pool.step([0])  # object 0 joins the queue, and raises there
        pool.step([0])
        pool.step([0])  # the spare has ended too: object 0 is to serve
        with pytest.raises(stepmill.EnvError, match="no next episode") as caught:
            pool.step([0])
        assert caught.value.env_id == 0
        assert caught.value.phase == "reset"
        assert pool.reset(env_ids=[0]).obs[0, 0] == 0
        pool.step([0])


@pytest.mark.parametrize("policy", ["truncate", "replay"])
def test_a_reset_that_raises_in_the_queue_is_tried_again_by_the_policy(tmp_path, policy):
    leave_mark(tmp_path, 0)
    options = {"on_fault": policy, "seeding": "per_episode", **FAST}
    with begun(named_pool(1, 1, env=partial(short, tmp_path), num_workers=2, **options)) as pool:
        seen = [int(pool.step([0]).obs[0, 0]) for _ in range(8)]
    assert seen == [0, 1, 1, 0, 0, 1, 1, 0]
    assert not list(tmp_path.iterdir())  # it did raise


def test_an_env_that_raises_is_replaced_by_a_spare_at_once():
    with begun(named_pool(1, 1, num_workers=2, env=partial(Named, length=9), on_fault="truncate", **FAST)) as pool:
        broken = pool.step([RAISE])
        assert broken.truncated.tolist() == [True]
        assert broken.info["fault"]["kind"].tolist() == ["raised"]
        assert pool.step([0]).obs[0].tolist()[:3] == [1, 1, 0]
        assert pool.step([0]).obs[0].tolist()[:3] == [1, 1, 1]
        pool.step([RAISE])
        assert pool.step([0]).obs[0].tolist()[:3] == [0, 2, 0]  # the one that raised was reset meanwhile


@pytest.mark.parametrize(
    "meet",
    [lambda pool: pool.call("get_wrapper_attr", "identity", env_ids=[1]), lambda pool: pool.step([0, 0])],
    ids=["call", "step"],
)
def test_a_death_names_the_envs_that_were_served_not_the_objects(meet):
    with named_pool(2, 1, env=partial(Named, length=2), backend="process", num_workers=3) as pool:
        served = pool.reset(seed=0).obs[:, 0].tolist()
        while served[1] == 1:
            served = pool.step([0, 0]).obs[:, 0].tolist()
        kill_process(pool.stats().workers[served[1]].pid)  # a worker has the object of its number
        with pytest.raises(stepmill.WorkerDied, match=r"its envs \[1\] are lost") as caught:
            meet(pool)
        assert caught.value.env_ids == (1,)
        assert pool.reset(env_ids=[1]).env_id.tolist() == [1]


def test_under_replay_a_run_with_spares_is_the_same_whichever_worker_is_killed():
    def run(kills, num_workers):
        seen = []
        options = {"seeding": "per_episode", "on_fault": "replay", **FAST}
        with named_pool(3, 2, backend="process", env=Repeatable, num_workers=num_workers, **options) as pool:
            seen.append(pool.reset(seed=2).obs.tolist())
            pids = [worker.pid for worker in pool.stats().workers]
            for step, actions in enumerate(np.random.default_rng(4).integers(8, size=(40, 3))):
                if step in kills:
                    os.kill(pids[kills[step]], signal.SIGKILL)
                batch = pool.step(actions)
                seen.append((batch.obs[:, [0, 2, 3]].tolist(), batch.reward.tolist(), batch.terminated.tolist()))
                pids = [worker.pid for worker in pool.stats().workers]
            assert not any("fault" in str(entry) for entry in seen)
        return seen

    assert run({5: 0, 11: 1, 12: 0, 20: 2, 33: 1}, 3) == run({}, 2)


def test_under_truncate_killed_workers_break_episodes_and_no_more():
    broken = ended = 0
    with named_pool(3, 2, backend="process", num_workers=3, on_fault="truncate", **FAST) as pool:
        clock = pool.reset(seed=2).obs[:, 2]
        over = np.zeros(3, bool)
        for step, actions in enumerate(np.random.default_rng(4).integers(8, size=(40, 3))):
            if step % 9 == 4:
                actions[step % 3] = KILL
            batch = pool.step(actions)
            assert batch.env_id.tolist() == [0, 1, 2]
            cut = batch.truncated
            assert np.array_equal(batch.obs[:, 2][~cut], np.where(over, 0, clock + 1)[~cut]), step
            broken, ended = broken + int(cut.sum()), ended + int(batch.terminated.sum())
            clock, over = batch.obs[:, 2], batch.terminated | batch.truncated
        assert broken >= 1
        assert ended > 10


def test_a_spare_that_dies_with_its_worker_is_rebuilt_for_the_env_that_it_serves_next():
    with begun(named_pool(1, 1, backend="process", num_workers=2, env=partial(Named, length=1))) as pool:
        worker = next(each for each in pool.stats().workers if each.worker != PoolPort(pool).worker_of[0])
        os.kill(worker.pid, signal.SIGKILL)
        pool.step([0])
        with pytest.raises(stepmill.WorkerDied):
            step_often(pool, 3)
        assert pool.reset().obs[0, 0] == 0
        for identity in (0, 1, 1, 0):
            assert pool.step([0]).obs[0, 0] == identity


def test_a_reset_of_all_brings_back_a_pool_whose_spare_is_dead():
    with begun(named_pool(2, 1, backend="process", num_workers=3, env=partial(Named, length=1))) as pool:
        os.kill(pool.stats().workers[2].pid, signal.SIGKILL)
        with pytest.raises(stepmill.WorkerDied):
            step_often(pool, 6)
        pool.reset(seed=1)
        for _ in range(8):
            pool.step([0, 0])


@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_an_env_whose_next_object_is_on_a_worker_that_stays_dead_is_lost_with_an_error(policy):
    options = {"seeding": "per_episode", "on_fault": policy, "restarts": {"max_restarts": 0}}

    def make(identity):
        return Named(identity, length=1 if identity == 0 else 9)

    with begun(named_pool(3, 1, backend="process", num_workers=2, env=make, **options)) as pool:
        while pool.stats().resets < 4:  # object 3, which is of worker 1, has begun an episode
            os.sched_yield()
        kill_worker(pool, 1)
        assert pool.send([0], [2]) == []
        with pytest.raises(stepmill.WorkerDied) as first:
            pool.recv()
        pool.send([0], [0])
        assert pool.recv().terminated.all()

        assert pool.send([0], [0]) == []  # object 3 is to serve
        with pytest.raises(stepmill.WorkerDied) as second:
            pool.recv()

        assert (first.value.env_ids, second.value.env_ids) == ((2,), (0, 2))
        assert [state.name for state in pool.states] == ["FAULTED", "IDLE", "FAULTED"]
        assert ("max_restarts" in str(second.value)) == (policy != "raise")
        pool.reset(seed=0)
        pool.step([0] * 3)


class Counting(Named):
    """Counts its calls in what it observes; no reset takes them back."""

    def bump(self, by):
        self.level += by
        return self.identity, self.level

    def observe(self):
        return np.array([self.identity, self.end, self.clock, self.tag, self.level], np.int64)


def advance(pool, step, kills, *, is_calm):
    """One step of both envs, with calls between and during the steps; return all that is seen of it.

    All objects share the worker that is killed: those that serve, and those that wait freshly reset.
    """
    seen = []
    if step % 4 == 1:
        seen.append(pool.call("bump", 10, env_ids=[step % 2]))
    if step % 4 == 2:
        seen.append(pool.call("bump", 7, env_ids=[2]))  # the first in the queue
    if step % 5 == 3:
        pool.set_attr("level", 1000 * step)
    if step in kills and not is_calm:
        kill_process(pool.stats().workers[0].pid)
    pool.send([1, 1])
    if step % 3 == 0 and step not in kills:
        seen.append(pool.call("bump", 1, env_ids=[0]))
    batch = pool.recv(2)
    assert "fault" not in batch.info
    return [*seen, batch.obs.tolist(), batch.terminated.tolist()]


@pytest.mark.covers("G-5")
@pytest.mark.parametrize("kills", [{4}, {7, 8}, {2, 9, 13}, {1, 4, 8, 13, 17}])
def test_under_replay_calls_of_objects_that_take_turns_are_made_again(kills):
    def run(*, is_calm):
        options = {"seeding": "per_episode", "on_fault": "replay", **FAST}
        with named_pool(2, 2, backend="process", env=Counting, num_workers=1, **options) as pool:
            pool.call("bump", 100, env_ids=[0, 1])
            seen = [pool.reset(seed=2).obs.tolist()]
            for step in range(18):
                seen += advance(pool, step, kills, is_calm=is_calm)
        return seen

    assert run(is_calm=False) == run(is_calm=True)


@pytest.mark.parametrize("rows_each", [1, 2])
def test_an_episode_whose_object_dies_when_it_begins_is_cut_short(rows_each):
    def make(identity):
        rows = [partial(Named, identity, None, 2 if identity == 0 else 9)] * rows_each
        return rows[0]() if rows_each == 1 else SyncVectorEnv(rows, autoreset_mode=AutoresetMode.NEXT_STEP)

    with begun(named_pool(3, 1, backend="process", num_workers=2, env=make, on_fault="truncate", **FAST)) as pool:
        while not pool.stats().reset.counts[3].any():  # a worker resets a spare after the envs
            os.sched_yield()
        for _ in range(2):
            pool.step([0] * pool.num_rows)
        first = pool.step([0] * 2 * rows_each + [KILL] * rows_each)  # the spare 3 begins in env 0, and dies with env 2
        assert (first.obs[0, 0], first.obs[0, 2], first.truncated[0]) == (3, 0, False)

        cut = pool.step([0] * pool.num_rows)

        assert cut.truncated[:rows_each].all()
        assert cut.info["fault"]["kind"][0] == "neighbour"
        assert cut.obs[0].tolist() == first.obs[0].tolist()
