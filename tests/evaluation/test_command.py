"""`stepmill evaluate`."""

from __future__ import annotations

import json

from tests.harness.commands import run_command


def run(*arguments):
    return run_command("evaluate", *arguments)


def test_the_command_prints_a_table_or_json():
    arguments = ("tests.evaluation.envs:Walk", "--policy", "tests.evaluation.envs:forward", "--seeds", "3:7")
    table = run(*arguments, "--tasks", '{"near": {}, "far": {"further": 40}}', "--num-envs", "4")
    assert table.returncode == 0, table.stderr
    assert "Walk: 8 episodes" in table.stdout
    assert "far" in table.stdout
    found = json.loads(run(*arguments, "--json", "--backend", "serial").stdout)
    assert [episode["seed"] for episode in found["episodes"]] == [3, 4, 5, 6]
    assert found["summary"]["success_rate"] == 1.0


def test_episodes_that_could_not_be_played_make_the_exit_status_1():
    failed = run("tests.evaluation.envs:FailsAlways", "--policy", "tests.evaluation.envs:forward", "--seeds", "2:5")
    assert failed.returncode == 1
    assert "1" in failed.stdout


def test_nonsense_is_one_line_and_exit_status_2():
    for arguments in (("--seeds", "7:3"), ("--tasks", '{"near": 3}'), ("--policy", "nowhere:at_all")):
        wrong = run("tests.evaluation.envs:Walk", "--policy", "tests.evaluation.envs:forward", *arguments)
        assert wrong.returncode == 2, wrong.stderr
        assert len(wrong.stderr.splitlines()) == 1
