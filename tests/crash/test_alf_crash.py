"""The front-end for ALF when envs raise, die or hang."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import FastParallelEnvironment
from stepmill.testing.gates import wait_at
from tests.harness.alf_envs import AlfCounter, FaultyAlf, GatedAlf
from tests.harness.hangs import DEADLINE_S, HANG_GUARD_S
from tests.harness.pools import keep_closed

BAD = np.array([1, 13], np.float32)  # env 1 fails
GOOD = np.array([1, 1], np.float32)


@pytest.fixture
def env_of():
    yield from keep_closed(partial(FastParallelEnvironment, as_tensors=False))


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
