"""`stepmill run` as a user starts it, judged by its exit status, stdout and stderr."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stepmill
from stepmill.cli.main import main
from tests.harness.commands import run_command
from tests.harness.scripts import ROOT, run_source
from tests.harness.terminals import read_terminal

DEADLINE_S = 60.0
COMMAND = [sys.executable, "-m", "stepmill"]
MY_ENVS = """
import threading

import gymnasium
from gymnasium.error import DependencyNotInstalled
from stepmill.testing import CountingEnv, DyingEnv, RaisingEnv

class Needy(CountingEnv):
    def __init__(self):
        raise DependencyNotInstalled('Box9D is not installed, run `pip install "gymnasium[box9d]"`')

class Hanging(CountingEnv):
    def step(self, action):
        if self.num_steps == 6:
            threading.Event().wait()
        return super().step(action)

for name, entry_point, kwargs in [
    ("Hanging", Hanging, {}),
    ("Counting", CountingEnv, {}),
    ("Needy", Needy, {}),
    ("Broken", RaisingEnv, {"phase": "init"}),
    ("Failing", RaisingEnv, {"phase": "step", "at": 7}),
    ("Ending", DyingEnv, {"phase": "step", "at": 7}),
]:
    gymnasium.register(f"{name}-v0", entry_point=entry_point, kwargs=kwargs, order_enforce=False)
"""
MY_POLICIES = """
def ones(obs, action_space):
    return [1] * len(obs)

def too_few(obs, action_space):
    return action_space.sample()[:-1]

