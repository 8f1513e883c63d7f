"""Ctrl-C while a pool starts, restarts a worker or closes: it is raised at once, and nothing is left or closed twice."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import Gate, wait_at
from tests.harness.interrupts import LineInterrupt, find_damage
from tests.harness.leaks import Footprint
from tests.harness.pools import begun, counting_envs, kill_worker, make_pool
from tests.harness.scripts import run_source

pytestmark = pytest.mark.orphans
NUM_WORKERS = 3
# How many lines of stepmill lie between two places where a start is interrupted. The long test takes every place of the
# backends that start fast.
STRIDES = [
    pytest.param("serial", 67, id="serial"),
    pytest.param("thread", 131, id="thread"),
    pytest.param("fork", 599, id="fork"),
    pytest.param("forkserver", 1499, id="forkserver"),
    *(
        pytest.param(where, stride, id=f"{where}-every-{stride}", marks=pytest.mark.soak)
        for where, stride in (("serial", 1), ("thread", 1), ("fork", 5), ("forkserver", 29), ("spawn", 29))
    ),
]


def make(where: str) -> stepmill.Pool:
    return make_pool(where, counting_envs(NUM_WORKERS), num_workers=NUM_WORKERS)


@pytest.fixture
def before() -> Footprint:
    """What this process has once everything that a pool loads is loaded."""
    make("serial").close()
    return Footprint.take()


@pytest.mark.parametrize(("where", "stride"), STRIDES)
def test_an_interrupted_start_leaves_nothing_and_closes_nothing_of_the_program(
    where: str, stride: int, before: Footprint
) -> None:
    for line in itertools.count(1, stride):
        made: list[stepmill.Pool] = []
        interrupt = LineInterrupt(line)
        was_raised = interrupt.call(lambda made=made: made.append(make(where)))
        for pool in made:
            pool.close()
        made.clear()
        assert was_raised == bool(interrupt.where), f"Ctrl-C was lost at {interrupt.where}"
        assert find_damage(before) == [], interrupt.where
        if not was_raised:
            break


@pytest.mark.parametrize(("where", "stride"), STRIDES)
def test_an_interrupted_close_can_be_repeated_and_leaves_nothing(where: str, stride: int, before: Footprint) -> None:
    for line in itertools.count(1, 1 + stride // 4):
        pool = make(where)
        interrupt = LineInterrupt(line)
        was_raised = interrupt.call(pool.close)
        pool.close()
        del pool
        assert was_raised == bool(interrupt.where), f"Ctrl-C was lost at {interrupt.where}"
        assert find_damage(before) == [], interrupt.where
        if not was_raised:
            break


@pytest.mark.parametrize(("where", "stride"), [STRIDES[2], STRIDES[6]])
def test_an_interrupted_restart_can_be_repeated_and_leaves_nothing(where: str, stride: int, before: Footprint) -> None:
    for line in itertools.count(1, stride):
        pool = begun(make(where))
        kill_worker(pool, 1)
        interrupt = LineInterrupt(line)
        was_raised = interrupt.call(pool.revive)
        pool.revive()
        pool.reset(seed=0)
        assert pool.step([1, 2, 3]).reward.tolist() == [1.0, 2.0, 3.0]
        pool.close()
        del pool
        assert was_raised == bool(interrupt.where), f"Ctrl-C was lost at {interrupt.where}"
        assert find_damage(before) == [], interrupt.where
        if not was_raised:
            break


# Python ignores an exception in the callback of a weak reference, with a warning; so has Python's own set of threads one.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("where", ["serial", "thread", "fork", "forkserver"])
def test_a_thousand_starts_that_are_interrupted_at_random_moments_leave_nothing(
    where: str, seed: int, before: Footprint
) -> None:
    rng = random.Random(seed)
    make(where).close()
    begin = time.monotonic()
    make(where).close()
    usual_s = time.monotonic() - begin
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)  # a timer's Ctrl-C
    num_raised = 0
    while num_raised < 250:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, usual_s))
            make(where).close()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except KeyboardInterrupt:
            num_raised += 1
        assert find_damage(before) == []
    signal.signal(signal.SIGALRM, handler)


# ---- constructors that take long ------------------------------------------------------------------------------------------


class GatedEnv(CountingEnv):
    """Writes to a file when it is begun, made and closed; its constructor may wait until a gate is opened."""

    def __init__(self, identity: int, log: Path, gate: Path | None = None) -> None:
        super().__init__(identity)
        self._log = log
        self._note("begin")
        if gate is not None:
            wait_at(gate)
        self._note("made")

    def _note(self, what: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{what} {self.identity}\n")

    def close(self) -> None:
        self._note("close")


def interrupt_who_waits(gate: Gate) -> None:
    """Send SIGINT to the main thread once a constructor waits. Runs in a thread."""
    gate.wait_arrivals()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize(
    ("where", "then"), [("serial", ["close 0"]), ("thread", ["made 1", "close 0", "close 1"]), ("fork", [])]
)
def test_ctrl_c_ends_a_start_whose_constructor_takes_long(
    where: str, then: list[str], gate: Gate, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    envs = [partial(GatedEnv, 0, log), partial(GatedEnv, 1, log, gate.path), partial(GatedEnv, 2, log)]
    before = Footprint.take()
    interrupter = threading.Thread(target=interrupt_who_waits, args=(gate,))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        make_pool(where, envs, num_workers=1)
    interrupter.join()
    gate.open()  # a thread cannot be ended in a constructor: it ends behind it
    assert find_damage(before) == []
    assert log.read_text().splitlines() == ["begin 0", "made 0", "begin 1", *then]


@pytest.mark.slow
def test_a_process_that_was_forked_during_a_start_takes_nothing_from_it() -> None:
    """As a data loader's thread does: it forks while the main thread makes a pool; the fork ends as programs end."""
    done = run_source("""
        import os, threading, weakref
        import stepmill
        from stepmill.testing.envs import CountingEnv

        def fork_often():
            while not is_over.is_set():
                pid = os.fork()
                if pid == 0:
                    weakref.finalize._exitfunc()  # what runs at the end of a program
                    os._exit(0)
                os.waitpid(pid, 0)

        # A fork that begins before another thread imports logging ends with an error of logging's: it is imported by then.
        stepmill.Pool([CountingEnv], num_workers=1, backend="process").close()
        is_over = threading.Event()
        forker = threading.Thread(target=fork_often)
        forker.start()
        for where in ("serial", "thread", "process"):
            for _ in range(5):
                with stepmill.Pool([CountingEnv] * 3, backend=where, num_workers=3 - 2 * (where == "serial")) as pool:
                    pool.reset(seed=0)
                    assert pool.step([1, 2, 3]).reward.tolist() == [1.0, 2.0, 3.0]
        is_over.set()
        forker.join()
        print(sorted(os.listdir("/proc/self/fd"))[:4])
    """)
    assert (done.returncode, done.stderr) == (0, "")
