"""Processes that are killed: workers, launchers, learners. Nobody waits for the dead, and nothing stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.backends.base import MonitoredBackend
from stepmill.backends.process import ProcessBackend
from stepmill.testing.envs import CountingEnv
from stepmill.testing.faulty import DyingEnv
from stepmill.testing.gates import Gate
from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.kills import kill_process, stop_process
from tests.harness.pools import keep_closed, make_pool
from tests.harness.scripts import start_script

CONTEXTS = ["fork", "forkserver", "spawn"]


class DeafEnv(CountingEnv):
    """Its method `hang` hangs in native code, with or without the GIL."""

    def hang(self, *, with_gil: bool, path: str = "") -> None:
        """Hang, after one arrival at the gate that lies at `path`."""
        if path:
            arrivals = os.open(os.path.join(path, "arrivals"), os.O_WRONLY)
            os.write(arrivals, b"a")
            os.close(arrivals)
        library = ctypes.PyDLL(None) if with_gil else ctypes.CDLL(None)
        library.sleep(600)


@pytest.fixture
def pool_in() -> Iterator[Callable[..., stepmill.Pool]]:
    def make(env_fns: list[Callable[[], object]], context: str = "fork", **options: Any) -> stepmill.Pool:
        return make_pool(context, env_fns, num_workers=len(env_fns), **options)

    yield from keep_closed(make)


def backend_of(pool: stepmill.Pool) -> ProcessBackend:
    backend = pool._runtime.backend
    assert isinstance(backend, ProcessBackend)
    return backend


def launcher_pid(pool: stepmill.Pool) -> int:
    launcher = backend_of(pool)._launcher
    return launcher.pid


# ---- workers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_dead_workers_exit_is_known(context: str, pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([CountingEnv] * 3, context)
    backend = backend_of(pool)
    assert isinstance(backend, MonitoredBackend)
    pids = [pid for pid, _ in pool.call("locate")]
    assert [backend.exit_code(worker) for worker in range(3)] == [None] * 3
    kill_process(pids[0])
    kill_process(pids[2], signal.SIGTERM)
    assert [backend.exit_code(worker) for worker in range(3)] == [-signal.SIGKILL, None, -signal.SIGTERM]


def test_a_call_to_a_dead_worker_says_so_and_the_others_answer(pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([partial(CountingEnv, env_id) for env_id in range(2)])
    kill_process(pool.call("locate", env_ids=[1])[0][0])
    for _ in range(2):
        with pytest.raises(
            stepmill.WorkerDied, match=r"worker 1 was ended by SIGKILL; its envs \[1\] are lost"
        ) as caught:
            pool.call("add", 1)
        assert caught.value.env_ids == (1,)
    assert pool.call("add", 1, env_ids=[0]) == (1,)


@pytest.mark.covers("X-11")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "exit"])
def test_a_worker_that_dies_in_a_call_is_told_at_once(how: str, pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([partial(DyingEnv, "call", how=how), CountingEnv])
    future = pool.call_async("poke", env_ids=[0])
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(stepmill.WorkerDied):
            future.result()
    assert time.monotonic() - began < HANG_GUARD_S


def test_a_worker_that_lives_is_replaced_all_the_same(pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([DeafEnv])
    old = pool.call("locate")[0][0]
    hanging = pool.call_async("hang", with_gil=True)
    report = backend_of(pool).revive(0)
    assert report.pid != old
    assert not leaks.is_running(old)
    with pytest.raises(stepmill.WorkerDied):
        hanging.result()
    assert pool.call("add", 1) == (1,)


# ---- the launcher --------------------------------------------------------------------------------------------------------


@pytest.mark.orphans
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_pool_outlives_its_launcher(context: str, pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([CountingEnv] * 2, context)
    kill_process(launcher_pid(pool))
    pool.reset(seed=0)
    assert pool.step(np.array([1, 2])).reward.tolist() == [1.0, 2.0]
    pids = [pid for pid, _ in pool.call("locate")]
    pool.close()
    assert leaks.wait_until_gone(pids, timeout_s=0) == []


@pytest.mark.orphans
def test_a_new_launcher_takes_a_dead_ones_place_unless_it_was_a_fork(pool_in: Callable[..., stepmill.Pool]) -> None:
    for context in ("forkserver", "spawn"):
        pool = pool_in([CountingEnv], context)
        kill_process(launcher_pid(pool))
        backend_of(pool).revive(0)
        assert pool.call("add", 1) == (1,)
    forked = pool_in([CountingEnv], "fork")
    kill_process(launcher_pid(forked))
    with pytest.raises(stepmill.LauncherDied, match=r"ended by SIGKILL.*cannot be replaced.*make a new pool") as caught:
        backend_of(forked).revive(0)
    assert caught.value.is_final


@pytest.mark.orphans
def test_a_launcher_that_dies_while_workers_start_is_told() -> None:
    class KillingEnv(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()

    options = stepmill.PoolOptions(context="forkserver")
    with pytest.raises(stepmill.LauncherDied, match="ended by SIGKILL") as caught:
        stepmill.Pool([KillingEnv], backend="process", options=options)
    assert not caught.value.is_final


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_that_is_stopped_at_the_start_is_told_as_stopped(context: str) -> None:
    class StoppedEnv(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            os.kill(os.getpid(), signal.SIGSTOP)

    began = time.monotonic()
    stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, context=context).close()
    limit_s = 1.0 + 4 * (time.monotonic() - began)  # in which the other worker starts, on a busy machine too
    options = stepmill.PoolOptions(context=context, start={"timeout_s": limit_s})
    with pytest.raises(stepmill.EnvTimeout, match=r"worker 1 .*env 1 .*process \d+ is stopped.*kill -CONT") as caught:
        stepmill.Pool([CountingEnv, StoppedEnv], backend="process", num_workers=2, options=options)
    assert caught.value.env_id == 1


# ---- the learner ---------------------------------------------------------------------------------------------------------

LEARNER = """
import sys, time
import stepmill
from tests.crash.test_process_deaths import DeafEnv

