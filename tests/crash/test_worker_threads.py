"""Faults in workers with several threads: they share one process, and so its death."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from tests.chaos import HANG, KILL, RAISE, ChaosEnv
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.kills import kill_process, stop_process
from tests.harness.leaks import Footprint, find_leaks, wait_until_gone
from tests.harness.pools import begun

INTERRUPT, WAIT = 8, 9  # interrupt the learner, and wait; wait until the process ends
LEARNER = os.getpid()  # workers are forked
NUM_WAITING = threading.Semaphore(0)


class FragileEnv(ChaosEnv):
    """Fails in its third step as the file of its identity says, once; waits in action WAIT, and tells how many envs wait."""

    def __init__(self, folder: str, identity: int) -> None:
        super().__init__(identity, length=6)
        self._trap = Path(folder) / str(identity)

    def step(self, action: np.int64) -> Any:
        if self._clock == 2 and self._trap.exists():
            how = self._trap.read_text()
            self._trap.unlink()
            return super().step(np.int64(how))
        if action == INTERRUPT:
            os.kill(LEARNER, signal.SIGINT)
        if action in (INTERRUPT, WAIT):
            NUM_WAITING.release()
            time.sleep(HANG_GUARD_S)
        return super().step(action)

    def wait_for(self, num_envs: int) -> int:
        """Wait until `num_envs` envs of this process wait."""
        for _ in range(num_envs):
            assert NUM_WAITING.acquire(timeout=HANG_GUARD_S)
        return os.getpid()


def make_pool(folder: Any, **options: Any) -> stepmill.Pool:
    """Return a pool of two processes with three threads each; the envs are 0 to 3 and 4 to 7."""
    env_fns = [partial(FragileEnv, str(folder), env_id) for env_id in range(8)]
    options = {"num_workers": 2, "context": "fork", **options}
    return stepmill.Pool(env_fns, workers={"threads_per_worker": 3}, **options)


def step_often(pool: stepmill.Pool, actions: list[int]) -> None:
    for _ in range(9):
        pool.step(actions)


def fail_once(folder: Path, env_id: int, how: int) -> None:
    (folder / str(env_id)).write_text(str(how))


def test_the_death_of_a_process_is_one_error_that_names_all_its_envs(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path)) as pool:
        with pytest.raises(
            stepmill.WorkerDied, match=r"worker 0 was ended by SIGKILL; its envs \[0, 1, 2, 3\]"
        ) as caught:
            pool.step([1, 1, KILL, 1, 1, 1, 1, 1])

        assert (caught.value.worker, caught.value.env_ids) == (0, (0, 1, 2, 3))
        assert pool.recv(env_ids=[4, 5, 6, 7]).obs[:, 2].tolist() == [1] * 4
        pool.reset(env_ids=[0, 1, 2, 3])
        assert pool.step([1] * 8).obs[:, 2].tolist() == [1] * 4 + [2] * 4
        assert [worker.restarts for worker in pool.stats().workers] == [1, 0, 0, 0, 0, 0]
        assert [worker.deaths for worker in pool.stats().workers] == [1, 0, 0, 0, 0, 0]


def test_all_envs_of_a_dead_process_are_cut_short(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path, on_fault="truncate", restarts={"max_restarts": 1})) as pool:
        batch = pool.step([1, 1, KILL, 1, 1, 1, 1, 1])
        cut = batch.truncated | pool.step([1] * 8).truncated  # those that had a result are cut short by their next step

        assert cut.tolist() == [True] * 4 + [False] * 4
        assert batch.info["fault"]["kind"][2] == "died"
        # It was one death, and one restart: the limit is one.
        with pytest.raises(stepmill.WorkerDied, match="the limit of restarts of worker 0 is reached"):
            step_often(pool, [KILL] * 4 + [1] * 4)


def test_a_hung_env_costs_the_envs_that_share_its_process(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path, on_fault="truncate", step_timeout_s=DEADLINE_S)) as pool:
        pool.send([WAIT, HANG, 1, 1], env_ids=[0, 1, 4, 5])
        healthy = pool.recv(env_ids=[4, 5])
        lost = pool.recv(env_ids=[0, 1])

        assert not healthy.truncated.any()
        assert lost.truncated.all()
        kinds = lost.info["fault"]["kind"].tolist()
        assert kinds[1] == "timed_out" or kinds == ["timed_out", "neighbour"]  # both are late at the same time
        batch = pool.step([1] * 8)
        assert (
            batch.truncated.tolist() == [False, False, True, True] + [False] * 4
        )  # of 2 and 3, the episodes were lost


def test_an_env_that_is_late_is_blamed_and_one_that_runs_beside_it_is_its_neighbour(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path, step_timeout_s=DEADLINE_S, reset_timeout_s=HANG_GUARD_S)) as pool:
        pool.send([HANG], env_ids=[3])
        while pool.states[3].name == "BUSY":  # a step of env 0 is always younger than the one that hangs
            try:
                pool.send([1] * 3, env_ids=[0, 4, 5])
                pool.recv(env_ids=[0, 4, 5])
            except stepmill.EnvTimeout as error:
                caught = error
                break
        else:
            with pytest.raises(stepmill.EnvTimeout) as raised:
                pool.recv()
            caught = raised.value

        assert (caught.env_id, sorted(caught.env_ids)) == (3, [0, 1, 2, 3])


def test_send_that_finds_a_worker_ended_for_a_late_env_blames_this_env(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path, step_timeout_s=DEADLINE_S)) as pool:
        (process,) = pool.call("wait_for", 0, env_ids=[3])
        pool.send([HANG], env_ids=[3])
        assert not wait_until_gone([process], timeout_s=HANG_GUARD_S)

        assert pool.send([1] * 3, env_ids=[0, 4, 5]) == [4, 5]
        with pytest.raises(stepmill.EnvTimeout) as raised:
            pool.recv()

        assert (raised.value.env_id, sorted(raised.value.env_ids)) == (3, [0, 1, 2, 3])


def test_an_env_that_raises_affects_no_other_env(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path)) as pool:
        with pytest.raises(stepmill.EnvError, match="env 1 raised") as caught:
            pool.step([1, RAISE, 1, 1, 1, 1, 1, 1])
        assert caught.value.env_id == 1
        assert sorted(pool.recv(7).env_id.tolist()) == [0, 2, 3, 4, 5, 6, 7]
        pool.reset(env_ids=[1])
        assert pool.step([1] * 8).obs[:, 2].tolist() == [2, 1, 2, 2, 2, 2, 2, 2]
        assert sum(worker.deaths for worker in pool.stats().workers) == 0


@pytest.mark.parametrize("how", [KILL, HANG, RAISE])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_replay_gives_what_an_undisturbed_pool_gives(tmp_path: Path, how: int, mode: Any) -> None:
    shared: dict[str, Any] = {"autoreset_mode": mode, "seeding": "per_episode"}

    def play(pool: stepmill.Pool) -> list[Any]:
        found = [pool.reset(seed=5).obs.tolist()]
        for step in range(16):
            batch = pool.step([(step + env_id) % 8 for env_id in range(8)])
            found.append([each.tolist() for each in (batch.obs, batch.reward, batch.terminated, batch.truncated)])
        return found

    env_fns = [partial(FragileEnv, str(tmp_path), env_id) for env_id in range(8)]
    with stepmill.Pool(env_fns, backend="serial", **shared) as pool:
        expected = play(pool)
    for env_id in (1, 6):
        fail_once(tmp_path, env_id, how)
    with make_pool(tmp_path, on_fault="replay", step_timeout_s=DEADLINE_S, **shared) as pool:
        assert play(pool) == expected
        assert pool.stats().faults.sum() > 0
    assert not list(tmp_path.iterdir())


def test_a_call_in_a_process_that_dies_raises_and_names_its_envs(tmp_path: Path) -> None:
    with begun(make_pool(tmp_path)) as pool:
        pool.send([WAIT, WAIT], env_ids=[0, 1])
        pid = pool.call("wait_for", 2, env_ids=[2])[0]

        kill_process(pid)

        with pytest.raises(stepmill.WorkerDied) as caught:
            pool.call("locate", env_ids=[2])
        assert caught.value.env_ids == (0, 1, 2, 3)
        assert pool.call("locate", env_ids=[4, 7]) == (4, 7)


def test_a_call_that_no_thread_of_a_dead_process_read_is_answered_by_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(make_pool(tmp_path, on_fault="replay", seeding="per_episode")) as pool:
        before = pool.step([1] * 8).obs[:, 1].tolist()
        backend, to_kill = pool._runtime.backend, [pool.stats().workers[0].pid]
        stop_process(to_kill[0])
        send = backend.call

        def send_and_kill(requests: Any) -> Any:
            futures = send(requests)
            while to_kill:
                kill_process(to_kill.pop())
            return futures

        monkeypatch.setattr(backend, "call", send_and_kill)

        assert pool.call("locate") == tuple(range(8))

        batch = pool.step([1] * 8)
        assert (batch.obs[:, 1].tolist(), batch.obs[:, 2].tolist()) == (before, [2] * 8)


def test_ctrl_c_loses_nothing_and_close_leaves_nothing(tmp_path: Path) -> None:
    before = Footprint.take()
    with begun(make_pool(tmp_path)) as pool:
        with pytest.raises(KeyboardInterrupt):
            step_often(pool, [INTERRUPT, WAIT] + [1] * 6)
        assert sorted(pool.recv(6).env_id.tolist()) == [2, 3, 4, 5, 6, 7]
        with pytest.warns(RuntimeWarning, match=r"worker 0 \(envs \[0, 1, 2, 3\]\) did not stop within"):
            pool.close()
    assert find_leaks(before) == []


def test_a_worker_that_dies_while_it_builds_is_named_with_all_its_envs(tmp_path: Path) -> None:
    def die() -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    env_fns = [partial(FragileEnv, str(tmp_path), 0), die, partial(FragileEnv, str(tmp_path), 2)]
    with pytest.raises(stepmill.WorkerDied, match=r"envs \[0, 1, 2\] are lost"):
        stepmill.Pool(env_fns, num_workers=1, workers={"threads_per_worker": 3}, context="fork")
