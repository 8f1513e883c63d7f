"""`stepmill bench`: rates of engines on one env, as text and JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from stepmill.observe.compare import text_bars
from tests.harness.commands import run_command
from tests.harness.hangs import HANG_GUARD_S

COMMAND = [sys.executable, "-m", "stepmill", "bench"]
SHORT = ["--num-envs", "2", "--rounds", "2", "--round-seconds", "0.05"]
ENGINES = {"stepmill serial", "stepmill process", "gymnasium AsyncVectorEnv", "gymnasium SyncVectorEnv"}


def run_bench(*arguments, cwd):
    return run_command("bench", *arguments, cwd=cwd)


@pytest.mark.slow
@pytest.mark.parametrize(("env_id", "others"), [("Acrobot-v1", set()), ("CartPole-v1", {"gymnasium make_vec"})])
def test_bench_prints_bars(env_id, others, tmp_path):
    done = run_bench(env_id, *SHORT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"2 x {env_id}")
    assert {line.split("  ")[0] for line in lines[1:-1]} == ENGINES | others
    fastest = {owner: next(line for line in lines[1:] if line.startswith(owner)) for owner in ("stepmill", "gymnasium")}
    ours, theirs = (float(line.split()[-1].replace(",", "")) for line in fastest.values())
    found = re.fullmatch(
        r"Without a learner, (stepmill \w+) takes ([0-9.]+) times .* as (\w+), (?:Gymnasium's|which) .*", lines[-1]
    )
    assert found[1] in fastest["stepmill"]
    assert found[3] in fastest["gymnasium"]
    assert float(found[2]) == pytest.approx(ours / theirs, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("space", "obs"),
    [
        ("Dict(a=gymnasium.spaces.Box(0, 1, (2,)))", "{'a': np.zeros(2, np.float32)}"),
        ("Text(9)", "'hello'"),  # for which Gymnasium has no shared memory
    ],
)
def test_bench_prints_json_of_an_env_with_any_observations(tmp_path, space, obs):
    (tmp_path / "my_env.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Mine(gymnasium.Env):\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        f"    observation_space = gymnasium.spaces.{space}\n"
        "    def reset(self, *, seed=None, options=None):\n"
        f"        return {obs}, {{}}\n"
        "    def step(self, action):\n"
        f"        return {obs}, 0.0, False, False, {{}}\n"
        "gymnasium.register('Mine-v0', Mine)\n"
    )
    done = run_bench("my_env:Mine-v0", *SHORT, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["env"], found["num_envs"]) == ("Mine-v0", 2)
    assert set(found["steps_per_s"]) == ENGINES
    assert all(rate > 0 for rate in found["steps_per_s"].values())


@pytest.mark.orphans  # since Python 3.14, multiprocessing's workers have a parent that ends before them
def test_an_engine_that_cannot_run_the_env_is_left_out_and_named(tmp_path):
    (tmp_path / "my_env.py").write_text(
        "import gymnasium, multiprocessing\n"
        "class Picky(gymnasium.Env):\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    observation_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self.is_alien = multiprocessing.parent_process() is not None\n"
        "        return 0, {}\n"
        "    def step(self, action):\n"
        "        if self.is_alien:\n"
        "            raise ValueError('not in a process of multiprocessing')\n"
        "        return 0, 0.0, False, False, {}\n"
        "gymnasium.register('Picky-v0', Picky)\n"
    )
    done = run_bench("my_env:Picky-v0", *SHORT, "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert set(json.loads(done.stdout)["steps_per_s"]) == ENGINES - {"gymnasium AsyncVectorEnv"}
    line = "stepmill: gymnasium AsyncVectorEnv failed and is left out: ValueError: not in a process of multiprocessing"
    assert line in done.stderr.splitlines()  # beside Gymnasium's own warnings


@pytest.mark.slow
def test_ctrl_c_ends_bench_and_all_engines(tmp_path):
    with subprocess.Popen([*COMMAND, "CartPole-v1", "--rounds", "9999"], stderr=subprocess.PIPE, text=True) as running:
        from stepmill.observe.attach import find_pools

        while len(find_pools(running.pid)) < 2:
            os.sched_yield()
        running.send_signal(signal.SIGINT)
        assert running.wait(HANG_GUARD_S) == 130


def test_bars_of_text_are_sorted_and_scaled():
    assert text_bars({"a": 50.0, "bb": 100.0, "c": 0.0}, width=4) == ["bb  ████  100", "a   ██    50", "c         0"]
