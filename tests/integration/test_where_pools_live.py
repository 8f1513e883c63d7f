"""Where a pool of processes can be made: in threads, in isolated mode, without stdin, with few descriptors."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

import stepmill
from stepmill.testing.envs import CountingEnv
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import run_file as run
from tests.harness.scripts import run_source

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


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_pool_is_made_in_a_thread_that_ends_and_used_in_another(context: str) -> None:
    # The death of the thread that made the pool must not look like the death of the learner.
    made: list[stepmill.Pool] = []

    def make() -> None:
        env_fns = [partial(CountingEnv, length=100)] * 3
        options = stepmill.PoolOptions(context=context)  # type: ignore[arg-type]
        made.append(stepmill.Pool(env_fns, backend="process", num_workers=2, options=options))
        made[0].reset(seed=0)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    for action in range(1, 50):
        assert made[0].step([action] * 3).reward.tolist() == [float(action)] * 3
    made.pop().close()


def test_a_learner_in_isolated_mode_starts_workers_alike(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED_SCRIPT.replace("CONTEXT", "spawn"))
    done = subprocess.run(
        [sys.executable, "-I", str(script)], capture_output=True, text=True, timeout=HANG_GUARD_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


@pytest.mark.parametrize("name", [pytest.param("fork", marks=pytest.mark.slow), "forkserver", "spawn"])
def test_a_learner_without_stdin_starts_workers_alike(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nos.close(0)\n" + UNGUARDED_SCRIPT.replace("CONTEXT", name))
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0\n", "")


@pytest.mark.parametrize(
    ("backend", "name"),
    [("process", "fork"), pytest.param("process", "forkserver", marks=pytest.mark.slow), ("thread", "fork")],
)
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
