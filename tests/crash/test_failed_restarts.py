"""Restarts that fail leave nothing behind, in whatever order their messages arrive."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill.backends.launcher_client import LauncherClient
from stepmill.worker.channel import NO_FD
from tests.chaos import KILL, RAISE
from tests.chaos.envs import CLOCK, Traps, make_env
from tests.harness.effort import every_second
from tests.harness.kills import stop_process
from tests.harness.pools import await_restart, begun, kill_worker, make_pool
from tests.pool_model.results import named_in


def make(folder: Path, num_envs: int, num_workers: int = 1, where: str = "fork", **options: Any) -> stepmill.Pool:
    env_fns = [partial(make_env, str(folder), env_id, 1) for env_id in range(num_envs)]
    return make_pool(where, env_fns, num_workers=num_workers, **options)


def read_workers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the learner read a launcher's messages only after those of the workers that it has launched."""
    plain = LauncherClient.handle_messages

    def handle_messages(self: LauncherClient) -> None:
        if all(link.pidfd != NO_FD or link.setup_result is not None for link in self._children.values()):
            plain(self)

    monkeypatch.setattr(LauncherClient, "handle_messages", handle_messages)


@pytest.mark.parametrize(("context", "on_fault"), every_second(["fork", "forkserver"], ["replay", "truncate"]))
def test_a_constructor_that_raises_before_its_process_is_known_leaves_no_descriptor(
    on_fault: str, context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_workers_first(monkeypatch)
    restarts = {"max_restarts": 1000, "restart_window_s": 0.001}
    with begun(make(tmp_path, 2, where=context, on_fault=on_fault, seeding="per_episode", restarts=restarts)) as pool:
        num_open = len(os.listdir("/proc/self/fd"))
        Traps(str(tmp_path)).set("build", 0, RAISE, times=3)
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)

        for _ in range(3):
            batch = pool.step([1, 1])

        assert batch.obs[:, CLOCK].tolist() == ([3, 3] if on_fault == "replay" else [1, 1])
        assert len(os.listdir("/proc/self/fd")) <= num_open


def test_the_error_of_a_revival_that_failed_names_all_envs_that_are_lost(tmp_path: Path) -> None:
    with begun(make(tmp_path, 3)) as pool:
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1, 1, 1])
        Traps(str(tmp_path)).set("build", 1, RAISE)
        pool.revive(wait=False)
        pool.reset_async()

        with pytest.raises(stepmill.EnvError, match="env 1 raised ValueError in construct") as caught:
            pool.recv(3)

        (died,) = caught.value.others
        assert isinstance(died, stepmill.WorkerDied)
        assert died.env_ids == (0, 1, 2)
        assert pool.reset().obs[:, CLOCK].tolist() == [0, 0, 0]


def test_envs_whose_death_a_call_has_reported_are_faulted_once_a_step_finds_them_dead(tmp_path: Path) -> None:
    with begun(make(tmp_path, 4, 2)) as pool:
        Traps(str(tmp_path)).set("call", 0, KILL)
        with pytest.raises(stepmill.WorkerDied):
            pool.call("render", env_ids=[0])

        with pytest.raises(stepmill.WorkerDied, match=r"its envs \[0, 1\] are lost"):
            pool.step([1, 1, 1, 1])

        pool.recv()
        assert [state.name for state in pool.states] == ["FAULTED", "FAULTED", "IDLE", "IDLE"]
        with pytest.raises(stepmill.UsageError):
            pool.step([1, 1, 1, 1])
        assert pool.reset(env_ids=[0, 1]).obs[:, CLOCK].tolist() == [0, 0]
        assert pool.step([1, 1, 1, 1]).obs[:, CLOCK].tolist() == [1, 1, 2, 2]


def test_ctrl_c_while_a_failed_restart_is_reported_leaves_all_its_envs_faulted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(make(tmp_path, 2, on_fault="truncate", restarts={"max_restarts": 1})) as pool:
        Traps(str(tmp_path)).set("build", 0, RAISE, times=2)
        kill_worker(pool)
        pool.send([1], [0])
        workers = pool._recovery.workers
        plain = workers.mark_reported

        def mark_and_interrupt(worker: int, error: stepmill.StepmillError) -> None:
            plain(worker, error)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(workers, "mark_reported", mark_and_interrupt)

        with pytest.raises(KeyboardInterrupt):
            pool.revive([0])

        assert pool.states[1].name == "FAULTED"
        with pytest.raises(stepmill.EnvError, match="env 0 raised ValueError in construct"):
            pool.recv()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_reset_whose_restart_fails_names_all_envs_whose_faults_it_has_dropped(tmp_path: Path, failing: int) -> None:
    with begun(make(tmp_path, 4, 2)) as pool:
        for worker in range(2):
            kill_worker(pool, worker)
        with pytest.raises(stepmill.WorkerDied):
            pool.step([1] * 4)
        for env_id in (0, 2):
            Traps(str(tmp_path)).set("build", env_id, RAISE, times=2 if env_id == failing else 1)
        pool.revive(wait=False)
        pool.reset_async()
        await_restart(pool, 0), await_restart(pool, 1)

        with (
            pytest.warns(RuntimeWarning, match="this reset drops its result"),
            pytest.raises(stepmill.EnvError, match=f"env {failing} raised ValueError in construct") as caught,
        ):
            pool.reset()

        lost = {env_id for env_id, state in enumerate(pool.states) if state.name == "FAULTED"}
        assert lost == {2, 3} if failing == 2 else {0, 1, 2, 3}
        assert lost == named_in(caught.value)
        assert pool.reset().obs[:, CLOCK].tolist() == [0] * 4


def test_a_step_that_a_revival_of_its_living_worker_ends_is_not_given_an_earlier_error(tmp_path: Path) -> None:
    with begun(make(tmp_path, 2)) as pool:
        Traps(str(tmp_path)).set("build", 0, RAISE)
        with pytest.raises(stepmill.EnvError):
            pool.revive(restart_living=True)
        pool.reset()
        stop_process(pool.stats().workers[0].pid)
        pool.send([1], [0])
        pool.revive([1], restart_living=True)

        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.recv()

        assert caught.value.env_ids == (0, 1)
