"""`stepmill bench --against sb3` measures Stable-Baselines3's own class."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness.hangs import HANG_GUARD_S


@pytest.mark.orphans  # the processes of multiprocessing's forkserver, which SB3 leaves
def test_bench_measures_the_subprocess_env_of_sb3(tmp_path):
    options = ["--against", "sb3", "--num-envs", "2", "--rounds", "1", "--round-seconds", "0.05", "--json"]
    command = [sys.executable, "-m", "stepmill", "bench", "CartPole-v1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, cwd=tmp_path, check=True)
    rates = json.loads(done.stdout)["steps_per_s"]
    assert set(rates) == {"stepmill serial", "stepmill process", "sb3 SubprocVecEnv"}
    assert rates["sb3 SubprocVecEnv"] > 0
