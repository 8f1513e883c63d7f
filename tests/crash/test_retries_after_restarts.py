"""A reset that raises in a restarted worker is tried again, whenever the pool learns that the worker serves."""

from __future__ import annotations

import os
import select
import signal
from functools import partial
from pathlib import Path
from typing import Any

import stepmill
from stepmill import _native
from stepmill.testing.chaos import ChaosEnv
from stepmill.testing.chaos.envs import CLOCK
from stepmill.testing.gates import Gate, wait_at
from stepmill.worker.channel import wait_ready


class FailsOnce(ChaosEnv):
    """Waits at the gate in each reset if the flag is there when it is built, and raises in the first of them."""

    def __init__(self, flag: Path, gate: Path) -> None:
        super().__init__(0, length=100)
        self._gate = gate if flag.exists() else None
        self._has_raised = not flag.exists()

    def reset(self, **arguments: Any) -> Any:
        if self._gate is not None:
            wait_at(self._gate)
        if not self._has_raised:
            self._has_raised = True
            raise ValueError("the first reset after a restart")
        return super().reset(**arguments)


def test_a_reset_is_tried_again_before_the_pool_knows_that_the_restarted_worker_serves(tmp_path: Path) -> None:
    options = stepmill.PoolOptions(on_fault="truncate", reset_retries=2, reset_retry_wait_s=0.01, context="fork")
    flag = tmp_path / "flag"
    with (
        Gate() as gate,
        stepmill.Pool([partial(FailsOnce, flag, gate.path)], backend="process", num_workers=1, options=options) as pool,
    ):
        pool.reset(seed=0)
        flag.touch()
        pidfd = _native.pidfd_open(pool.stats()["workers"][0]["pid"])
        _native.pidfd_send_signal(pidfd, signal.SIGKILL)
        wait_ready({pidfd: select.POLLIN}, 1e12)
        os.close(pidfd)
        assert pool.step([1]).truncated.tolist() == [True]
        pool.send([1])

        for _ in range(2):  # the pool's thread is here, and has not looked at the restart yet
            gate.wait_arrivals()
            gate.open()

        assert pool.recv(1).obs[:, CLOCK].tolist() == [0]
