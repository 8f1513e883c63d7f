"""Deadlines of envs that run in threads: a thread that hangs says nothing when it comes back, and is replaced then."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest

import stepmill
from tests.chaos import ChaosEnv
from tests.harness.hangs import DEADLINE_S
from tests.harness.pools import begun

TIMEOUT_S = DEADLINE_S


class Waiting(ChaosEnv):
    """Hangs at action 9 until the gate opens, and then answers as if nothing had been."""

    def __init__(self, identity: int, gate: threading.Event) -> None:
        super().__init__(identity)
        self.gate = gate

    def step(self, action: Any) -> Any:
        if action == 9:
            self.gate.wait(60)
        return super().step(action)


def test_a_thread_that_comes_back_from_its_hang_says_nothing_and_is_replaced() -> None:
    gate = threading.Event()
    env_fns = [partial(Waiting, env_id, gate) for env_id in range(2)]
    options = stepmill.PoolOptions(step_timeout_s=TIMEOUT_S)
    with begun(stepmill.Pool(env_fns, backend="thread", num_workers=2, options=options)) as pool:
        (hung,) = [thread for thread in threading.enumerate() if thread.name == "stepmill-worker-0"]
        with pytest.raises(stepmill.EnvTimeout, match="env 0 took longer"):
            pool.step([9, 1])
        assert pool.recv().env_id.tolist() == [1]
        with pytest.raises(stepmill.UsageError, match="a thread that still runs"):
            pool.reset(env_ids=[0])

        gate.set()
        hung.join(60)

        assert not hung.is_alive()
        assert pool.reset(env_ids=[0]).obs[:, 2].tolist() == [0]
        assert pool.step([1, 1]).obs[:, 2].tolist() == [1, 2]


class Gated(Waiting):
    """Ends its episodes after two steps, and waits for the gate in its second reset."""

    num_resets = 0

    def reset(self, **kwargs: Any) -> Any:
        self.num_resets += 1
        if self.num_resets == 2:
            self.gate.wait(60)
        self._length = 2
        return super().reset(**kwargs)


def hang_in_call(pool: stepmill.Pool, gate: threading.Event) -> None:
    has_begun = threading.Event()

    def call(env: Any) -> None:
        has_begun.set()
        gate.wait(60)

    pool.call_async(call)
    assert has_begun.wait(60)
    pool.step([1])  # aborted before it began


def hang_in_early_reset(pool: stepmill.Pool, gate: threading.Event) -> None:
    pool.step([1])
    while not pool.stats().workers[0].is_dead:
        os.sched_yield()
    pool.step([1])


def hang_in_early_reset_that_is_waited_for(pool: stepmill.Pool, gate: threading.Event) -> None:
    pool.step([1])
    pool.step([1])


@pytest.mark.parametrize("hang", [hang_in_call, hang_in_early_reset, hang_in_early_reset_that_is_waited_for])
def test_a_thread_that_hung_between_its_commands_is_replaced_when_it_comes_back(hang: Any) -> None:
    gate = threading.Event()
    options = stepmill.PoolOptions(
        step_timeout_s=TIMEOUT_S,
        reset_timeout_s=TIMEOUT_S,
        workers={"call_timeout_s": TIMEOUT_S},
        resets={"overlap": hang is not hang_in_call},
    )
    with begun(stepmill.Pool([partial(Gated, 0, gate)], backend="thread", num_workers=1, options=options)) as pool:
        (hung,) = [thread for thread in threading.enumerate() if thread.name == "stepmill-worker-0"]
        pool.step([1])
        with pytest.raises(stepmill.StepmillError):
            hang(pool, gate)
        with pytest.raises(stepmill.UsageError, match="a thread that still runs"):
            pool.reset()

        gate.set()
        hung.join(60)

        assert not hung.is_alive()
        assert pool.reset().obs[:, 2].tolist() == [0]
        assert pool.step([1]).obs[:, 2].tolist() == [1]
