"""Envs that fork: the copy never answers beside the process that it is a copy of."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun, make_pool

RETURN, RAISE, EXIT = 1, 2, 3


class ForkingEnv(CountingEnv):
    """Forks as the action says: the copy returns, raises or exits. Its info tells how the copy ended."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        if action == 0:
            return obs, reward, terminated, truncated, {}
        status = self.fork()
        if status is None and action == RAISE:
            raise OSError("no such program")
        if status is None and action == EXIT:
            raise SystemExit(5)
        return obs, reward, terminated, truncated, {"status": status}

    def fork(self) -> int | None:
        """Return the exit status of the copy; None in the copy."""
        pid = os.fork()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("where", ["fork", "forkserver", "thread"])
def test_a_copy_that_comes_back_from_an_env_is_ended(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    with begun(make_pool(where, [ForkingEnv, CountingEnv], num_workers=2)) as pool:
        for t, (action, status) in enumerate([(RETURN, 67), (RAISE, 67), (EXIT, 5)], start=1):
            batch = pool.step([action, 0])
            assert batch.info["status"][0] == status
            assert batch.obs[:, 2].tolist() == [t, t]
        assert pool.call("fork", env_ids=[0]) == (67,)
        assert pool.step([0, 0]).obs[:, 2].tolist() == [4, 4]
        assert [worker.steps for worker in pool.stats().workers] == [4, 4]
    assert "no such program" in capfd.readouterr().err
