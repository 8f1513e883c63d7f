"""The front-end for ALF: ProcessEnvironment, one env in a process of its own."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import BatchEnvironmentWrapper, ProcessEnvironment
from stepmill.testing.gates import Gate
from tests.harness.alf_envs import AlfCounter, FaultyAlf, GatedAlf, NestedAlf, RandomAlf, assert_same
from tests.harness.pools import keep_closed


@pytest.fixture
def env_of():
    def make(constructor, **arguments):
        env = ProcessEnvironment(constructor, **arguments)
        env.start()
        return env

    yield from keep_closed(make)


@pytest.mark.covers("A-21")
def test_close_does_not_hang_after_the_start_nor_after_steps(env_of, tmp_path):
    ProcessEnvironment(AlfCounter).close()
    env = ProcessEnvironment(partial(AlfCounter, folder=tmp_path))
    env.start()
    env.close()
    env.close()
    with env_of(partial(AlfCounter, folder=tmp_path)) as env:
        env.reset()
        env.step(np.float32(1))
    assert (tmp_path / "closed").read_bytes() == b".."


def test_its_time_steps_are_the_envs_own(env_of):
    for constructor in (RandomAlf, NestedAlf):
        env, here = env_of(constructor), constructor()
        one, other = env.reset(), here.reset()
        for _ in range(20):
            assert_same(one, other)
            one, other = env.step(one.prev_action), here.step(other.prev_action)


def test_a_batched_env_keeps_its_rows(env_of):
    def pair(env_id):
        return BatchEnvironmentWrapper([AlfCounter(i) for i in range(2)])

    env, here = env_of(pair), pair(0)
    assert_same(env.reset(), here.reset())
    action = np.array([3, 4], np.float32)
    assert_same(env.step(action), here.step(action))


@pytest.mark.covers("A-17", "A-B3")
def test_promises_of_steps_and_calls_do_not_mix(env_of):
    env = env_of(AlfCounter, env_id=7)
    first = env.reset(blocking=False)
    calls = [env.call("whoami", i) for i in range(3)]
    second = env.step(np.float32(5), blocking=False)
    third = env.call("step", np.float32(6))
    assert third().observation.tolist() == [7, 1, 2, 6]
    assert calls[2]()[2] == (2,)
    assert second().observation.tolist() == second().observation.tolist() == [7, 1, 1, 5]
    assert first().step_type == 0
    assert [call()[2] for call in calls] == [(0,), (1,), (2,)]


@pytest.mark.covers("A-18", "A-20")
def test_specs_attributes_and_frames_are_those_of_the_env(env_of):
    env, here = env_of(AlfCounter, env_id=3, flatten=True, fast=True, num_envs=5, name="x"), AlfCounter(3)
    for name in ("observation_spec", "action_spec", "reward_spec", "time_step_spec", "env_info_spec"):
        assert getattr(env, name)() == getattr(here, name)()
    assert env.made_with == 3
    assert env.render("rgb_array")[0].tolist() == here.render("rgb_array")[0].tolist()
    env.sync_progress({"steps": 9})
    assert env.progress == {"steps": 9}
    with pytest.raises(AttributeError, match="no_such_thing"):
        env.no_such_thing  # noqa: B018


@pytest.mark.covers("A-4")
def test_starting_need_not_wait_for_the_env():
    with Gate() as gate, ProcessEnvironment(partial(GatedAlf, make_gate=gate.path)) as env:
        env.start(wait_to_start=False)
        gate.wait_arrivals(1)
        gate.open(1)
        env.wait_start()
        assert env.reset().step_type == 0


def test_a_batched_env_resets_all_rows_first_and_keeps_its_time_step_as_in_alf():
    env = BatchEnvironmentWrapper([AlfCounter(i) for i in range(2)])
    assert env.current_time_step() is None
    first = env.step(np.array([3, 4], np.float32))
    assert first.step_type.tolist() == [0, 0]
    assert env.current_time_step() is first
    assert env.step(np.array([3, 4], np.float32)) is env.current_time_step()
    env.sync_progress()


@pytest.mark.covers("A-1")
def test_use_out_of_turn_is_an_assertion_error():
    env = ProcessEnvironment(AlfCounter)
    for use in (env.reset, env.wait_start, env.action_spec, lambda: env.made_with, lambda: env.step(1)):
        with pytest.raises(AssertionError, match=r"Run ProcessEnvironment\.start\(\) first"):
            use()
    env.start()
    with pytest.raises(AssertionError, match=r"Cannot start\(\) ProcessEnvironment multiple times"):
        env.start()
    env.close()
    with pytest.raises(AssertionError, match="Unrecognized start method 'x'"):
        ProcessEnvironment(AlfCounter, start_method="x")
    with pytest.raises(AssertionError, match="Unrecognized start method 'x'"):  # by position, as in ALF
        ProcessEnvironment(AlfCounter, 0, False, False, 0, 1, "x", "name")


@pytest.mark.covers("A-22", "A-B8")
@pytest.mark.parametrize("phase", ["init", "reset", "step"])
def test_what_the_env_raises_is_raised_here(phase):
    def use(env):
        env.start()
        env.reset()
        env.step(np.float32(13))

    with ProcessEnvironment(partial(FaultyAlf, phase=phase), env_id=0) as env:
        with pytest.raises(RuntimeError, match=f"failed in {phase}") as caught:
            use(env)
        assert isinstance(caught.value, stepmill.EnvError)
        assert "in fail" in caught.value.remote_traceback


def test_a_failed_step_is_raised_by_its_promise_and_the_env_can_be_reset(env_of):
    env = env_of(FaultyAlf)
    env.reset()
    promise = env.step(np.float32(13), blocking=False)
    assert env.reset().step_type == 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed in step"):
            promise()
    assert env.step(np.float32(1)).step_type == 1


def test_an_override_of_call_gets_steps_and_resets():
    names = []

    class Noted(ProcessEnvironment):
        def call(self, name, *args, **keywords):
            names.append(name)
            return super().call(name, *args, **keywords)

    env = Noted(AlfCounter, 0)
    env.start()
    env.reset()
    env.step(np.float32(1))
    env.close()
    assert names == ["reset", "step"]
