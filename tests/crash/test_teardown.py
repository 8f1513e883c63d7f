"""However and whenever a program ends, nothing of its pool is left, and the screen has one traceback at most."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.harness import leaks
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import ROOT, run_file, run_source, start_script

pytestmark = pytest.mark.orphans

# The env says where it is, and stays there. It writes to the learner's stdout, which workers inherit.
LEARNER = """
    import ctypes, os, signal, sys, threading, time
    if sys.argv[3] == "group":
        os.setpgid(0, 0)
    import stepmill
    from stepmill.pool import start
    from stepmill.testing.envs import CountingEnv

    phase = sys.argv[2]
    if phase == "native":
        start.CLOSE_TIMEOUT_S = 600.0

    def stay(name):
        if name == phase:
            os.write(1, b"inside\\n")
            threading.Event().wait(600)

    class StayingEnv(CountingEnv):
        def __init__(self):
            super().__init__()
            stay("start")

        def reset(self, **arguments):
            stay("reset")
            return super().reset(**arguments)

        def step(self, action):
            stay("recv" if phase == "recv" else "step")
            if phase == "native":  # deaf, with the GIL held: nothing but SIGKILL ends it
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                os.write(1, b"inside\\n")
                ctypes.PyDLL(None).sleep(600)
            return super().step(action)

        def tell(self):
            stay("call")

        def close(self):
            stay("close")

    options = stepmill.PoolOptions(context=sys.argv[1], crash_dir=sys.argv[4] or None)
    pool = stepmill.Pool([StayingEnv, CountingEnv], backend="process", num_workers=2, options=options)
    pool.reset(seed=0)
    if phase == "recv":
        pool.send([1, 1])
        pool.recv(1)
        pool.recv(1)
    pool.step([1, 1])
    if phase == "call":
        pool.call("tell", env_ids=[0])
    if phase == "close":
        pool.close()
    os.write(1, b"inside\\n")
    time.sleep(600)
"""
PHASES = ["start", "reset", "step", "recv", "call", "idle", "close"]


def some_of_all(*names: str) -> list[object]:
    """All phases; but for these only in the long tests, since a worker that must be ended by force takes two seconds."""
    return [pytest.param(phase, marks=() if phase in names else pytest.mark.soak) for phase in PHASES]


def end_inside(context: str, phase: str, number: int, *, whom: str, folder: str = "") -> tuple[int, str]:
    """Start a learner, send a signal when it is inside of a phase; return its exit status and stderr once all are gone."""
    with start_script(LEARNER, context, phase, whom, folder, interpreter=()) as learner:
        assert learner.stdout.readline() == "inside\n"
        pids = leaks.descendants(learner.pid)
        assert len(pids) >= 2
        if whom == "group":
            os.killpg(learner.pid, number)
        else:
            learner.send_signal(number)
        err = learner.communicate(timeout=HANG_GUARD_S)[1]
        assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
    return learner.returncode, err


@pytest.mark.covers("G-2")
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_ctrl_c_while_an_env_hangs_in_native_code_does_not_wait_out_the_time_for_close(context: str):
    _, err = end_inside(context, "native", signal.SIGINT, whom="group")  # where close() has ten minutes
    assert err.count("Traceback") == 1, err
    assert "KeyboardInterrupt" in err


@pytest.mark.covers("X-8")
@pytest.mark.parametrize(
    "phase",
    [pytest.param(each, marks=pytest.mark.slow if each in ("reset", "recv", "call") else ()) for each in PHASES],
)
def test_ctrl_c_inside_of_anything_ends_everything_with_one_traceback(phase: str):
    status, err = end_inside("fork", phase, signal.SIGINT, whom="group")
    assert status in (1, -signal.SIGINT)
    assert err.count("Traceback") == 1, err
    assert "KeyboardInterrupt" in err


@pytest.mark.parametrize("phase", some_of_all("start", "step", "close"))
def test_an_interrupt_of_the_learner_alone_ends_everything_with_one_traceback(phase: str):
    status, err = end_inside("fork", phase, signal.SIGINT, whom="learner")
    assert status in (1, -signal.SIGINT)
    assert err.count("Traceback") == 1, err


@pytest.mark.parametrize("phase", some_of_all("start", "step", "close"))
def test_sigterm_inside_of_anything_ends_everything_silently(phase: str):
    assert end_inside("fork", phase, signal.SIGTERM, whom="learner") == (-signal.SIGTERM, "")


@pytest.mark.covers("G-3/parent")
@pytest.mark.parametrize("phase", some_of_all("start", "reset", "close"))
def test_a_learner_that_is_killed_inside_of_anything_leaves_nothing(phase: str):
    assert end_inside("fork", phase, signal.SIGKILL, whom="learner") == (-signal.SIGKILL, "")


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_workers_of_every_start_method(context: str, number: int):
    _, err = end_inside(context, "step", number, whom="group")
    assert err.count("Traceback") == (1 if number == signal.SIGINT else 0), err


@pytest.mark.covers("X-12/stop")
def test_ctrl_c_is_no_fault_that_would_leave_a_capsule(tmp_path: Path):
    _, err = end_inside("fork", "step", signal.SIGINT, whom="group", folder=str(tmp_path))
    assert err.count("Traceback") == 1
    assert list(tmp_path.iterdir()) == []


LOADER = """
    import multiprocessing, os
    import stepmill
    from stepmill.testing.envs import CountingEnv

    class Dataset:
        def __init__(self):
            options = stepmill.PoolOptions(context={context!r})
            self.pool = stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, options=options)
            self.pool.reset(seed=0)

        def read(self, queue):
            try:
                self.pool.step([1, 1])
            except stepmill.UsageError as error:
                queue.put(str(error))

    data = Dataset()
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()
    for end in ("returns", "is killed", "closes"):
        loader = fork.Process(target=data.pool.close if end == "closes" else data.read, args=(queue,) * (end != "closes"))
        loader.start()
        if end != "closes":
            assert "belongs to the process that made it" in queue.get()
        if end == "is killed":
            loader.kill()
        loader.join(60)
        assert loader.exitcode in (0, -9), loader.exitcode
        assert data.pool.step([2, 3]).reward.tolist() == [2.0, 3.0]
    del data
    print("done")
