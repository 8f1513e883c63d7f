"""DI-engine's managers: how they end."""

from __future__ import annotations

import threading
import time

import psutil
import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, SyncSubprocessEnvManager
from stepmill.spec.errors import UsageError
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.conftest import MakeManager


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
