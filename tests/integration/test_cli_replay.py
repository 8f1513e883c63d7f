"""`stepmill replay` as a user starts it, on capsules of real faults: exit status, stdout, stderr, and what is imported when."""

from __future__ import annotations

import json
import os
import pickle
import pty
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import stepmill
from stepmill import _native
from stepmill.pool.capsule import read_capsule, write_capsule
from tests.harness import crashing
from tests.harness.commands import run_command
from tests.harness.crashing import CrashingEnv, RestlessEnv, SeedlessFailure, steps
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import begun, make_pool
from tests.harness.scripts import ROOT
from tests.harness.strangers import Bomb

COMMAND = [sys.executable, "-m", "stepmill", "replay"]
DEADLINE_S = 60.0


def crash(folder: Path, actions: list[int], env_fn: Any = CrashingEnv, where: str = "fork", **options: Any) -> str:
    """Make env 1 of a pool fail; return its capsule."""
    options = {"seeding": "per_episode", "crash_dir": folder, **options}
    with make_pool(where, [env_fn] * 2, **options) as pool:
        pool.reset(seed=5)
        with pytest.raises(stepmill.StepmillError):
            _drive(pool, actions)
    return str(next(folder.glob("*.capsule")))


def _drive(pool: stepmill.Pool, actions: list[int]) -> None:
    for row in steps(actions, 2, 1):
        pool.step(row)


