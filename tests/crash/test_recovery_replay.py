"""Policy replay: a pool whose workers are killed gives, bit for bit, what an undisturbed pool gives."""

from __future__ import annotations

import os
import random
import select
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill import _native
from stepmill.testing.chaos import ChaosEnv
from stepmill.worker.channel import wait_ready


class UnseededEnv(ChaosEnv):
    """Says who steps it, which is another process after a restart: not replayable."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, float(os.getpid()), terminated, truncated, info


def make(env_class: type[ChaosEnv] = ChaosEnv, on_fault: str = "replay", **options: Any) -> stepmill.Pool:
    chosen = stepmill.PoolOptions(
        on_fault=on_fault, seeding="per_episode", max_restarts=100, restart_window_s=0.02, **options
    )
    env_fns = [partial(env_class, env_id) for env_id in range(4)]
    return stepmill.Pool(env_fns, backend="process", num_workers=2, options=chosen)


def kill(pool: stepmill.Pool, worker: int) -> None:
    pid = pool.stats()["workers"][worker]["pid"]
    pidfd = _native.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait_ready({pidfd: select.POLLIN}, 1e12)
    os.close(pidfd)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_killed_workers_change_no_bit(mode: str) -> None:
    rng = random.Random(3)
    with make(autoreset_mode=mode) as pool, make(on_fault="raise", autoreset_mode=mode) as calm:
        assert np.array_equal(pool.reset(seed=0).obs, calm.reset(seed=0).obs)
        for step in range(150):
            actions = [rng.randrange(10) for _ in range(4)]
            if step % 15 == 7:
                kill(pool, rng.randrange(2))
            ours, theirs = pool.step(actions), calm.step(actions)
            assert np.array_equal(ours.obs, theirs.obs), step
            assert np.array_equal(ours.reward, theirs.reward), step
            assert np.array_equal(ours.truncated, theirs.truncated), step


def test_an_env_that_replays_otherwise_is_reported_with_the_step() -> None:
    with make(UnseededEnv) as pool:
        pool.reset(seed=0)
        pool.step([1] * 4)
        kill(pool, 0)

        with pytest.warns(RuntimeWarning, match="not replayable: step 1 gave another result"):
            batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [True, True, False, False]
        assert "step 1" in batch.info["fault"]["not_replayable"][0]


def test_a_log_that_is_full_falls_back_to_truncate_with_the_reason() -> None:
    with make(replay_log_bytes=64) as pool:
        pool.reset(seed=0)
        for _ in range(5):
            pool.step([1] * 4)
        kill(pool, 0)

        batch = pool.step([1] * 4)

        assert batch.truncated.tolist() == [True, True, False, False]
        assert "not whole" in batch.info["fault"]["not_replayable"][0]
