"""The front-end for ALF when envs raise, die, hang or are interrupted."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import FastParallelEnvironment
from stepmill.testing.gates import Gate, wait_at
from tests.harness import leaks
from tests.harness.alf_envs import AlfCounter, FaultyAlf, GatedAlf
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.scripts import start_script

BAD = np.array([1, 13], np.float32)  # env 1 fails
GOOD = np.array([1, 1], np.float32)


@pytest.fixture
def env_of():
    made = []

    def make(constructors, **arguments):
        made.append(FastParallelEnvironment(constructors, as_tensors=False, **arguments))
        return made[-1]

    yield make
    for env in made:
        start = time.monotonic()
        env.close()
        assert time.monotonic() - start < HANG_GUARD_S


@pytest.mark.covers("A-22", "A-B2")
def test_an_env_that_raises_is_named_and_a_reset_brings_all_back(env_of):
    env = env_of([FaultyAlf] * 2)
    env.reset()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ProcessEnvironment is interruptted: env 1") as caught:
            env.step(BAD)
        assert isinstance(caught.value, stepmill.EnvError)
        assert "failed in step" in caught.value.remote_traceback
        assert env.reset().step_type.tolist() == [0, 0]
        assert env.step(GOOD).step_type.tolist() == [1, 1]


@pytest.mark.covers("A-B2")
def test_steps_after_a_failure_are_refused_and_nothing_hangs(env_of):
    env = env_of([FaultyAlf] * 2)
    env.reset()
    with pytest.raises(RuntimeError):
        env.step(BAD)
    for _ in range(5):  # more than ALF's queues hold
        with pytest.raises(stepmill.UsageError):
            env.step(GOOD)
    assert env.envs[0].made_with == 0


@pytest.mark.covers("A-22", "A-B8")
@pytest.mark.parametrize("phase", ["init", "reset"])
def test_a_failure_before_the_first_step_is_named(env_of, phase):
    with pytest.raises(RuntimeError, match=f"failed in {phase}") as caught:
        env_of([partial(FaultyAlf, phase=phase, only=1)] * 2).reset()
    assert isinstance(caught.value, stepmill.EnvError)
    assert caught.value.env_id == 1
    assert "in fail" in caught.value.remote_traceback


@pytest.mark.covers("A-B1", "A-B2")
@pytest.mark.parametrize("phase", ["step", "reset"])
def test_a_process_that_is_killed_is_reported_at_once(env_of, phase):
    env = env_of([partial(FaultyAlf, how="kill", phase=phase, only=1)] * 2)
    start = time.monotonic()
    if phase == "step":
        env.reset()
    with pytest.raises(RuntimeError, match="interruptted: worker 1 was ended by SIGKILL") as caught:
        env.step(BAD)  # which resets, if that was not done
    assert time.monotonic() - start < HANG_GUARD_S
    assert isinstance(caught.value, stepmill.WorkerDied)
    assert caught.value.env_ids == (1,)
    if phase == "step":
        assert env.reset().step_type.tolist() == [0, 0]


@pytest.mark.covers("A-B1")
def test_a_process_killed_between_steps_is_reported_and_replaced(env_of):
    env = env_of([AlfCounter] * 2)
    env.reset()
    pid = env.envs[0].call("whoami")()[1]
    os.kill(pid, signal.SIGKILL)
    assert not leaks.wait_until_gone([pid], timeout_s=HANG_GUARD_S)
    with pytest.raises(stepmill.WorkerDied):
        env.step(GOOD)
    assert env.reset().step_type.tolist() == [0, 0]
    assert env.step(GOOD).reward.tolist() == [1, 1]


@pytest.mark.covers("A-B1")
def test_an_env_that_hangs_is_ended_at_its_deadline(env_of, gate):
    options = stepmill.PoolOptions(step_timeout_s=DEADLINE_S)
    env = env_of([partial(GatedAlf, step_gate=gate.path)] * 2, options=options)
    env.reset()
    with pytest.raises(RuntimeError, match="env 1 took longer than its deadline") as caught:
        env.step(np.array([1, 99], np.float32))
    assert isinstance(caught.value, stepmill.EnvTimeout)
    assert env.reset().step_type.tolist() == [0, 0]


@pytest.mark.covers("A-B6", "A-24")
def test_a_process_that_is_replaced_knows_the_progress(env_of):
    env = env_of([FaultyAlf, partial(FaultyAlf, how="kill")])
    env.sync_progress({"steps": 5})
    env.reset()
    with pytest.raises(RuntimeError):
        env.step(BAD)
    env.reset()
    assert [handle.progress for handle in env.envs] == [{"steps": 5}] * 2


@pytest.mark.covers("A-B1", "A-22")
def test_faults_can_be_repaired_instead(env_of):
    options = stepmill.PoolOptions(on_fault="truncate")
    env = env_of([FaultyAlf, partial(FaultyAlf, how="kill")], options=options)
    env.reset()
    env.step(GOOD)
    assert env.step(BAD).reward.shape == (2,)
    assert env.step(GOOD).step_type[1] == 0


INTERRUPTED = """
import os
import sys
os.setpgid(0, 0)
from functools import partial
from pathlib import Path
from pathlib import Path
import numpy as np
from stepmill.frontends.alf import FastParallelEnvironment
from tests.harness.alf_envs import GatedAlf

env = FastParallelEnvironment([partial(GatedAlf, step_gate=Path(sys.argv[1]))] * 2, as_tensors=False)
env.reset()
try:
    env.step(np.full(2, 99, np.float32))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.covers("A-B1", "A-22")
def test_ctrl_c_is_heard_while_a_step_waits_and_children_are_silent():
    with Gate() as gate, start_script(INTERRUPTED, str(gate.path), interpreter=()) as program:
        gate.wait_arrivals(2)
        os.killpg(program.pid, signal.SIGINT)
        out, errors = program.communicate(timeout=HANG_GUARD_S)
    assert (out, program.returncode) == ("interrupted\n", 0)
    assert "Traceback" not in errors


KILLED = """
import sys
from stepmill.frontends.alf import FastParallelEnvironment
from tests.harness.alf_envs import AlfCounter
env = FastParallelEnvironment([AlfCounter] * 2, as_tensors=False)
env.reset()
print("running", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.orphans
@pytest.mark.covers("A-B9")
def test_nothing_is_left_of_a_learner_that_is_killed():
    before = set(os.listdir("/dev/shm"))
    with start_script(KILLED) as learner:
        assert learner.stdout.readline() == "running\n"
        pids = leaks.descendants(learner.pid)
        learner.kill()
        learner.wait()
        assert leaks.wait_until_gone(pids, timeout_s=HANG_GUARD_S) == []
    new = set(os.listdir("/dev/shm")) - before  # this machine may run more than this test
    assert not [name for name in new if "stepmill" in name or any(str(pid) in name for pid in (learner.pid, *pids))]


class StuckAtClose(AlfCounter):
    """Its `close` waits for a gate that is never opened."""

    def __init__(self, env_id: int, *, path: Path) -> None:
        super().__init__(env_id)
        self.path = path

    def close(self) -> None:
        wait_at(self.path)


@pytest.mark.covers("A-B10/close")
def test_close_ends_envs_that_do_not_close_all_in_the_same_two_seconds(gate):
    env = FastParallelEnvironment([partial(StuckAtClose, path=gate.path)] * 8, as_tensors=False)
    env.reset()
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="did not stop within"):
        env.close()
    assert time.monotonic() - start < 15  # less than two seconds for each of eight
    gate.wait_arrivals(1)