def replay(path: str, *arguments: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_command("replay", path, *arguments, cwd=cwd, text=stdin)


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (crashing.RAISE, "raised"),
        (crashing.BAD_OUTPUT, "bad_output"),
        (crashing.SEGFAULT, "died"),
        (crashing.EXIT, "died"),
        (crashing.HANG, "timed_out"),
    ],
)
def test_a_failure_of_the_env_fails_again(action: int, kind: str, tmp_path: Path):
    path = crash(tmp_path, [2, 3, 4, action], step_timeout_s=0.5)
    done = replay(path, "--trust", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (0, "reproduced"), done.stderr
    assert (report["capsule"]["kind"], report["steps"], report["failure"]["step"]) == (kind, 3, 4)
    assert report["divergence"] is None
    assert "capsule" not in report["failure"]["message"]


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_automatic_reset_that_had_no_seed_gets_none_again(mode: str, tmp_path: Path):
    env_fn = partial(SeedlessFailure, 2)
    path = crash(tmp_path, [2, 3, 1], env_fn, autoreset_mode=mode, seeding="continue")
    report = json.loads(replay(path, "--trust", "--json").stdout)
    assert (report["verdict"], report["failure"]["command"]) == ("reproduced", "reset")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_a_failing_automatic_reset_fails_again(mode: str, tmp_path: Path):
    path = crash(tmp_path, [2, crashing.DIE_IN_RESET, 1], autoreset_mode=mode)
    report = json.loads(replay(path, "--trust", "--json").stdout)
    assert (report["verdict"], report["failure"]["command"]) == ("reproduced", "reset")


def test_a_failing_constructor_fails_again(tmp_path: Path):
    with pytest.raises(stepmill.EnvError):
        make_pool("serial", [partial(CrashingEnv, is_broken=True)], crash_dir=tmp_path)
    done = replay(str(next(tmp_path.iterdir())), "--trust")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("reproduced")


def test_an_env_that_was_killed_is_played_to_the_same_place_and_does_not_fail(tmp_path: Path):
    with begun(make_pool("fork", [CrashingEnv] * 2, seeding="per_episode", crash_dir=tmp_path)) as pool:
        _drive(pool, [1] * 30)
        os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
        with pytest.raises(stepmill.WorkerDied):
            _drive(pool, [0, 0])  # the first may have been on its way already
    done = replay(str(next(tmp_path.iterdir())), "--trust", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (1, "not reproduced"), done.stderr
    assert report["steps"] >= 30
    assert report["divergence"] is None


def test_an_env_that_does_not_repeat_itself_is_told_with_the_first_step_that_differs(tmp_path: Path):
    path = crash(tmp_path, [2, crashing.RAISE], RestlessEnv)
    done = replay(path, "--trust")
    assert done.returncode == 0  # it fails again all the same
    assert "the reset is the first that differs from the capsule: observation" in done.stdout


def test_another_failure_is_not_taken_for_the_same(tmp_path: Path):
    path = crash(tmp_path, [2, crashing.RAISE])
    capsule = read_capsule(path)
    other = write_capsule(replace(capsule, error_type="builtins.KeyError"), str(tmp_path), "other")
    assert replay(other, "--trust").returncode == 1
    earlier = {**capsule.arrays, "action.0": capsule.arrays["action.0"][::-1].copy()}
    moved = write_capsule(replace(capsule, arrays=earlier), str(tmp_path), "moved")
    done = replay(moved, "--trust", "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (1, "failed differently")


def _with_pickle(path: str, part: str, folder: Path, **changes: Any) -> str:
    """Write a capsule like another one, of which one part makes a file `ran` when it is loaded; return its path."""
    capsule = read_capsule(path)
    parts = {**capsule.parts, part: _native.encode(Bomb(folder / "ran"), pickle.dumps)}
    return write_capsule(replace(capsule, parts=parts, **changes), str(folder), "hostile")


def test_nothing_is_loaded_before_the_user_trusts_the_file(tmp_path: Path):
    path = crash(tmp_path, [crashing.RAISE])
    hostile = _with_pickle(path, "env_fn", tmp_path)
    for arguments in ([], ["--json"], ["--pdb"]):
        done = replay(hostile, *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("stepmill: ")
        assert done.stderr.count("\n") == 1
        assert "run code of the file (env_fn: <class 'tests.harness.crashing.CrashingEnv'>); add --trust" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["env_fn", "options", "actions", "call", "attribute offset"])
def test_a_pickle_that_the_header_does_not_name_is_not_loaded(part: str, tmp_path: Path):
    facts = {"command": "call", "call": "call"} if part == "call" else {}
    hostile = _with_pickle(crash(tmp_path, [crashing.RAISE]), part, tmp_path, pickled={}, **facts)
    given = ["--env", "tests.harness.crashing:make_whole"] if part != "env_fn" else []
    done = replay(hostile, *given, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "a pickled value is not named in the header" in done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), pytest.param("n\n", 2, marks=pytest.mark.slow), ("\n", 2)])
def test_on_a_terminal_the_user_is_asked(answer: str, status: int, tmp_path: Path):
    path = crash(tmp_path, [2, crashing.RAISE])
    terminal, theirs = pty.openpty()
    try:
        with subprocess.Popen(
            [*COMMAND, path], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            os.write(terminal, answer.encode())
            _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        os.close(terminal)
        os.close(theirs)
    assert process.returncode == status
    assert "  env_fn: <class 'tests.harness.crashing.CrashingEnv'>\n" in said
    assert "Continue? [y/N]" in said


def test_a_capsule_cannot_steer_the_terminal(tmp_path: Path):
    path = crash(tmp_path, [crashing.RAISE])
    steering = "\x1b[2J\x07"
    changes = {
        "made": steering,
        "seed": [steering],
        "message": steering,
        "notes": [steering],
        "pickled": {"env_fn": steering},
    }
    hostile = write_capsule(replace(read_capsule(path), **changes), str(tmp_path), "hostile")
    done = replay(hostile)
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr


def test_a_call_of_a_method_is_asked_for_even_if_the_env_is_given(tmp_path: Path):
    capsule = read_capsule(crash(tmp_path, [crashing.RAISE]))
    parts = {**capsule.parts, "call": _native.encode(("erase", ["/"], {}), None)}
    hostile = write_capsule(replace(capsule, command="call", call="call", parts=parts), str(tmp_path), "hostile")
    done = replay(hostile, "--env", "tests.harness.crashing:make_whole")
    assert done.returncode == 2
    assert "call of the env: ('erase', ['/'], {})" in done.stderr


def test_a_constructor_can_be_given_where_the_capsule_has_none(tmp_path: Path):
    lock = threading.Lock()  # cannot be pickled
    path = crash(tmp_path, [2, crashing.RAISE], lambda: CrashingEnv(5 if lock else 0), where="serial")
    refused = replay(path, "--trust")
    assert refused.returncode == 2
    assert "the env_fn cannot be stored: cannot pickle '_thread.lock' object" in refused.stderr
    assert "--env" in refused.stderr
    done = replay(path, "--env", "tests.harness.crashing:make_whole")
    assert done.returncode == 0, done.stderr


def test_an_env_fn_that_is_not_importable_is_in_the_capsule(tmp_path: Path):
    done = replay(crash(tmp_path, [2, crashing.RAISE], lambda: CrashingEnv()), "--trust")
    assert done.returncode == 0, done.stderr


def test_an_env_with_other_actions_is_refused(tmp_path: Path):
    path = crash(tmp_path, [2, crashing.RAISE])
    done = replay(path, "--env", "tests.harness.crashing:make_other")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the action space of this env is not the one in the capsule" in done.stderr


def test_the_debugger_opens_where_the_env_raised(tmp_path: Path):
    path = crash(tmp_path, [2, 3, crashing.RAISE])
    done = replay(path, "--trust", "--pdb", stdin="p self.count\nq\n")
    assert done.returncode == 0
    assert "raise PlantedBug" in done.stdout
    assert "(Pdb) 2" in done.stdout


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"{}", os.urandom(500)])
def test_rubbish_is_refused_in_one_line(content: bytes, tmp_path: Path):
    (tmp_path / "file").write_bytes(content)
    done = replay(str(tmp_path / "file"), "--trust")
    assert done.returncode == 2
    assert done.stderr.startswith("stepmill: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_a_replay_with_its_own_status(tmp_path: Path):
    path = crash(tmp_path, [crashing.HANG], step_timeout_s=0.5)
    capsule = read_capsule(path)
    # Without a limit of the pool's own a hang gets half a minute; Ctrl-C need not wait for that.
    endless = write_capsule(replace(capsule, pool={**capsule.pool, "step_timeout_s": None}), str(tmp_path), "endless")
    with subprocess.Popen(
        [*COMMAND, endless, "--trust"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 130
    assert said == "stepmill: interrupted\n"
