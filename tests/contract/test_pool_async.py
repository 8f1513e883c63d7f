"""A pool that is used like EnvPool: send to some envs, receive those that are ready."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.spec.errors import UsageError
from stepmill.testing.envs import BatchedCountingEnv, CountingEnv
from stepmill.testing.gates import GATED_ACTION, GateEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, counting_envs

PARALLEL = pytest.mark.parametrize("where", ["thread", "fork"])


def _gated(pool_of, gate, num_envs, **options):
    """Return a pool in which every env has a worker, and an episode of 50 steps."""
    env_fns = [partial(GateEnv, gate.path, i, 50) for i in range(num_envs)]
    return pool_of(env_fns, num_workers=num_envs, **options)


def test_the_env_that_was_sent_first_is_received_first(pool_of):
    pool = begun(pool_of(counting_envs(4)))
    for env_id in (2, 0, 3, 1):
        pool.send([env_id], [env_id])
    # All are done before the first is received: calls answer after the commands before them.
    pool.get_attr("num_steps")
    assert [pool.recv(1).env_id.tolist() for _ in range(4)] == [[2], [0], [3], [1]]


def test_the_results_before_a_call_are_there_when_it_returns(pool_of):
    pool = begun(pool_of(counting_envs(4)))
    for _ in range(30):
        pool.send([1, 1, 1, 1])
        pool.get_attr("num_steps")
        assert pool.recv(4, timeout_s=0).env_id.tolist() == [0, 1, 2, 3]


@pytest.mark.covers("X-13", "X-1/batches")
@PARALLEL
def test_a_batch_has_the_envs_that_are_ready(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 3))
    pool.send([GATED_ACTION, 1, 2])
    batch = pool.recv(2, timeout_s=HANG_GUARD_S)
    assert batch.env_id.tolist() == [1, 2]
    assert batch.reward.tolist() == [1.0, 2.0]
    pool.send([5, 6], [1, 2])
    assert pool.recv(2, timeout_s=HANG_GUARD_S).reward.tolist() == [5.0, 6.0]
    gate.open()
    batch = pool.recv(1, timeout_s=HANG_GUARD_S)
    assert (batch.env_id.tolist(), batch.reward.tolist()) == ([0], [GATED_ACTION])


@pytest.mark.covers("G-9", "X-2")
@PARALLEL
@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_a_deadline_that_passes_loses_nothing(pool_of, gate, timeout_s):
    pool = begun(_gated(pool_of, gate, 3))
    pool.send([1, GATED_ACTION, 2])
    first = pool.recv(1, timeout_s=HANG_GUARD_S).env_id.tolist()
    with pytest.raises(stepmill.RecvTimeout) as caught:
        pool.recv(2, timeout_s=timeout_s)
    assert 1 in caught.value.env_ids
    assert isinstance(caught.value, TimeoutError)
    gate.open()
    assert sorted(first + pool.recv(2, timeout_s=HANG_GUARD_S).env_id.tolist()) == [0, 1, 2]


@PARALLEL
@pytest.mark.parametrize("method", ["recv", "receive"])
def test_a_pool_lingers_for_envs_that_are_ready_soon(pool_of, gate, method):
    pool = begun(_gated(pool_of, gate, 2))
    pool.send([1, GATED_ACTION])
    threading.Timer(0.2, gate.open).start()

    received = getattr(pool, method)(min_envs=1, max_envs=2, linger_s=HANG_GUARD_S)

    batch = received if method == "recv" else received.batch
    assert sorted(batch.env_id.tolist()) == [0, 1]
    with pytest.raises(UsageError, match="linger_s=-1 must be a number of seconds"):
        getattr(pool, method)(linger_s=-1)


@pytest.mark.covers("G-9")
@PARALLEL
def test_min_and_max_take_what_is_ready_between_them(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 4))
    pool.send([1, 2, 3, GATED_ACTION])
    for env_id in range(3):
        assert pool.get_attr("num_steps", env_ids=[env_id]) == (1,)
    assert pool.recv(min_envs=1, max_envs=2, timeout_s=HANG_GUARD_S).env_id.tolist() == [0, 1]
    assert pool.recv(min_envs=1, max_envs=4, timeout_s=HANG_GUARD_S).env_id.tolist() == [2]
    gate.open()
    assert pool.recv(min_envs=1, max_envs=4, timeout_s=HANG_GUARD_S).env_id.tolist() == [3]


@PARALLEL
def test_recv_of_at_least_none_takes_what_is_there_and_does_not_wait(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 3))
    pool.send([1, GATED_ACTION, 2])
    for env_id in (0, 2):
        pool.get_attr("num_steps", env_ids=[env_id])
    assert pool.recv(min_envs=0).env_id.tolist() == [0, 2]
    gate.open()
    assert pool.recv(1, timeout_s=HANG_GUARD_S).env_id.tolist() == [1]


@PARALLEL
def test_states_and_ready_ids_tell_how_each_env_stands(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 3))
    pool.send([GATED_ACTION, 1], [0, 1])
    gate.wait_arrivals(1)
    pool.get_attr("num_steps", env_ids=[1])
    assert [state.name for state in pool.states] == ["BUSY", "READY", "IDLE"]
    assert list(pool.ready_ids) == [1]
    gate.open()
    pool.recv(2, timeout_s=HANG_GUARD_S)
    assert [state.name for state in pool.states] == ["IDLE"] * 3
    assert list(pool.ready_ids) == []


@PARALLEL
def test_a_busy_env_is_refused_and_the_others_are_not_sent(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 3))
    pool.send([GATED_ACTION], [1])
    with pytest.raises(stepmill.BusyEnvError, match=r"\[1\]") as caught:
        pool.send([1, 2], [0, 1])
    assert tuple(caught.value.env_ids) == (1,)
    assert [state.name for state in pool.states] == ["IDLE", "BUSY", "IDLE"]
    gate.open()
    pool.recv(1, timeout_s=HANG_GUARD_S)
    assert pool.get_attr("num_steps") == (0, 1, 0)


@pytest.mark.covers("X-14")
@PARALLEL
def test_resetting_a_busy_env_waits_for_it_and_drops_its_result(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 2))
    pool.send([GATED_ACTION, 5])
    gate.wait_arrivals(1)
    gate.open()
    batch = pool.reset(env_ids=[0])
    assert batch.obs.tolist() == [[0, 1, 0]]
    assert pool.recv(1, timeout_s=HANG_GUARD_S).reward.tolist() == [5.0]


@pytest.mark.covers("G-9", "X-14")
def test_receiving_with_nothing_pending_is_an_error_and_never_a_wait(pool_of):
    pool = pool_of(counting_envs(3))
    with pytest.raises(stepmill.UsageError):
        pool.recv(1)
    pool.reset(seed=0)
    with pytest.raises(stepmill.UsageError):
        pool.recv(1)
    pool.send([1, 2], [0, 1])
    with pytest.raises(stepmill.UsageError, match="2"):
        pool.recv(3)
    assert pool.recv(2).env_id.tolist() == [0, 1]


@pytest.mark.covers("X-13")
def test_an_async_run_gives_every_env_its_own_actions(pool_of):
    pool = pool_of(counting_envs(6, 7), batch_size=2)
    pool.reset_async(seed=0)
    sent: dict[int, int] = {}
    clock = dict.fromkeys(range(6), 0)
    for step in range(120):
        batch = pool.recv()
        for row, env_id in enumerate(batch.env_id.tolist()):
            episode, t = divmod(clock[env_id], 8)
            assert batch.obs[row].tolist() == [env_id, episode, t]
            assert batch.reward[row] == (sent[env_id] if t else 0)
            clock[env_id] += 1
            sent[env_id] = step % 90
        pool.send([sent[env_id] for env_id in batch.env_id.tolist()], batch.env_id)
    assert sum(clock.values()) == 240  # which env is how fast is the machine's affair


@PARALLEL
def test_closing_from_another_thread_wakes_a_waiting_recv(pool_of, gate):
    pool = begun(_gated(pool_of, gate, 1))
    pool.send([GATED_ACTION])
    gate.wait_arrivals(1)
    raised: list[BaseException] = []
    is_waiting = threading.Event()

    def wait():
        is_waiting.set()
        try:
            pool.recv(1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    is_waiting.wait()
    gate.open()  # a thread that waits at the gate cannot be ended
    pool.close()
    thread.join(timeout=HANG_GUARD_S)
    assert not thread.is_alive()
    assert all(isinstance(error, stepmill.ClosedPoolError) for error in raised)


# ---------------------------------------------------------------- batched envs


def test_a_batched_env_owns_as_many_rows_as_it_has_envs(pool_of):
    pool = pool_of([partial(BatchedCountingEnv, 2 * i, 2) for i in range(3)])
    assert pool.num_envs == 3
    assert pool.spec.batch_size == 2
    batch = pool.reset(seed=0)
    assert batch.obs.tolist() == [[row, 0, 0] for row in range(6)]
    assert batch.env_id.tolist() == [0, 0, 1, 1, 2, 2]
    batch = pool.step(np.arange(6) + 10)
    assert batch.reward.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert batch.obs[:, 2].tolist() == [1] * 6


def test_batched_envs_of_different_sizes_are_refused(pool_of):
    with pytest.raises(stepmill.StepmillError, match="1"):
        pool_of([partial(BatchedCountingEnv, 0, 2), partial(BatchedCountingEnv, 2, 3)])


def test_named_envs_are_received_and_the_others_stay(pool_of):
    pool = begun(pool_of([CountingEnv] * 4))
    pool.send([1, 2, 3, 4])
    batch = pool.recv(env_ids=[3, 1])
    assert (batch.env_id.tolist(), batch.reward.tolist()) == ([1, 3], [2, 4])
    out = np.empty((2, *batch.obs.shape[1:]), batch.obs.dtype)
    assert pool.recv(env_ids=np.array([0, 2]), out=out).obs is out
    with pytest.raises(UsageError, match=r"cannot wait for envs \[1\]"):
        pool.recv(env_ids=[1])
    with pytest.raises(UsageError, match="not both"):
        pool.recv(2, env_ids=[1])
