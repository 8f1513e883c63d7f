"""Programs that a pool of processes supports: scripts without a guard, threads, daemons, isolated mode, few descriptors."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.scripts import run_file as run
from tests.harness.scripts import run_source, start_script

UNGUARDED_SCRIPT = """
import gymnasium, numpy as np, stepmill

class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(5)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.ones(2, np.float32), float(action), False, False, {}

pool = stepmill.Pool([MyEnv, MyEnv], backend="process", num_workers=2, options=stepmill.PoolOptions(context="CONTEXT"))
pool.reset(seed=0)
print(pool.step(np.array([1, 2])).reward.sum())
pool.close()
"""

DAEMON_SCRIPT = f"""
import multiprocessing

def work():
    exec({UNGUARDED_SCRIPT!r}, {{"__name__": "__main__"}})

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work, daemon=True)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("name", ["fork", "forkserver", "spawn"])
def test_a_script_without_a_guard_makes_a_pool_of_its_own_envs(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED_SCRIPT.replace("CONTEXT", name))
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


@pytest.mark.parametrize("name", ["fork", "forkserver", "spawn"])
def test_a_script_from_stdin_makes_a_pool(name: str) -> None:
    with start_script("import sys; exec(sys.stdin.read())") as process:
        out, err = process.communicate(UNGUARDED_SCRIPT.replace("CONTEXT", name), timeout=60)
    assert (process.returncode, out, err) == (0, "3.0\n", "")


@pytest.mark.orphans  # the resource tracker of multiprocessing
@pytest.mark.parametrize("name", ["fork", "forkserver"])
def test_a_daemonic_process_makes_a_pool(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DAEMON_SCRIPT.replace("CONTEXT", name))
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_pool_is_made_in_a_thread_and_closed_in_another(context: str) -> None:
    made: list[stepmill.Pool] = []

    def make() -> None:
        options = stepmill.PoolOptions(context=context)  # type: ignore[arg-type]
        made.append(stepmill.Pool([CountingEnv], backend="process", num_workers=1, options=options))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert made[0].reset(seed=0).obs.tolist() == [[0, 0, 0]]
    made.pop().close()


def test_a_learner_in_isolated_mode_starts_workers_alike(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED_SCRIPT.replace("CONTEXT", "spawn"))
    done = subprocess.run([sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


@pytest.mark.parametrize("name", ["fork", "forkserver", "spawn"])
def test_a_learner_without_stdin_starts_workers_alike(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.close(0)\n" + UNGUARDED_SCRIPT.replace("CONTEXT", name))
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


@pytest.mark.parametrize(("backend", "name"), [("process", "fork"), ("process", "forkserver"), ("thread", "fork")])
def test_too_many_workers_for_the_systems_limits_are_refused_and_nothing_is_kept(backend: str, name: str) -> None:
    source = f"""
        import os, resource
        import stepmill
        from stepmill.backends.starter_client import STARTERS
        from stepmill.testing import CountingEnv
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        before = len(os.listdir("/proc/self/fd"))
        options = stepmill.PoolOptions(context={name!r})
        try:
            stepmill.Pool([CountingEnv] * 60, backend={backend!r}, num_workers=60, options=options)
        except stepmill.UsageError as error:
            print(error)
        STARTERS.close()  # which the next pool would use
        print(len(os.listdir("/proc/self/fd")) - before)
    """
    done = run_source(source)
    assert done.stderr == ""
    assert "60 workers could not be started" in done.stdout
    assert "ulimit -n" in done.stdout
    assert done.stdout.endswith("\n0\n")