pool = stepmill.Pool([DeafEnv] * 3, backend="process", num_workers=3, context=sys.argv[1])
pool.reset(seed=0)
pool.call_async("hang", with_gil=True, env_ids=[0])
pool.call_async("hang", with_gil=False, env_ids=[1])
print("running", flush=True)
time.sleep(600)
"""


@pytest.mark.orphans
@pytest.mark.covers("A-B9", "D-B16")
@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
def test_nothing_outlives_a_learner_that_is_killed(context: str) -> None:
    with start_script(LEARNER, context) as learner:
        assert learner.stdout.readline() == "running\n"
        pids = leaks.descendants(learner.pid)
        assert len(pids) >= 4
        learner.kill()
        learner.wait()
        assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
    assert not [name for name in os.listdir("/dev/shm") if "stepmill" in name or str(learner.pid) in name]


@pytest.mark.soak  # it races with the interpreter's own start, and on a loaded machine finds zombies that are just being reaped
def test_ctrl_c_at_any_moment_of_the_start_leaves_one_traceback_at_most() -> None:
    source = """
        import os, sys
        os.setpgid(0, 0)
        import stepmill
        from stepmill.testing import CountingEnv
        options = stepmill.PoolOptions(context="forkserver")
        print("starting", flush=True)
        pool = stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, options=options)
        pool.close()
        print("started", flush=True)
    """
    for delay_s in (0.0, 0.03, 0.1, 0.2, 0.3):
        with start_script(source) as learner:
            assert learner.stdout.readline() == "starting\n"
            time.sleep(delay_s)  # no event marks the moments of interest, so several are tried
            pids = leaks.descendants(learner.pid)
            os.killpg(learner.pid, signal.SIGINT)
            err = learner.communicate(timeout=HANG_GUARD_S)[1]
            assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
            # Python prints an exception together with those that it interrupted, for example in an import.
            num_printed = err.count("Traceback") - err.count("During handling of the above exception")
            assert num_printed <= 1, err


# ---- close ---------------------------------------------------------------------------------------------------------------


@pytest.mark.covers("X-4/close", "G-3/close")
@pytest.mark.parametrize("with_gil", [True, False])
def test_closing_kills_what_hangs_and_says_so(with_gil: bool, pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([DeafEnv, CountingEnv])
    pids = [pid for pid, _ in pool.call("locate")]
    with Gate() as gate:
        hanging = pool.call_async("hang", with_gil=with_gil, path=str(gate.path), env_ids=[0])
        gate.wait_arrivals()
    began = time.monotonic()
    expected = r"worker 0 \(envs \[0\]\) did not stop within 1\.5 s, and (it was killed|process \d+ had not ended 0\.3 s after SIGKILL)"
    with pytest.warns(RuntimeWarning, match=expected):
        pool.close()
    assert time.monotonic() - began < HANG_GUARD_S
    assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
    with pytest.raises(stepmill.ClosedPoolError):
        hanging.result()


@pytest.mark.parametrize(
    "close",
    [lambda pool: backend_of(pool).close(1.5), lambda pool: pool.close(HANG_GUARD_S)],  # Ctrl-C ends the second wait
    ids=["default", "long"],
)
def test_ctrl_c_while_a_pool_closes_is_heard_when_it_has_closed(
    close: Callable[[stepmill.Pool], None], pool_in: Callable[..., stepmill.Pool]
) -> None:
    pool = pool_in([CountingEnv] * 2)
    pids = [pid for pid, _ in pool.call("locate")]
    stop_process(pids[0])

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def interrupt_close() -> None:
        assert leaks.wait_until_gone(pids[1:], timeout_s=HANG_GUARD_S) == []  # the pool closes, and waits for pids[0]
        os.kill(os.getpid(), signal.SIGALRM)

    old = signal.signal(signal.SIGALRM, interrupt)
    interrupter = threading.Thread(target=interrupt_close)
    interrupter.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            close(pool)
    finally:
        interrupter.join()
        signal.signal(signal.SIGALRM, old)
    assert time.monotonic() - began < HANG_GUARD_S
    assert leaks.wait_until_gone(pids, timeout_s=0) == []
    assert backend_of(pool)._launcher is None


def test_a_worker_that_died_before_is_not_told_of_again_at_close(pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([CountingEnv] * 2)
    kill_process(pool.call("locate")[0][0])
    pool.close()  # a warning would be an error


def test_a_stopped_worker_is_killed_too(pool_in: Callable[..., stepmill.Pool]) -> None:
    pool = pool_in([CountingEnv])
    pid = pool.call("locate")[0][0]
    stop_process(pid)
    with pytest.warns(RuntimeWarning, match="it was killed"):
        pool.close()
    assert not leaks.is_running(pid)


class ClosingEnv(CountingEnv):
    """Action 7 closes all descriptors of its process, as native code that makes a daemon does."""

    def step(self, action: Any) -> Any:
        if action == 7:
            os.closerange(3, 4096)
        return super().step(action)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_a_worker_whose_env_closed_all_descriptors_is_replaced_at_the_next_call(pool_in, context):
    pool = pool_in([ClosingEnv], context, on_fault="truncate", workers=stepmill.Workers(call_timeout_s=HANG_GUARD_S))
    pool.reset(seed=0)
    assert pool.step([7]).reward.tolist() == [7.0]
    with pytest.raises(stepmill.WorkerDied):
        pool.get_attr("count")
    assert pool.step([1]).truncated.tolist() == [True]
    assert pool.step([1]).truncated.tolist() == [False]
