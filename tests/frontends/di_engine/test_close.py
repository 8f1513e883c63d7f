"""DI-engine's managers: how they end."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, SyncSubprocessEnvManager
from stepmill.spec.errors import UsageError
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import ding_envs
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S


@pytest.mark.covers("D-26", "D-B2")
def test_close_ends_all_processes_at_once_also_those_that_hang(launched: MakeManager) -> None:
    with Gate() as gate:
        manager = launched(AsyncSubprocessEnvManager, 4, gate=gate, wait_num=1)
        processes = [psutil.Process(pid) for pid in manager.pid]
        manager.step({0: "gate", 1: 1, 2: "gate", 3: "gate"})
        gate.wait_arrivals(3)
        began = time.monotonic()
        with pytest.warns(RuntimeWarning, match="did not stop within"):
            manager.close()
        assert time.monotonic() - began < 12  # five seconds for each of them would be more
    assert not any(process.is_running() for process in processes)


@pytest.mark.covers("D-26")
def test_close_is_not_hindered_by_a_process_that_is_dead_already(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, 2)
    os.kill(manager.pid[1], signal.SIGKILL)
    manager.close()
    assert manager.closed


@pytest.mark.covers("D-26")
def test_a_step_that_waits_is_ended_by_a_close_from_another_thread(launched: MakeManager, gate: Gate) -> None:
    manager = launched(SyncSubprocessEnvManager, 1, gate=gate)
    closer = threading.Thread(target=lambda: (gate.wait_arrivals(), manager.close()))
    closer.start()

    def step() -> None:
        with pytest.raises(UsageError, match="closed"):
            manager.step({0: "gate"})
        closer.join()

    with pytest.warns(RuntimeWarning, match="did not stop within"):
        step()


@pytest.mark.orphans
@pytest.mark.covers("D-B16")
def test_workers_end_with_the_program_that_made_them() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        manager = SyncSubprocessEnvManager(ding_envs(2), {})
        manager.launch()
        os.write(write, " ".join(map(str, manager.pid)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    os.waitpid(pid, 0)
    pids = [int(each) for each in os.read(read, 1000).split()]
    os.close(read)
    assert len(pids) == 2
    assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
