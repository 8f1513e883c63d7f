"""Workers, launchers and learners that die at any moment: the caller learns it at once, and nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial

import pytest

import stepmill
from stepmill.backends import process
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import DyingEnv
from stepmill.testing.gates import GATED_ACTION, GateEnv, wait_at
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs, make_pool, make_vector_env

CONTEXTS = ["fork", "forkserver"]


@pytest.fixture
def where(request):
    return getattr(request, "param", "fork")


def _pid_of(pool, env_id):
    return pool.call("locate", env_ids=[env_id])[0][0]


def _close_in_time(pool):
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < HANG_GUARD_S


def _kill_in_time(pool):
    """Close a pool with a worker that cannot stop: it is killed, and a warning says so."""
    with pytest.warns(RuntimeWarning, match="it was killed"):
        _close_in_time(pool)


def _assert_dead(error, env_ids, signal_name="SIGKILL"):
    assert isinstance(error, stepmill.WorkerDied)
    assert tuple(error.env_ids) == tuple(env_ids)
    assert error.signal_name == signal_name
    for env_id in env_ids:
        assert str(env_id) in str(error)


@pytest.mark.covers("G-1/idle", "X-4/faults")
@pytest.mark.parametrize("where", CONTEXTS, indirect=True)
def test_a_worker_killed_while_it_is_idle_is_reported_at_the_next_step(where, pool_of):
    pool = begun(pool_of(counting_envs(4), num_workers=2))
    pid = _pid_of(pool, 0)
    os.kill(pid, signal.SIGKILL)
    assert not leaks.wait_until_gone([pid], timeout_s=HANG_GUARD_S)
    start = time.monotonic()
    with pytest.raises(stepmill.WorkerDied) as caught:
        pool.step([1, 2, 3, 4])
    assert time.monotonic() - start < HANG_GUARD_S
    _assert_dead(caught.value, [0, 1])
    _close_in_time(pool)


@pytest.mark.covers("X-9")
def test_envs_of_other_workers_lose_no_step(where, pool_of, gate):
    pool = begun(pool_of([partial(GateEnv, gate.path, i, 100) for i in range(4)], num_workers=4))
    pid = _pid_of(pool, 2)
    pool.step([1] * 4)
    pool.send([2, 2, GATED_ACTION, 2])
    gate.wait_arrivals(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(stepmill.WorkerDied):
        pool.recv(4)
    batch = pool.recv(3)
    assert batch.env_id.tolist() == [0, 1, 3]
    assert batch.reward.tolist() == [2.0, 2.0, 2.0]
    for action in range(3, 8):
        pool.send([action] * 3, [0, 1, 3])
        assert pool.recv(3).obs[:, 2].tolist() == [action] * 3
    _close_in_time(pool)


def test_a_lost_env_must_not_be_stepped_and_others_may(where, pool_of):
    pool = begun(pool_of([CountingEnv, partial(DyingEnv, "step", 1)], num_workers=2))
    with pytest.raises(stepmill.WorkerDied):
        pool.step([1, 1])
    pool.recv(1)
    assert [state.name for state in pool.states] == ["IDLE", "FAULTED"]
    with pytest.raises(stepmill.UsageError, match=r"\[1\]"):
        pool.send([1], [1])
    with pytest.raises(stepmill.StepmillError):
        pool.call("poke", env_ids=[1])
    pool.send([9], [0])
    assert pool.recv(1).reward.tolist() == [9.0]


@pytest.mark.covers("X-11")
def test_all_workers_killed_at_once_are_all_reported(where, pool_of):
    pool = begun(pool_of(counting_envs(4), num_workers=2))
    pids = {pid for pid, _ in pool.call("locate")}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    lost: set[int] = set()
    deadline = time.monotonic() + HANG_GUARD_S
    is_sent = False

    def use() -> None:
        nonlocal is_sent
        if not is_sent:
            rest = sorted({0, 1, 2, 3} - lost)
            pool.send([1] * len(rest), rest)  # finds a worker dead already, or does not
            is_sent = True
        pool.recv(1)

    while lost != {0, 1, 2, 3} and time.monotonic() < deadline:
        with pytest.raises(stepmill.WorkerDied) as caught:
            use()
        for error in (caught.value, *caught.value.others):
            lost |= set(error.env_ids)
    assert lost == {0, 1, 2, 3}
    _close_in_time(pool)


def test_a_vector_env_reports_a_death_and_closes(where, vector_env_of, gate):
    envs = begun(vector_env_of([partial(GateEnv, gate.path, i) for i in range(2)], num_workers=2))
    pid = envs.call("locate")[1][0]
    envs.step_async([1, GATED_ACTION])
    gate.wait_arrivals(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(stepmill.WorkerDied):
        envs.step_wait()
    _close_in_time(envs)


@pytest.mark.covers("X-11")
def test_a_death_right_after_the_start_is_never_missed(where):
    # The reaper must know every worker before the first command: many pools, in each of which one dies in its first step.
    for _ in range(20):
        pool = begun(make_pool(where, [CountingEnv, partial(DyingEnv, "step", 1), CountingEnv], num_workers=3))
        pool.send([1, 1, 1])
        with pytest.raises(stepmill.WorkerDied):
            pool.recv(3, timeout_s=HANG_GUARD_S)
        pool.close()


# ---------------------------------------------------------------- closing


def test_close_ends_a_worker_that_hangs_in_a_step(where, pool_of, gate):
    pool = begun(pool_of([partial(GateEnv, gate.path, i) for i in range(2)], num_workers=2))
    pool.send([1, GATED_ACTION])
    gate.wait_arrivals(1)
    _kill_in_time(pool)


@pytest.mark.covers("X-4/close", "G-3/close")
def test_close_ends_a_worker_that_ignores_signals(where, pool_of):
    pool = begun(pool_of([_StubbornEnv] * 2, num_workers=2))
    _kill_in_time(pool)


class _StubbornEnv(CountingEnv):
    def __init__(self):
        super().__init__()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def close(self):
        threading.Event().wait()


def test_close_runs_the_envs_own_close(where, pool_of, tmp_path):
    pool = begun(pool_of([partial(_TidyEnv, str(tmp_path / str(i))) for i in range(3)], num_workers=2))
    pool.close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


@pytest.mark.parametrize("make", [make_pool, make_vector_env])
def test_close_gives_envs_the_time_that_the_caller_gives(make, tmp_path, gate, monkeypatch, recwarn):
    monkeypatch.setattr(process, "STOP_S", 0.0)  # without a timeout, no env would have the time to close
    envs = make("fork", [partial(_TidyEnv, str(tmp_path / "closed"), gate.path)])
    opener = threading.Thread(target=lambda: (gate.wait_arrivals(), gate.open()))
    opener.start()
    envs.close(**{"timeout_s" if make is make_pool else "timeout": HANG_GUARD_S})
    opener.join()
    assert (tmp_path / "closed").exists()
    assert not recwarn.list


class _TidyEnv(CountingEnv):
    def __init__(self, path, gate=None):
        super().__init__()
        self._path = path
        self._gate = gate

    def close(self):
        if self._gate is not None:
            wait_at(self._gate)
        with open(self._path, "x") as file:
            file.write("closed")
