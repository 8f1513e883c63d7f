"""Policy raise: no env of a worker that was lost or restarted goes on, or ends an episode, before an error has named it."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from tests.chaos import KILL, RAISE, ChaosEnv
from tests.harness.pools import begun, kill_worker, make_pool, make_vector_env

BEING_RESTARTED = pytest.mark.parametrize("way", ["reset", "revive", "revive_living"])


def make(where: str = "fork", **options: Any) -> stepmill.Pool:
    """Worker 0 has envs 0 and 1, worker 1 has envs 2 and 3."""
    return make_pool(where, [partial(ChaosEnv, env_id) for env_id in range(4)], **options)


def restart(pool: stepmill.Pool, way: str, env_ids: list[int]) -> None:
    if way == "reset":
        pool.reset(env_ids=env_ids)
    else:
        pool.revive(env_ids, restart_living=way == "revive_living")


def await_result(pool: stepmill.Pool, env_id: int) -> None:
    while env_id not in pool.ready_ids:
        os.sched_yield()


def check_that_it_needs_a_reset(pool: stepmill.Pool, env_id: int) -> None:
    with pytest.raises(stepmill.UsageError, match=rf"envs \[{env_id}\] have a fault"):
        pool.send([1], [env_id])
    pool.reset(env_ids=[env_id])
    pool.send([1], [env_id])
    batch = pool.recv(env_ids=[env_id])
    assert (batch.obs[:, 2].tolist(), batch.truncated.tolist()) == ([1], [False])


@BEING_RESTARTED
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
@pytest.mark.parametrize("where", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_result_of_a_lost_env_is_returned_and_the_env_then_needs_a_reset(where: str, mode: str, way: str) -> None:
    with begun(make(where, autoreset_mode=mode)) as pool:
        pool.send([1], [2])
        await_result(pool, 2)
        pool.send([KILL], [3])
        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv(env_ids=[3])
        assert caught.value.env_ids == (2, 3)

        restart(pool, way, [3])
        batch = pool.recv(env_ids=[2])

        assert (batch.reward.tolist(), batch.truncated.tolist()) == ([1.0], [False])
        assert pool.states[2].name == "FAULTED"
        check_that_it_needs_a_reset(pool, 2)


def test_a_result_of_a_lost_env_is_returned_while_its_worker_stays_dead() -> None:
    with begun(make()) as pool:
        pool.send([1], [2])
        await_result(pool, 2)
        pool.send([KILL], [3])
        with pytest.raises(stepmill.WorkerDied):
            pool.recv(env_ids=[3])

        assert pool.recv(env_ids=[2]).reward.tolist() == [1.0]

        assert [state.name for state in pool.states] == ["IDLE", "IDLE", "FAULTED", "FAULTED"]
        check_that_it_needs_a_reset(pool, 2)


@pytest.mark.parametrize("policy", ["raise", "truncate", "replay"])
def test_idle_envs_and_those_with_a_result_need_a_reset_after_a_restart_of_their_living_worker(policy: str) -> None:
    with begun(
        make_pool(
            "fork", [partial(ChaosEnv, i) for i in range(3)], num_workers=1, on_fault=policy, seeding="per_episode"
        )
    ) as pool:
        pool.send([1], [0])
        await_result(pool, 0)

        pool.revive([1], restart_living=True)
        assert [state.name for state in pool.states] == ["READY", "NEEDS_RESET", "FAULTED"]
        batch = pool.recv()

        assert (batch.env_id.tolist(), batch.truncated.tolist()) == ([0], [False])
        assert [state.name for state in pool.states] == ["FAULTED", "NEEDS_RESET", "FAULTED"]
        pool.reset(env_ids=[0, 1, 2])
        assert pool.step([1] * 3).obs[:, 2].tolist() == [1] * 3


class Waiting(ChaosEnv):
    """Says in its step that it has begun, and waits until it may end."""

    def __init__(self, env_id: int, begun: int, go: int) -> None:
        super().__init__(env_id)
        self._begun, self._go = begun, go

    def step(self, action: np.int64) -> Any:
        os.write(self._begun, b"!")
        os.read(self._go, 1)
        return super().step(action)


def test_steps_that_run_while_their_worker_is_restarted_are_returned_or_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    (begun_read, begun), (go_read, go) = os.pipe(), os.pipe()
    env_fns = [*[partial(Waiting, env_id, begun, go_read) for env_id in range(2)], partial(ChaosEnv, 2)]
    with make_pool("fork", env_fns, num_workers=1) as pool:
        end_worker = pool._runtime.backend.end_worker

        def end_after_the_step_of_env_0(worker: int) -> None:
            monkeypatch.undo()
            os.write(go, b"!")
            os.read(begun_read, 1)  # env 1 steps after env 0
            end_worker(worker)

        pool.reset(seed=0)
        pool.send([1, 1], [0, 1])
        os.read(begun_read, 1)
        monkeypatch.setattr(pool._runtime.backend, "end_worker", end_after_the_step_of_env_0)
        pool.revive([2], restart_living=True)

        batch = pool.recv(env_ids=[0])
        assert (batch.reward.tolist(), batch.truncated.tolist()) == ([1.0], [False])
        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv()
        assert caught.value.env_ids == (0, 1, 2)
        assert [state.name for state in pool.states] == ["FAULTED", "FAULTED", "NEEDS_RESET"]
        for env_id in range(2):
            os.write(go, b"!")
            check_that_it_needs_a_reset(pool, env_id)
    for fd in (begun_read, begun, go_read, go):
        os.close(fd)


@pytest.mark.parametrize("repair", ["reset", "revive"])
def test_a_repair_raises_the_death_that_cost_an_env_with_a_result_its_episode(repair: str) -> None:
    with begun(make()) as pool:
        pool.send([RAISE], [3])
        with pytest.raises(stepmill.EnvError):
            pool.recv(env_ids=[3])
        pool.send([1], [2])
        await_result(pool, 2)
        kill_worker(pool, 1)

        with pytest.raises(stepmill.WorkerDied) as caught:
            getattr(pool, repair)(env_ids=[3])

        assert caught.value.env_ids == (2, 3)
        assert pool.recv().env_id.tolist() == [2]
        pool.reset(env_ids=[3])
        check_that_it_needs_a_reset(pool, 2)


def test_an_env_whose_last_budgeted_episode_has_ended_is_exhausted_though_its_worker_died() -> None:
    env_fns = [partial(ChaosEnv, 0, 1), partial(ChaosEnv, 1)]
    with begun(make_pool("fork", env_fns, num_workers=1, num_episodes=1)) as pool:
        pool.send([1], [0])
        await_result(pool, 0)
        pool.send([KILL], [1])
        with pytest.raises(stepmill.WorkerDied):
            pool.recv(env_ids=[1])

        assert pool.recv().truncated.tolist() == [True]

        assert [state.name for state in pool.states] == ["EXHAUSTED", "FAULTED"]


def test_a_vector_env_keeps_the_results_of_lost_envs_and_then_names_them() -> None:
    env_fns = [partial(ChaosEnv, env_id) for env_id in range(3)]
    with begun(make_vector_env("fork", env_fns, num_workers=1)) as envs:
        with pytest.raises(stepmill.WorkerDied) as caught:
            envs.step([1, 1, KILL])  # envs of one worker step in the order of their ids
        assert caught.value.env_ids == (0, 1, 2)
        only_last = {"reset_mask": np.array([False, False, True])}
        envs.reset(options=only_last)

        obs, reward, _, truncated, infos = envs.step([1, 1, 1])
        assert (obs[:, 2].tolist(), reward.tolist()) == ([1, 1, 1], [1.0, 1.0, 1.0])
        assert not truncated.any()
        assert infos["kept"].tolist() == [True, True, False]

        with pytest.raises(stepmill.UsageError, match=r"envs \[0, 1\] have failed; repair them"):
            envs.step([1, 1, 1])
        envs.reset(options={"reset_mask": np.array([True, True, False])})
        assert envs.step([1, 1, 1])[0][:, 2].tolist() == [1, 1, 2]
