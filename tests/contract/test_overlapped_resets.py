"""Overlapped resets give the same data, earlier: a worker with nothing else to do begins the next episode."""

from __future__ import annotations

import time
from functools import partial

import gymnasium
import numpy as np
import pytest

import stepmill
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.pools import begun

RESET_S = 0.2


class SlowResetEnv(gymnasium.Env):
    """Three steps an episode; tells its seed's draw, and how many resets it has had. The third reset may raise."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, reset_s: float = 0.0, *, raises: bool = False) -> None:
        self.reset_s, self.raises, self.num_resets, self.steps = reset_s, raises, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_resets += 1
        self.steps = 0
        if self.num_resets > 1:
            time.sleep(self.reset_s)  # what an expensive reset does; nothing waits for it as a signal
        if self.raises and self.num_resets == 3:
            raise ValueError("the third reset")
        return np.array([self.np_random.integers(1000), self.num_resets], float), {"resets": self.num_resets}

    def step(self, action):
        self.steps += 1
        return np.array([self.steps, self.num_resets], float), 1.0, self.steps == 3, False, {}


def make_pool(overlap: bool, *fns, backend="process", **options):
    context = {"context": "fork"} if backend == "process" else {}
    options = stepmill.PoolOptions(resets={"overlap": overlap}, **context, **options)
    return stepmill.Pool(fns, backend=backend, num_workers=2, options=options)


def drive(pool):
    """A run with automatic, full, partial and seeded resets; everything it brought."""
    batches = [pool.reset(seed=1)]
    for turn in range(14):
        batches.append(pool.step([0] * 4))
        if turn == 5:
            batches.append(pool.reset())
        if turn == 9:
            batches.append(pool.reset(seed=7, env_ids=[0, 2]))
    pool.close()
    return [
        (batch.obs.tolist(), batch.reward.tolist(), batch.terminated.tolist(), batch.env_id.tolist())
        for batch in batches
    ]


@pytest.mark.covers("X-6")
@pytest.mark.parametrize("seeding", ["continue", "per_episode", "fixed"])
@pytest.mark.parametrize("backend", ["process", "thread"])
def test_the_data_are_the_same_with_and_without(backend, seeding):
    fns = [partial(SlowResetEnv)] * 4
    plain, early = (drive(make_pool(overlap, *fns, backend=backend, seeding=seeding)) for overlap in (False, True))
    assert [step[1:] for step in plain] == [step[1:] for step in early]
    draws = [[row[0] for row in step[0]] for step in plain]
    # How often an env was reset may differ: an explicit seed throws away what was begun early.
    assert seeding == "continue" or draws == [[row[0] for row in step[0]] for step in early]


@pytest.mark.parametrize("seeding", ["continue", "per_episode"])
def test_a_seed_or_options_throw_away_what_was_begun_early(seeding):
    with make_pool(True, *[partial(SlowResetEnv)] * 2, backend="thread", seeding=seeding) as pool:
        first = pool.reset(seed=5).obs[:, 0].tolist()
        for _ in range(3):
            pool.step([0, 0])
        wait_for_resets(pool, 4)  # both next episodes were begun
        assert pool.reset(seed=5).obs[:, 0].tolist() == first
        for _ in range(3):
            pool.step([0, 0])
        wait_for_resets(pool, 8)
        assert pool.reset(options={"level": 1}).info["resets"].tolist() == [5, 5]


def wait_for_resets(pool, num_resets):
    deadline = time.monotonic() + HANG_GUARD_S
    while pool.stats().resets < num_resets:
        assert time.monotonic() < deadline


@pytest.mark.covers("X-6")
def test_the_step_after_the_end_does_not_wait_for_a_reset_that_is_done():
    with begun(make_pool(True, partial(SlowResetEnv, RESET_S), partial(SlowResetEnv, RESET_S))) as pool:
        for _ in range(3):
            pool.step([0, 0])
        wait_for_resets(pool, pool.stats().resets + 2)  # both were begun, though nobody asked
        assert pool.call("get_wrapper_attr", "num_resets") == (2, 2)
        assert pool.step([0, 0]).obs[:, 1].tolist() == [2.0, 2.0]


def test_a_fault_of_an_early_reset_belongs_to_the_step_that_asks_for_it():
    with begun(make_pool(True, partial(SlowResetEnv), partial(SlowResetEnv, raises=True))) as pool:
        for _ in range(7):
            pool.step([0, 0])
        with pytest.raises(stepmill.EnvError, match="the third reset") as caught:
            pool.step([0, 0])
        assert (caught.value.env_id, caught.value.phase) == (1, "reset")
        assert pool.recv(1).env_id.tolist() == [0]


def test_an_early_reset_that_hangs_is_ended_at_its_deadline():
    fns = [partial(SlowResetEnv, 60.0), partial(SlowResetEnv)]
    with begun(make_pool(True, *fns, reset_timeout_s=DEADLINE_S, step_timeout_s=HANG_GUARD_S)) as pool:
        for _ in range(3):
            pool.step([0, 0])
        with pytest.raises((stepmill.EnvTimeout, stepmill.WorkerDied)):
            pool.step([0, 0])
