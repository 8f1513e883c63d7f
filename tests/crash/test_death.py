"""Workers that die while they are idle, or right after the start; the time that envs have to close."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

import stepmill
from stepmill.backends import process
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import DyingEnv
from stepmill.testing.gates import wait_at
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs, kill_unnoticed, make_pool, make_vector_env


@pytest.mark.covers("G-1/idle", "X-4/faults")
@pytest.mark.parametrize("where", ["fork", "forkserver"])
def test_a_worker_killed_while_it_is_idle_is_reported_at_the_next_step(where, pool_of):
    pool = begun(pool_of(counting_envs(4), num_workers=2))
    kill_unnoticed(pool)
    start = time.monotonic()
    with pytest.raises(stepmill.WorkerDied, match=r"envs \[0, 1\]") as caught:
        pool.step([1, 2, 3, 4])
    assert time.monotonic() - start < HANG_GUARD_S
    assert (caught.value.env_ids, caught.value.signal_name) == ((0, 1), "SIGKILL")


@pytest.mark.covers("X-11")
def test_a_death_right_after_the_start_is_never_missed():
    # The reaper must know every worker before the first command: many pools, in each of which one dies in its first step.
    for _ in range(20):
        pool = begun(make_pool("fork", [CountingEnv, partial(DyingEnv, "step", 1), CountingEnv], num_workers=3))
        pool.send([1, 1, 1])
        with pytest.raises(stepmill.WorkerDied):
            pool.recv(3, timeout_s=HANG_GUARD_S)
        pool.close()


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
    def __init__(self, path, gate):
        super().__init__()
        self._path = path
        self._gate = gate

    def close(self):
        wait_at(self._gate)
        with open(self._path, "x") as file:
            file.write("closed")
