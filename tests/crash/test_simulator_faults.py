"""Faults of simulators of another Python are faults of their envs, on backends with and without processes, and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.simulators.process import SimulatorProcess
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.leaks import adopt_orphans, descendants, is_running, wait_until_gone
from tests.harness.pools import begun, kill_worker, make_pool
from tests.harness.scripts import start_script
from tests.harness.simulators import ENVS, OTHER_PYTHON

WHERE = ["serial", "fork"]


def walk(**kwargs: Any) -> Any:
    return stepmill.foreign(f"{ENVS}:Walk", python=OTHER_PYTHON, **kwargs)


def simulators() -> list[int]:
    """Return the pids of the processes of other interpreters below this one."""
    return [pid for pid in descendants() if b"stepmill_other_side" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.orphans
@pytest.mark.parametrize("where", WHERE)
def test_each_fault_is_raised_with_its_reason_and_a_reset_goes_on(
    where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with begun(make_pool(where, [walk()] * 2, num_workers=2, step_timeout_s=DEADLINE_S)) as pool:
        for fault, reason in (
            ("fail", "raised KeyError in step: 'a deliberate failure'"),
            (
                "die",
                r"process ended with exit status 137 \(128 \+ SIGKILL\); its last lines on stderr: the last words; reset the env",
            ),
            ("leave", "process ended with exit status 7;"),
            ("tell_engine", r"info\['state'\]\['engine'\]\['parts'\]\[0\] is a builtins.object"),
        ):
            with pytest.raises(stepmill.EnvError, match=f"env 0 .*{reason}"):
                pool.step([fault, "move"])
            pool.reset(seed=0)
        for fault in ("hang", "stop"):
            with pytest.raises(stepmill.EnvTimeout, match=f"env 0 took longer than its deadline of {DEADLINE_S:g} s"):
                pool.step([fault, "move"])
            pool.reset(seed=0)
        for harmless in ("fork", "print_much", "fork_for_ever"):
            assert pool.step([harmless, "move"]).reward[0] > 0
        assert "x" * 1000 in capfd.readouterr().err
    assert wait_until_gone(simulators(), timeout_s=HANG_GUARD_S) == []


@pytest.mark.parametrize("where", WHERE)
def test_a_traceback_is_that_of_the_other_interpreter(where: str) -> None:
    with make_pool(where, [walk()]) as pool:
        pool.reset()
        with pytest.raises(KeyError) as caught:
            pool.step(["fail"])
    error = caught.value
    assert isinstance(error, stepmill.EnvError)
    assert "simulator_envs.py" in error.remote_traceback
    assert "other_side" not in error.remote_traceback


@pytest.mark.orphans
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_an_episode_is_replayed_in_a_new_simulator(where: str, fault: str) -> None:
    actions = ["move"] * 4
    results = {}
    for name in ("move", fault):
        options = {"on_fault": "replay", "seeding": "per_episode", "step_timeout_s": DEADLINE_S}
        with make_pool(where, [walk()], **options) as pool:
            pool.set_attr("speed", 2.0)
            first = pool.call("pid")[0]
            pool.reset(seed=5)
            if name != "move":
                pool.step(actions[:1])
                os.kill(first, signal.SIGKILL if fault == "die" else signal.SIGSTOP)
                results[name] = [pool.step(actions[:1]).obs[0] for _ in actions[1:]][-1]
                assert pool.call("pid")[0] != first
            else:
                results[name] = [pool.step(actions[:1]).obs[0] for _ in actions][-1]
    np.testing.assert_array_equal(results["move"], results[fault])


@pytest.mark.parametrize("where", WHERE)
def test_settings_and_calls_are_repeated_in_a_new_simulator(where: str) -> None:
    with make_pool(where, [walk()]) as pool:
        pool.set_attr("speed", 3.0)
        pool.call("mark", "a", times=2)
        pool.reset(seed=0)
        with pytest.raises(stepmill.EnvError, match="SIGKILL"):
            pool.step(["die"])
        pool.reset(seed=0)
        assert pool.get_attr("speed") == (3.0,)
        assert pool.get_attr("marks") == (["a", "a"],)


@pytest.mark.orphans
def test_a_simulator_ends_with_its_worker() -> None:
    with begun(make_pool("fork", [walk()] * 2, num_workers=1)) as pool:
        pool.step(["fork_for_ever", "move"])
        before = simulators()
        kill_worker(pool)
        assert wait_until_gone(before, timeout_s=HANG_GUARD_S) == []


@pytest.mark.orphans
@pytest.mark.parametrize("where", WHERE)
def test_nothing_is_left_of_a_program_that_is_killed(where: str) -> None:
    adopt_orphans()
    source = f"""
        import sys
        from tests.harness.pools import make_pool
        from tests.crash.test_simulator_faults import walk
        pool = make_pool({where!r}, [walk()])
        pool.reset(seed=0)
        pool.step(["fork_for_ever"])
        pool.send(["hang"]) if {where!r} != "serial" else None
        print("ready", flush=True)
        sys.stdin.read()
    """
    with start_script(source) as program:
        assert program.stdout.readline() == "ready\n", program.stderr and program.stderr.read()
        below = descendants(program.pid)
        assert len(below) >= 3
        program.kill()
        program.wait()
        assert wait_until_gone([pid for pid in below if is_running(pid)], timeout_s=HANG_GUARD_S) == []


@pytest.mark.parametrize(
    ("python", "make", "reason"),
    [
        ("/no/such/python", "Walk", "'/no/such/python' cannot be started: .*No such file.*; give python= the path"),
        ("/bin/true", "Walk", "'/bin/true' ended with exit status 0 before it ran stepmill's program; it has printed"),
        (["sh", "-c", "echo no such image >&2; exit 125"], "Walk", "exit status 125 before .* no such image; .* run -i"),
        ([sys.executable, "-S"], "Walk", "has no NumPy, which stepmill needs there; install it: .* -m pip install numpy"),
        (OTHER_PYTHON, "no_such_package:make", "raised ModuleNotFoundError in construct: No module named 'no_such_pack"),
        (OTHER_PYTHON, "no_such_function", "raised AttributeError in construct: .* has no attribute 'no_such_function'"),
        (OTHER_PYTHON, "fail", "raised ValueError in construct: no such level"),
    ],
)  # fmt: skip
def test_a_simulator_that_cannot_begin_says_what_to_do(python: Any, make: str, reason: str) -> None:
    name = make if ":" in make else f"{ENVS}:{make}"
    with pytest.raises(stepmill.EnvError, match=reason):
        stepmill.Pool([stepmill.foreign(name, python=python)], backend="serial")


@pytest.mark.parametrize(
    ("python", "make", "reason"),
    [
        (["sh", "-c", "echo waiting for the X server >&2; sleep 600"], "Walk", "begin to run stepmill's program in 0.9 s"),
        (OTHER_PYTHON, "wait", "'.*:wait' in 0.9 s"),
    ],
)  # fmt: skip
@pytest.mark.orphans
@pytest.mark.parametrize("where", WHERE)
def test_a_simulator_that_does_not_begin_in_time_is_ended(where: str, python: Any, make: str, reason: str) -> None:
    with pytest.raises(stepmill.StepmillError, match=reason if where == "serial" else "start.timeout_s"):
        make_pool(where, [stepmill.foreign(f"{ENVS}:{make}", python=python)], start={"timeout_s": 1.0})


def test_the_answer_to_an_interrupted_step_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    env = begun(walk()())
    pid = env.pid()
    is_sent, receive = threading.Event(), SimulatorProcess._receive

    def receive_and_tell(process: SimulatorProcess) -> Any:
        is_sent.set()
        return receive(process)

    def interrupt() -> None:
        is_sent.wait()  # an interrupt of a request that is being sent ends the process
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            os.sched_yield()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(SimulatorProcess, "_receive", receive_and_tell)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        env.step("stop")
    thread.join()
    os.kill(pid, signal.SIGCONT)
    np.testing.assert_array_equal(env.mark(np.arange(1000)), [np.arange(1000)])
    env.close()


def test_what_a_command_prints_before_the_program_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    loud = ["sh", "-c", 'echo a banner; exec "$0" "$@"', *OTHER_PYTHON]
    with begun(stepmill.Pool([stepmill.foreign(f"{ENVS}:Walk", python=loud)], backend="serial")) as pool:
        assert pool.step(["move"]).reward[0] > 0
    assert "a banner" in capfd.readouterr().err
