"""Policy raise: the pool stays usable, and revive() or reset() revives the envs that failed."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.pool.workers import WorkerRecord, WorkerSupervisor
from tests.chaos import KILL, RAISE, ChaosEnv
from tests.chaos.envs import make_fragile
from tests.harness.pools import await_ready, begun, kill_worker


def make(**options: Any) -> stepmill.Pool:
    env_fns = [partial(ChaosEnv, env_id) for env_id in range(4)]
    return stepmill.Pool(env_fns, backend="process", num_workers=2, context="fork", **options)


@pytest.mark.parametrize("backend", ["serial", "thread", "kernel"])
def test_envs_that_run_in_this_process_are_not_restarted_while_they_run(backend: str) -> None:
    env_fn = stepmill.kernels.find("CartPole-v1") if backend == "kernel" else partial(ChaosEnv, 0)
    with begun(stepmill.Pool([env_fn] * 2, backend=backend)) as pool:
        before = pool.step([1, 1])

        with pytest.raises(stepmill.UsageError, match=r"worker 0 cannot be restarted while it runs"):
            pool.revive(restart_living=True)

        assert [state.name for state in pool.states] == ["IDLE", "IDLE"]
        assert (pool.step([1, 1]).obs != before.obs).any()


def test_a_revival_without_wait_does_not_wait() -> None:
    with begun(make()) as pool:
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1, KILL, 1])
        pool.recv(2)

        pool.revive([2, 3], wait=False)
        pool.reset_async(seed=[5, 6], env_ids=[2, 3])
        pool.send([1, 1], [0, 1])

        assert sorted(pool.recv(4).obs[:, [0, 2]].tolist()) == [[0, 2], [1, 2], [2, 0], [3, 0]]
        assert pool.step([1] * 4).obs[:, 2].tolist() == [3, 3, 1, 1]


def test_a_revival_that_fails_is_reported_by_the_pending_reset(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    env_fns = [partial(make_fragile, flag, env_id) for env_id in range(2)]
    with begun(stepmill.Pool(env_fns, backend="process", num_workers=2, context="fork")) as pool:
        with pytest.raises(stepmill.WorkerDied):
            pool.step([KILL, 1])
        pool.recv(1)
        flag.touch()

        pool.revive([0], wait=False)
        pool.reset_async(env_ids=[0])
        with pytest.raises(stepmill.EnvError, match="no second one"):
            pool.recv(1)

        flag.unlink()
        assert pool.reset(env_ids=[0]).env_id.tolist() == [0]


def test_the_fault_of_an_env_that_was_not_named_in_a_reset_is_still_raised() -> None:
    with begun(make()) as pool:
        pool.send([1, 1, 1], [0, 1, 2])
        pool.recv(env_ids=[2])
        pool.send([KILL], [2])
        with pytest.raises(stepmill.WorkerDied):
            pool.recv(env_ids=[2])
        pool.reset(env_ids=[2, 3])
        pool.recv(env_ids=[0, 1])
        pool.send([KILL, 1], [2, 3])
        while pool.states[3].name != "FAULTED":  # both have a fault, and none was raised
            os.sched_yield()

        with pytest.warns(RuntimeWarning, match="env 2 failed"):
            pool.reset(env_ids=[2])
        with pytest.raises((stepmill.WorkerDied, stepmill.EnvTimeout)):
            pool.recv(env_ids=[3])
        assert pool.reset(env_ids=[3]).env_id.tolist() == [3]
        assert pool.step([1] * 4).obs[:, 2].tolist()[2:] == [1, 1]


def make_short() -> stepmill.Pool:
    """Worker 0 has envs 0, whose episodes last 2 steps, and 1; each plays one episode."""
    env_fns = [partial(ChaosEnv, env_id, 2 if env_id == 0 else 50) for env_id in range(4)]
    options = stepmill.PoolOptions(num_episodes=1, context="fork")
    return stepmill.Pool(env_fns, backend="process", num_workers=2, options=options)


@pytest.mark.parametrize(("repair", "state"), [("reset", "EXHAUSTED"), ("reset", "FAULTED"), ("revive", "EXHAUSTED")])
def test_a_repair_reports_a_death_that_cost_another_env_its_episode(repair: str, state: str) -> None:
    with begun(make_short()) as pool:
        if state == "EXHAUSTED":
            pool.step([1] * 4), pool.step([1] * 4)
        else:
            with pytest.raises(stepmill.EnvError):
                pool.step([RAISE, 1, 1, 1])
            pool.recv(3)
        steps = int(pool.step([1] * 4).obs[2, 2]) if state == "EXHAUSTED" else 1
        kill_worker(pool)

        with pytest.raises(stepmill.WorkerDied) as caught:
            getattr(pool, repair)(env_ids=[0])

        assert caught.value.env_ids == (0, 1)
        assert [each.name for each in pool.states] == [state, "FAULTED", "IDLE", "IDLE"]
        getattr(pool, repair)(env_ids=[0, 1] if repair == "revive" else [0])  # reported once
        pool.reset(env_ids=[0, 1])
        assert pool.step([1] * 4).obs[:, 2].tolist() == [1, 1, steps + 1, steps + 1]


def test_a_reset_of_all_envs_of_a_dead_worker_does_not_report_the_death() -> None:
    with begun(make_short()) as pool:
        pool.step([1] * 4), pool.step([1] * 4)
        kill_worker(pool)

        with pytest.warns(RuntimeWarning, match=r"worker of the exhausted envs \[0\] has died"):
            pool.reset(env_ids=[0, 1])

        assert pool.step([1] * 4).obs[:, 2].tolist() == [1, 1, 3, 3]


def test_a_death_is_reported_once_though_a_result_was_received_after_it() -> None:
    with begun(make()) as pool:
        pool.send([1], [2])
        await_ready(pool, 1)
        pool.send([KILL], [3])
        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv(env_ids=[3])
        assert caught.value.env_ids == (2, 3)
        pool.recv(env_ids=[2])

        assert pool.reset(env_ids=[2, 3]).env_id.tolist() == [2, 3]
        assert pool.step([1] * 4).obs[:, 2].tolist() == [1] * 4


def test_an_env_without_an_episode_says_that_it_needs_a_reset() -> None:
    with make_short() as pool:
        assert [state.name for state in pool.states] == ["NEEDS_RESET"] * 4
        pool.reset(seed=0)
        kill_worker(pool)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1] * 4)
        pool.recv()
        assert [state.name for state in pool.states] == ["FAULTED", "FAULTED", "IDLE", "IDLE"]

        pool.revive([0])

        assert [state.name for state in pool.states] == ["NEEDS_RESET", "FAULTED", "IDLE", "IDLE"]
        with pytest.raises(stepmill.UsageError, match=r"envs \[0\] need a reset"):
            pool.send([1], [0])
        pool.reset(env_ids=[0, 1])
        assert [state.name for state in pool.states] == ["IDLE"] * 4


@pytest.mark.parametrize("way", ["send", "step_fast", "step_obs"])
def test_an_error_that_an_interrupt_kept_back_is_raised_by_the_next_command(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with begun(make()) as pool:
        kill_worker(pool)
        handle = pool._recovery.handle_dead_workers

        def handle_and_interrupt(workers: list[int]) -> None:
            handle(workers)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(pool._recovery, "handle_dead_workers", handle_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.send([1] * 4)
        monkeypatch.undo()

        if way == "send":
            assert pool.send([1] * 4) == [2, 3]
        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv() if way == "send" else getattr(PoolPort(pool), way)([1] * 4)

        assert caught.value.env_ids == (0, 1)
        assert pool.reset(env_ids=[0, 1]).obs[:, 2].tolist() == [0, 0]
        if way == "send":
            pool.recv()
            pool.reset()
        assert pool.step([1] * 4).obs[:, 2].tolist() == [1] * 4


def kill_before_the_check(monkeypatch: pytest.MonkeyPatch, pool: stepmill.Pool) -> None:
    """Let worker 0 die just before its process is checked for the first time."""
    check = WorkerSupervisor.check_process
    is_killed = False

    def check_process(self: WorkerSupervisor, worker: int) -> WorkerRecord:
        nonlocal is_killed
        if worker == 0 and not is_killed:
            is_killed = True
            kill_worker(pool)
        return check(self, worker)

    monkeypatch.setattr(WorkerSupervisor, "check_process", check_process)


@pytest.mark.parametrize("repair", ["reset", "revive"])
def test_a_death_found_by_a_repair_is_raised_if_another_env_has_lost_its_episode(
    monkeypatch: pytest.MonkeyPatch, repair: str
) -> None:
    with begun(make()) as pool:
        with pytest.raises(stepmill.EnvError):
            pool.step([RAISE, 1, 1, 1])
        pool.recv(3)
        kill_before_the_check(monkeypatch, pool)

        with pytest.raises(stepmill.WorkerDied) as caught:
            getattr(pool, repair)(env_ids=[0])

        assert caught.value.env_ids == (0, 1)
        assert pool.states[1].name == "FAULTED"
        getattr(pool, repair)(env_ids=[0, 1])
        pool.reset(env_ids=[0, 1])
        assert pool.step([1] * 4).obs[:, 2].tolist() == [1, 1, 2, 2]


def test_a_death_found_by_a_reset_under_truncate_cuts_the_other_episode_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with begun(make(on_fault="truncate", restarts={"max_env_errors": 0})) as pool:
        with pytest.raises(stepmill.EnvError):
            pool.step([RAISE, 1, 1, 1])
        pool.recv(3)
        kill_before_the_check(monkeypatch, pool)

        pool.reset(env_ids=[0])
        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [False, True, False, False]
        assert batch.info["fault"]["kind"][1] == "neighbour"