def broken(obs, action_space):
    raise ValueError("no idea")
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A current directory with modules of envs and policies."""
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    (tmp_path / "my_policies.py").write_text(MY_POLICIES)
    return tmp_path


def summary_of(*arguments: str, cwd: Path = ROOT) -> dict:
    done = run_command("run", *arguments, "--json", cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def start_cli(*arguments: str, cwd: Path | None = None, **streams) -> subprocess.Popen[str]:
    """Start the command in a process group of its own, as a shell does, so that a signal reaches all of it."""
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, text=True, start_new_session=True, stdin=subprocess.DEVNULL, **streams
    )


def members_of(group: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def read_until(stream, wanted: str) -> str:
    """Read lines up to one that contains `wanted`."""
    text = ""
    for line in stream:
        text += line
        if wanted in line:
            return text
    raise AssertionError(f"{wanted!r} never came; there was: {text}")


@pytest.mark.parametrize(
    ("backend", "batch_size"),
    [
        ("serial", "4"),
        pytest.param("thread", "2", marks=pytest.mark.slow),
        pytest.param("process", "4", marks=pytest.mark.slow),
        ("process", "2"),
    ],
)
def test_a_run_tells_what_it_did(backend, batch_size):
    found = summary_of(
        *("CartPole-v1", "--num-envs", "4", "--batch-size", batch_size, "--backend", backend),
        *("--num-workers", "1" if backend == "serial" else "2", "--steps", "2000", "--seed", "3"),
    )
    assert found["env_id"] == "CartPole-v1"
    assert found["backend"] == backend
    assert 2000 <= found["steps"] < 2004
    assert found["episodes"]["count"] > 20
    assert 8 <= found["episodes"]["return_mean"] == found["episodes"]["length_mean"] <= 60
    assert len(found["workers"]) == found["num_workers"] == (1 if backend == "serial" else 2)
    assert all(0 < worker["env_share"] <= 1 for worker in found["workers"])
    assert found["interrupted"] is False


@pytest.mark.slow
def test_the_same_seed_gives_the_same_episodes_wherever_the_envs_run():
    places = [("serial", "1"), ("thread", "2"), ("process", "3")]
    arguments = ("CartPole-v1", "--num-envs", "3", "--steps", "3000", "--seed", "11")
    found = [summary_of(*arguments, "--backend", backend, "--num-workers", count) for backend, count in places]
    assert found[0]["episodes"] == found[1]["episodes"] == found[2]["episodes"]
    assert found[0]["steps"] == found[1]["steps"] == found[2]["steps"]


def test_a_policy_of_the_user_acts(here):
    found = summary_of(
        *("my_envs:Counting-v0", "--policy", "my_policies:ones", "--num-envs", "2", "--steps", "100"), cwd=here
    )
    # Its episodes are of 5 steps, and the reward is the action.
    assert found["episodes"]["return_min"] == found["episodes"]["return_max"] == 5
    assert found["policy"] == "my_policies:ones"


@pytest.mark.slow
def test_without_a_terminal_there_are_plain_lines():
    done = run_command("run", "CartPole-v1", "--seconds", "2.5", "--num-envs", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == "starting 2 envs of CartPole-v1"
    assert any("env-steps/s" in line and "return" in line and "waiting" in line for line in lines)
    assert any(line.lstrip().startswith("env-steps ") for line in lines)


def test_a_terminal_gets_the_live_view_and_its_cursor_back():
    ours, theirs = pty.openpty()
    try:
        process = start_cli("run", "CartPole-v1", "--seconds", "1.5", stdout=theirs, stderr=theirs)
        os.close(theirs)
        screen = read_terminal(ours)
        assert process.wait(DEADLINE_S) == 0
    finally:
        os.close(ours)
    assert "Ctrl-C stops" in screen
    assert "learner" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")


def test_the_version_is_the_package_s():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout) == (0, f"stepmill, version {stepmill.__version__}\n")


def test_help_documents_policies_and_the_atari_preprocessing():
    words = " ".join(run_command("run", "--help").stdout.split())
    assert "function(obs, action_space)" in words
    assert "84x84" in words


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "my_envs:Nothing-v0"], "unknown env id 'Nothing-v0'"),
        (["run", "my_envs.py:Counting-v0"], "drop the .py: my_envs:Counting-v0"),
        (["run", "my_envs:Needy-v0"], 'pip install "gymnasium[box9d]"'),
        (["run", "my_envs:Needy-v0", "--backend", "serial"], 'pip install "gymnasium[box9d]"'),
        (["run", "CartPole-v1", "--policy", "my_policies.py:ones"], "drop the .py: my_policies:ones"),
        (["run", "CartPole-v1", "--policy", "my_policies:too_few", "--num-envs", "2"], "action"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(here, arguments, expected):
    done = run_command(*arguments, cwd=here)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("stepmill: ")
    assert expected in done.stderr


@pytest.fixture
def main_in_process(monkeypatch):
    """`main`, which adds a handler to the logger of its process."""
    monkeypatch.setattr(logging.getLogger("stepmill"), "handlers", [])
    return main


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "CartPol-v1"], "did you mean CartPole-v1"),
        (["run", "CartPole-v1", "--num-envs", "0"], "--num-envs"),
        (["run", "CartPole-v1", "--num-workers", "0"], "--num-workers"),
        (["run", "CartPole-v1", "--batch-size", "0"], "--batch-size"),
        (["run", "CartPole-v1", "--steps", "-3"], "--steps"),
        (["run", "CartPole-v1", "--seconds", "0"], "--seconds"),
        (["run", "CartPole-v1", "--seconds", "nan"], "--seconds"),
        (["run", "CartPole-v1", "--seconds", "inf"], "--seconds"),
        (["run", "CartPole-v1", "--step-timeout", "nan"], "--step-timeout"),
        (["run", "CartPole-v1", "--context", "thread"], "--context"),
        (["run", "CartPole-v1", "--on-fault", "ignore"], "--on-fault"),
        (["run", "CartPole-v1", "--env-kwargs", "gravity=3"], "is not JSON"),
        (["run", "CartPole-v1", "--env-kwargs", "[3]"], "is a JSON list; give an object"),
        (["run", "CartPole-v1", "--seed", "-1"], "--seed"),
        (["run", "CartPole-v1", "--num-envs", "4", "--batch-size", "5"], "--batch-size 5 is larger than --num-envs 4"),
        (["run", "CartPole-v1", "--num-envs", "many"], "--num-envs"),
        (["run", "CartPole-v1", "--backend", "magic"], "--backend"),
        (["run", "CartPole-v1", "--no-such-option"], "--no-such-option"),
        (["run"], "ENV"),
        (["walk"], "walk"),
    ],
)
def test_arguments_that_are_refused_are_named_in_one_line(main_in_process, capsys, arguments, expected):
    assert main_in_process(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stepmill: ")
    assert expected in line


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run", "X-v0", "--num-envs", "0"], ["tune"]])
def test_help_and_complaints_about_options_come_without_waiting_for_numpy(arguments):
    source = (
        "import sys; from stepmill.cli.main import main; status = main(sys.argv[1:]); print('numpy' in sys.modules)"
    )
    assert run_source(source, *arguments).stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("batch_size", ["2", "1"])
def test_envs_that_hang_are_named_when_the_run_ends(here, batch_size):
    arguments = ["run", "my_envs:Hanging-v0", "--num-envs", "2", "--batch-size", batch_size]
    for seconds in ("2", "10", "50"):  # envs count as silent after ten times the longest time that an answer took
        done = run_command(*arguments, "--seconds", seconds, cwd=here)
        if done.returncode != 0:
            break
    assert done.returncode == 1
    assert "steps" in done.stdout
    *warnings, line = done.stderr.splitlines()
    assert line.startswith("stepmill: envs [0, 1] had not answered for ")
    assert warnings
    assert all(re.match(r"stepmill: worker \d .* did not stop within", warning) for warning in warnings)
    assert "--step-timeout" in line


@pytest.mark.slow
def test_a_step_timeout_and_a_policy_of_faults_get_a_run_past_envs_that_hang(here):
    arguments = ["--num-envs", "2", "--context", "spawn", "--step-timeout", "0.2", "--on-fault", "truncate"]
    done = run_command("run", "my_envs:Hanging-v0", *arguments, "--steps", "30", "--crash-dir", "crashes", cwd=here)
    assert done.returncode == 0, done.stderr
    assert list((here / "crashes").iterdir())
    assert re.search(r"^  faults +\d+ timed out", done.stdout, re.MULTILINE)
    assert all(line.startswith("stepmill: handled by the fault policy") for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    "arguments", [pytest.param('{"length": 3}', marks=pytest.mark.slow), '{"length": 5, "max_episode_steps": 3}']
)
def test_arguments_of_the_env_come_as_json(here, arguments):
    done = run_command("run", "my_envs:Counting-v0", "--env-kwargs", arguments, "--steps", "60", "--json", cwd=here)
    assert json.loads(done.stdout)["episodes"]["length_mean"] == 3


@pytest.mark.parametrize(
    ("arguments", "expected", "batch_size"),
    [
        (["my_envs:Broken-v0"], "a deliberate failure", "2"),
        pytest.param(["my_envs:Failing-v0"], "a deliberate failure", "2", marks=pytest.mark.slow),
        (["my_envs:Failing-v0"], "a deliberate failure", "1"),
        (["my_envs:Ending-v0", "--backend", "process"], "SIGKILL", "1"),
        (["CartPole-v1", "--policy", "my_policies:broken"], "the policy raised ValueError: no idea", "1"),
    ],
)
def test_what_fails_while_it_runs_is_said_in_one_line(here, arguments, expected, batch_size):
    done = run_command("run", *arguments, "--num-envs", "2", "--batch-size", batch_size, cwd=here)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert expected in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["my_envs:Failing-v0"], pytest.param(["CartPole-v1", "--policy", "my_policies:broken"], marks=pytest.mark.slow)],
)
def test_traceback_shows_where_it_failed(here, arguments):
    done = run_command("run", *arguments, "--num-envs", "2", "--traceback", cwd=here)
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "in _fail" in done.stderr or "in broken" in done.stderr


@pytest.mark.parametrize("batch_size", ["4", pytest.param("2", marks=pytest.mark.slow)])
def test_ctrl_c_ends_with_the_summary_one_line_and_130(batch_size):
    process = start_cli(
        *("run", "CartPole-v1", "--num-envs", "4", "--batch-size", batch_size, "--seconds", "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    read_until(process.stdout, "env-steps/s")
    os.killpg(process.pid, signal.SIGINT)
    begun_s = time.monotonic()
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert time.monotonic() - begun_s < DEADLINE_S
    assert (process.returncode, stderr) == (130, "stepmill: interrupted\n")
    assert ", interrupted" in stdout
    assert members_of(process.pid) == []


def test_ctrl_c_while_the_envs_start_leaves_nothing():
    process = start_cli("run", "CartPole-v1", "--num-envs", "64", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    read_until(process.stdout, "starting")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stderr) == (130, "stepmill: interrupted\n")
    assert members_of(process.pid) == []


def test_ctrl_c_while_a_dataclass_is_made_ends_with_130_too(here):
    (here / "interrupted.py").write_text(
        "import sys\n"
        "from stepmill.cli import commands, main\n"
        "commands.dispatch = lambda arguments: exec('raise KeyboardInterrupt')\n"
        "sys.exit(main.main([]))\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=here, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stepmill: interrupted\n")


def test_sigterm_closes_the_pool():
    process = start_cli("run", "CartPole-v1", "--seconds", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    read_until(process.stdout, "env-steps/s")
    process.terminate()
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stderr) == (143, "")
    assert members_of(process.pid) == []


def test_a_closed_pipe_ends_the_run_in_silence():
    process = start_cli("run", "CartPole-v1", "--seconds", "60", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(DEADLINE_S), stderr) == (1, "")
    assert members_of(process.pid) == []
