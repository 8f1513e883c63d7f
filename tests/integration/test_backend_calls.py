"""Slow requests through each backend: order, futures, sizes, what cannot travel; and how threads start and end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import GATED_ACTION, Gate, GateEnv
from stepmill.worker.messages import Request, RequestKind, Value
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.interrupts import interrupted_after, wait_for_threads
from tests.harness.pools import begun, counting_envs, make_pool
from tests.harness.strangers import Unloadable

PoolOf = Callable[..., Any]
BIG = 20_000_000  # bytes

with_workers = pytest.mark.parametrize("where", ["thread", "fork", "forkserver"])


class ToolEnv(CountingEnv):
    """Answers with values that are hard to send."""

    def give_bytes(self, size: int) -> bytes:
        return bytes(size)

    def take_bytes(self, data: bytes) -> int:
        return len(data)

    def give_lock(self) -> object:
        return threading.Lock()

    def give_odd(self) -> object:
        return Unloadable()

    def spoil(self) -> None:
        self.step = 5

    def nap(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.identity


# ---- order --------------------------------------------------------------------------------------------------------------


def test_a_call_waits_for_the_step_that_runs(where: str, pool_of: PoolOf, gate: Gate) -> None:
    if where == "serial":
        pytest.skip("in line nothing runs beside the caller")
    pool = begun(pool_of([partial(GateEnv, gate.path)]))
    pool.send([GATED_ACTION])
    gate.wait_arrivals()
    future = pool.call_async("num_steps")
    assert not future.is_done
    with pytest.raises(stepmill.EnvTimeout, match=r"call of 1 envs on worker 0 was not done within 0\.05 s"):
        future.result(timeout_s=0.05)
    gate.open()
    assert future.result() == (1,)
    pool.recv(1)


def test_requests_that_nobody_collects_do_no_harm(pool_of: PoolOf) -> None:
    pool = pool_of(counting_envs(2))
    for number in range(1000):
        pool.call_async("add", number)
    assert pool.call("add", 1) == (1, 2)


# ---- sizes --------------------------------------------------------------------------------------------------------------


def test_a_worker_whose_large_replies_nobody_reads_goes_on_stepping(pool_of: PoolOf) -> None:
    pool = begun(pool_of([ToolEnv] * 2))
    futures = [pool.call_async("give_bytes", BIG) for _ in range(3)]
    for _ in range(3):
        pool.step([1, 2])
    assert [len(data) for future in futures for data in future.result()] == [BIG] * 6


def test_large_arguments_and_large_replies_pass_each_other(pool_of: PoolOf) -> None:
    pool = pool_of([ToolEnv] * 2)
    replies = pool.call_async("give_bytes", BIG)
    counts = pool.call_async("take_bytes", bytes(BIG))
    more = pool.call_async("give_bytes", BIG)
    assert counts.result() == (BIG, BIG)
    assert [len(data) for future in (replies, more) for data in future.result()] == [BIG] * 4


def test_large_arguments_reach_a_worker_that_is_at_work(where: str, pool_of: PoolOf, gate: Gate) -> None:
    if where == "serial":
        pytest.skip("in line nothing runs beside the caller")
    pool = begun(pool_of([partial(GateEnv, gate.path)]))
    pool.send([GATED_ACTION])
    gate.wait_arrivals()
    sent = pool.call_async("add", np.zeros(BIG, np.uint8))
    gate.open()
    assert pool.recv(1, timeout_s=HANG_GUARD_S).env_id.tolist() == [0]
    assert sent.result()[0].shape == (BIG,)


# ---- what goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["fork", "forkserver"])
def test_results_that_cannot_travel_are_told(where: str, pool_of: PoolOf) -> None:
    pool = pool_of([ToolEnv])
    with pytest.raises(stepmill.EnvError, match=r"a _thread\.lock cannot be sent to another process"):
        pool.call("give_lock")
    with pytest.raises(stepmill.EnvError, match="no such luck"):
        pool.call("give_odd")
    assert pool.call("add", 1) == (1,)


@pytest.mark.parametrize("where", ["fork", "forkserver"])
def test_arguments_that_cannot_travel_are_refused_before_anything_is_sent(where: str, pool_of: PoolOf) -> None:
    pool = pool_of([ToolEnv])
    with pytest.raises(stepmill.UsageError, match=r"arguments of this call cannot be pickled: .*lock"):
        pool.call("add", threading.Lock())
    with pytest.raises(stepmill.UsageError, match=r"value of this set_attr cannot be pickled: .*lock"):
        pool.set_attr("lock", threading.Lock())
    with pytest.raises(stepmill.EnvError, match="no such luck"):
        pool.call("add", Unloadable())
    assert pool.call("add", 1) == (1,)


class StaleLinks(list[Any]):
    """Gives the link of a worker that was just replaced once more."""

    def __init__(self, links: list[Any], stale: Any) -> None:
        super().__init__(links)
        self._stale = [stale]

    def __getitem__(self, index: Any) -> Any:
        return self._stale.pop() if self._stale else super().__getitem__(index)


def test_a_call_made_as_its_worker_is_replaced_goes_to_the_successor() -> None:
    with begun(make_pool("fork", [ToolEnv])) as pool:
        backend = pool._runtime.backend
        old = backend._links[0]
        pool.revive([0], restart_living=True)
        backend._links = StaleLinks(backend._links, old)
        [future] = backend.call({0: Request(10_000, RequestKind.GET_ATTR, (0,), (0,), "identity")})
        assert not backend._links._stale
        assert future.result(5.0) == (Value(0),)


def test_an_env_whose_step_was_replaced_by_rubbish_faults_when_it_is_stepped(pool_of: PoolOf) -> None:
    pool = begun(pool_of([ToolEnv, CountingEnv]))
    pool.call("spoil", env_ids=[0])
    with pytest.raises(stepmill.EnvError, match="env 0 raised TypeError in step"):
        pool.step([1, 2])


@with_workers
def test_a_call_that_is_interrupted_can_be_asked_again(where: str, pool_of: PoolOf) -> None:
    pool = pool_of([ToolEnv])
    future = pool.call_async("nap", 0.6)

    with interrupted_after(0.1), pytest.raises(KeyboardInterrupt):
        future.result()
    assert future.result() == (0,)


@with_workers
def test_closing_from_another_thread_ends_the_wait_for_a_call(where: str, pool_of: PoolOf, gate: Gate) -> None:
    pool = pool_of([partial(GateEnv, gate.path)])
    future = pool.call_async("wait_here")
    gate.wait_arrivals()
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            future.result()
        except stepmill.StepmillError as exc:
            outcome.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    opener = threading.Timer(0.3, gate.open)
    opener.start()
    pool.close()
    waiter.join(HANG_GUARD_S)
    opener.join()
    assert not outcome or isinstance(outcome[0], stepmill.ClosedPoolError)
    assert not waiter.is_alive()


# ---- threads ------------------------------------------------------------------------------------------------------------


def test_a_constructor_that_hangs_in_a_thread_is_named_at_the_timeout(gate: Gate) -> None:
    env_fns = [CountingEnv, CountingEnv, partial(_wait_and_make, gate), CountingEnv]
    with pytest.raises(stepmill.EnvTimeout, match="worker 1 was still constructing env 2") as caught:
        make_pool("thread", env_fns, num_workers=2, start={"timeout_s": 0.3})
    assert (caught.value.env_id, caught.value.env_ids) == (2, (2, 3))
    gate.open()


def _wait_and_make(gate: Gate) -> CountingEnv:
    GateEnv(gate.path).wait_here()
    return CountingEnv()


def test_a_thread_that_hangs_is_left_behind_with_a_warning_and_harms_nobody() -> None:
    with Gate() as gate:
        pool = begun(make_pool("thread", [partial(GateEnv, gate.path), CountingEnv], num_workers=2))
        pool.send([GATED_ACTION, 1])
        gate.wait_arrivals()
        began = time.monotonic()
        with pytest.warns(RuntimeWarning, match=r"worker 0 \(envs \[0\]\) hangs in an env, and its thread goes on"):
            pool.close()
        assert time.monotonic() - began < HANG_GUARD_S
        del pool
        gate.open()
    wait_for_threads()
