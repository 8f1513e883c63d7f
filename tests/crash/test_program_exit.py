"""A program that ends while one of its daemon threads steps a pool ends as it would without stepmill: by its own status, silently."""

from __future__ import annotations

import pytest

from tests.harness.scripts import run_source

NUM_SOAK_RUNS = 200

# The main thread ends as soon as the daemon thread is at work. A daemon thread keeps its pool alive, which is not a leak.
STEPPING = """
    import os, sys, threading
    os.environ.pop("STEPMILL_LEAK_WARNINGS", None)
    import numpy as np
    from tests.harness.external_pools import Script
    from tests.harness.pools import BACKENDS, counting_envs, make_pool
    import stepmill

    where, status = sys.argv[1], int(sys.argv[2])
    is_at_work = threading.Event()

    def step_for_ever(pool):
        pool.reset(seed=0)
        for step in range(10**9):
            pool.step(np.ones(2, np.int64))
            if step == 20:
                is_at_work.set()

    if where in BACKENDS:
        pool = make_pool(where, counting_envs(2))
    else:
        pool = stepmill.Pool([Script(is_async=where == "external thread")] * 2, backend="envpool")
    threading.Thread(target=step_for_ever, args=(pool,), daemon=True).start()
    is_at_work.wait()
    if status:
        sys.exit(status)
"""
WHERE = ["serial", "thread", "fork", "forkserver", "spawn", "external", "external thread"]


def end_while_stepping(where: str, status: int) -> tuple[int, str]:
    ended = run_source(STEPPING, where, str(status))
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "where",
    [pytest.param(each, marks=pytest.mark.slow if each in ("fork", "external thread") else ()) for each in WHERE],
)
def test_a_program_that_ends_while_a_daemon_thread_steps_ends_silently_by_its_own_status(where: str):
    assert [end_while_stepping(where, status) for status in (0, 5)] == [(0, ""), (5, "")]


@pytest.mark.soak
@pytest.mark.parametrize("where", WHERE)
def test_no_program_of_many_crashes_at_its_end(where: str):
    outcomes = [end_while_stepping(where, status) for status in (0, 5) * (NUM_SOAK_RUNS // 2)]
    assert set(outcomes) == {(0, ""), (5, "")}


# The daemon thread is inside of the env, and comes back from there for the first time while the interpreter is finalized: the last
# exit function to run says so. It must not be unwound through native frames.
INSIDE = """
    import atexit, os, sys, threading, time, warnings
    warnings.simplefilter("default")
    is_finalizing = False

    def end_steps():
        global is_finalizing
        is_finalizing = True

    atexit.register(end_steps)  # the first to be registered runs last
    os.environ.pop("STEPMILL_LEAK_WARNINGS", None)
    from tests.harness.pools import make_pool
    from stepmill.testing.envs import CountingEnv

    class StayingEnv(CountingEnv):
        def step(self, action):
            is_inside.set()
            while not is_finalizing:
                time.sleep(0.001)
            while True:
                pass  # until the interpreter takes the GIL away for good

        def close(self):
            os.write(1, b"closed\\n")

    def step(pool):
        pool.reset()
        pool.step([1])

    is_inside = threading.Event()
    pool = make_pool(sys.argv[1], [StayingEnv])
    threading.Thread(target=step, args=(pool,), daemon=True).start()
    is_inside.wait()
    sys.exit(5)
"""


@pytest.mark.parametrize("where", ["serial", "thread"])
def test_a_thread_that_is_inside_of_an_env_when_the_interpreter_ends_does_not_crash_it(where: str):
    ended = run_source(INSIDE, where)
    assert ended.returncode == 5, ended.stderr
    assert ended.stdout == "", "an env was closed while it was being stepped"
    assert "cannot be killed" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 2, ended.stderr


CLOSING = """
    import sys, threading
    from tests.harness.pools import make_pool
    from stepmill.testing.envs import CountingEnv

    class Env(CountingEnv):
        is_stepping = is_closed_early = False

        def step(self, action):
            Env.is_stepping = True
            is_inside.set()
            may_go_on.wait()
            Env.is_stepping = False
            return super().step(action)

        def close(self):
            Env.is_closed_early = Env.is_stepping

    def step(pool):
        pool.reset()
        try:
            pool.step([1])
        except BaseException as error:
            errors.append(type(error).__name__)

    is_inside, may_go_on, errors = threading.Event(), threading.Event(), []
    pool = make_pool("serial", [Env])
    thread = threading.Thread(target=step, args=(pool,))
    thread.start()
    is_inside.wait()
    threading.Timer(0.2, may_go_on.set).start()
    pool.close()
    thread.join()
    print(Env.is_closed_early, errors)
"""


def test_close_waits_for_an_env_that_another_thread_is_stepping():
    ended = run_source(CLOSING)
    assert (ended.stdout, ended.stderr) == ("False ['ClosedPoolError']\n", "")


def test_an_exit_function_that_runs_after_the_pool_was_closed_can_join_a_thread_that_stepped_it():
    """The thread must end: if it were parked before the interpreter is finalized, joining it would wait without limit."""
    source = STEPPING.replace("threading.Thread(", "thread = threading.Thread(").replace(".start()", "; thread.start()")
    source = source.replace(
        "import os, sys, threading\n",
        "import atexit, os, sys, threading\n    atexit.register(lambda: thread.join())\n",
        1,
    )
    ended = run_source(source, "serial", "5")
    assert (ended.returncode, ended.stderr) == (5, "")
