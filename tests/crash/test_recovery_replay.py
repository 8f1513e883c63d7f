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


def play(pool: stepmill.Pool, actions: list[int], env_ids: list[int]) -> dict[int, tuple[Any, float, bool]]:
    """Step these envs; return observation, reward and flag by env."""
    if len(env_ids) == pool.num_envs:
        batch = pool.step(actions)
    else:
        pool.send(actions, env_ids)
        batch = pool.recv(len(env_ids))
    results = zip(batch.obs, batch.reward.tolist(), batch.truncated.tolist(), strict=True)
    return dict(zip(batch.env_id.tolist(), results, strict=True))


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


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("log_bytes", [64 << 20, 8000])  # 8000: the journal of all envs holds 15 batches
def test_steps_of_all_envs_and_of_some_are_played_again_in_their_order(mode: str, log_bytes: int) -> None:
    rng = random.Random(5)
    with (
        make(autoreset_mode=mode, replay_log_bytes=log_bytes) as pool,
        make(on_fault="raise", autoreset_mode=mode) as calm,
    ):
        pool.reset(seed=0), calm.reset(seed=0)
        for step in range(200):
            if step % 13 == 6:
                kill(pool, rng.randrange(2))
            chosen = sorted(rng.sample(range(4), 4 if rng.random() < 0.7 else rng.randint(1, 3)))
            actions = [rng.randrange(10) for _ in chosen]
            ours, theirs = play(pool, actions, chosen), play(calm, actions, chosen)
            for env_id in chosen:
                assert np.array_equal(ours[env_id][0], theirs[env_id][0]), step
                assert ours[env_id][1:] == theirs[env_id][1:], step


def test_the_longest_logs_go_first_when_there_is_too_much() -> None:
    with make(replay_log_bytes=800) as pool:  # 24 a reset, 32 a step
        pool.reset(seed=0)
        for _ in range(8):
            pool.send([1, 1], [0, 2])
            pool.recv(2)
        for _ in range(2):
            pool.step([1] * 4)
        kill(pool, 0)

        batch = pool.step([1] * 4)

        assert 0 < pool.stats()["replay_log_bytes"] <= 800
        assert batch.truncated.tolist() == [True, False, False, False]


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
