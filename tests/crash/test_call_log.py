"""Policy replay: the log of calls and attributes has what replays need, within its limit of memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import stepmill
from tests.crash.test_replayed_calls import make
from tests.harness.pools import begun, kill_worker


def test_an_attribute_that_is_set_in_a_loop_takes_no_more_memory() -> None:
    with begun(make()) as pool:
        for level in range(200):
            pool.set_attr("offset", float(level))
        replays = pool._recovery.replays
        assert replays.log.size_bytes < 1000


def test_functions_that_set_something_are_distinguished_and_each_is_logged_once() -> None:
    def shift(env: Any, value: float) -> None:
        env.unwrapped.offset = value

    with begun(make()) as pool:
        for _ in range(60):
            pool.set_attr(lambda env, value: env.unwrapped.amplify(value), 1.0)
        for level in range(60):
            pool.set_attr(shift, float(level))
        replays = pool._recovery.replays
        assert len(replays.log.calls_of(0)) == 60 + 2  # the last but one is removed with the next


def test_settings_of_rebuilt_envs_keep_the_limit_of_memory() -> None:
    with begun(make(restarts={"replay_log_bytes": 1 << 16})) as pool:
        pool.set_attr("helper", bytes(24 << 10))  # the log of calls has memory for one of them
        pool.revive(range(4), restart_living=True)
        assert pool.stats().replay_log_bytes < 1 << 16

        pool.set_attr("offset", 2.0)
        pool.set_attr("helper", None)
        pool.revive(range(4), restart_living=True)
        pool.reset(seed=0)
        pool.step([1] * 4)
        kill_worker(pool)

        assert pool.step([1] * 4).truncated.tolist() == [False] * 4  # the memory is free again
        assert pool.get_attr("offset") == (2.0,) * 4


def test_a_reply_that_was_read_is_let_go_and_the_call_repeated_all_the_same() -> None:
    with make() as pool, make("raise") as calm:
        for each in (pool, calm):
            each.reset(seed=0)
        future = pool.call_async("amplify", 2.0)
        inner = [weakref.ref(part.future) for part in future._parts]
        assert future.result() == calm.call("amplify", 2.0)
        with pytest.raises(stepmill.EnvError):
            pool.call("fail", env_ids=[1])
        del future
        pool.call("amplify", 3.0), calm.call("amplify", 3.0)
        gc.collect()
        assert [ref() for ref in inner] == [None, None]

        kill_worker(pool)

        assert pool.step([1] * 4).reward.tolist() == calm.step([1] * 4).reward.tolist()
        assert pool.get_attr("gain") == (6.0,) * 4


def test_a_call_that_its_worker_died_of_takes_no_memory() -> None:
    with begun(make()) as pool:
        for _ in range(5):
            with pytest.raises(stepmill.WorkerDied):
                pool.call("end_it_all", env_ids=[0])
            pool.step([1] * 4)
        replays = pool._recovery.replays
        assert not replays.log.calls_of(0)
        assert replays.log.size_bytes == 0