"""


@pytest.mark.parametrize("context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow), "spawn"])
def test_forked_loaders_that_inherit_a_pool_do_it_no_harm(context: str):
    done = run_source(LOADER.format(context=context))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_fork_that_outlives_its_maker_keeps_no_worker_alive():
    source = """
        import os, sys, time
        import stepmill
        from stepmill.testing.envs import CountingEnv
        options = stepmill.PoolOptions(context="fork")
        pool = stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, options=options)
        pool.reset(seed=0)
        print(*[worker.pid for worker in pool.stats().workers], flush=True)
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    """
    with start_script(source) as learner:
        workers = {int(word) for word in learner.stdout.readline().split()}
        assert learner.wait(timeout=HANG_GUARD_S) == 0
        assert leaks.wait_until_gone(workers, timeout_s=HANG_GUARD_S) == []
        leaks.kill_descendants()  # the fork, which came to us


@pytest.mark.parametrize(
    "end",
    [
        "pool = None",
        pytest.param("import sys; sys.exit(3)", marks=pytest.mark.slow),
        "1 / 0",
        pytest.param("os._exit(0)", marks=pytest.mark.slow),
    ],
)
def test_a_thread_of_the_program_may_own_the_pool_as_it_ends(end: str):
    source = f"""
        import os, threading
        import stepmill
        from stepmill.testing.envs import CountingEnv
        made = []
        def own():
            options = stepmill.PoolOptions(context="fork")
            made.append(stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, options=options))
            made[0].reset(seed=0)
        thread = threading.Thread(target=own)
        thread.start()
        thread.join()
        {end}
    """
    done = run_source(source)
    assert done.stderr.count("Traceback") == (1 if "1 / 0" in end else 0)
    assert leaks.wait_until_gone(leaks.descendants(), timeout_s=HANG_GUARD_S) == []


def test_a_failing_test_of_pytest_that_forgets_its_pool_leaves_nothing(tmp_path: Path):
    path = tmp_path / "test_it.py"
    body = """
        import stepmill
        from stepmill.testing.envs import CountingEnv

        kept = []

        def test_forgets():
            options = stepmill.PoolOptions(context="fork")
            kept.append(stepmill.Pool([CountingEnv] * 2, backend="process", num_workers=2, options=options))
            kept[0].reset(seed=0)
            assert kept[0].step([1, 2]).reward.tolist() == [1.0, 3.0]

        def test_goes_on():
            assert kept[0].step([1, 2]).reward.tolist() == [1.0, 2.0]
    """
    path.write_text(textwrap.dedent(body))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert leaks.wait_until_gone(leaks.descendants(), timeout_s=HANG_GUARD_S) == []


def test_an_unguarded_script_that_is_interrupted_leaves_nothing(tmp_path: Path):
    path = tmp_path / "train.py"
    body = """
        import os, signal
        import stepmill
        from stepmill.testing.envs import CountingEnv
        for context in ("spawn", "forkserver"):
            pool = stepmill.Pool(
                [CountingEnv] * 2, backend="process", num_workers=2, options=stepmill.PoolOptions(context=context)
            )
            pool.reset(seed=0)
        os.kill(os.getpid(), signal.SIGINT)
    """
    path.write_text(textwrap.dedent(body))
    done = run_file(path)
    assert done.stderr.count("Traceback") == 1
    assert leaks.wait_until_gone(leaks.descendants(), timeout_s=HANG_GUARD_S) == []
