"""The demo of `make run` on a small scale: live runs, a comparison of engines, a table."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from stepmill.observe import demo
from stepmill.observe.demo import BASELINE, DemoEnv, run_demo, table
from stepmill.spec.errors import MissingExtraError

DEADLINE_S = 60.0


@pytest.mark.slow
def test_the_demo_ends_with_a_table_of_all_engines():
    # In a process of its own: Python keeps the shared memory of Gymnasium's AsyncVectorEnv for later.
    code = """if True:
        from stepmill.observe.demo import DemoEnv, Rounds, run_demo
        run_demo([DemoEnv("CartPole-v1", 4, 0.2)], Rounds(num_rounds=1, round_s=0.05))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    for engine in (BASELINE, "gymnasium SyncVectorEnv", "stepmill serial", "stepmill process"):
        assert re.search(rf"^{engine} +[\d,.]+ +[\d.]+x$", done.stdout, re.MULTILINE)


def test_an_env_whose_extra_is_missing_is_named_and_left_out(capfd, monkeypatch):
    def find_env(env_id: str) -> None:
        raise MissingExtraError(module="ale_py", extra="atari")

    monkeypatch.setattr(demo, "find_env", find_env)
    assert run_demo([DemoEnv("ALE/Pong-v5", 4, 0.2)]) == 0
    assert "ALE/Pong-v5 is left out: ale_py is not installed; run: pip install" in capfd.readouterr().out


def test_the_table_gives_each_rate_beside_its_ratio():
    lines = table(
        {"A x 1": {BASELINE: 10.0, "stepmill": 25.0}, "B x 2": {BASELINE: 2000.0, "stepmill": 1000.0}}
    ).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["gymnasium", "AsyncVectorEnv", "10.0", "1.0x", "2,000", "1.0x"],
        ["stepmill", "25.0", "2.5x", "1,000", "0.5x"],
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("rates", [{}])
def test_the_table_of_nothing_is_a_heading(rates):
    assert table(rates).splitlines()[0] == "env-steps/s"
