"""What Gymnasium tests of its own vector envs, in our words, on every backend."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from stepmill.frontends.gymnasium.errors import ClosedVectorEnvError
from stepmill.testing.envs import CountingEnv, ImageEnv, SeedRecorder
from stepmill.testing.gates import GATED_ACTION, GateEnv
from tests.harness.gym_envs import (
    WordEnv,
    WordSpace,
    cartpoles,
)
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.pools import assert_equal, begun

# ---------------------------------------------------------------- shape of the results


def test_it_is_a_gymnasium_vector_env(vector_env_of):
    envs = vector_env_of(cartpoles(4))
    assert isinstance(envs, gymnasium.vector.VectorEnv)
    assert envs.num_envs == 4
    assert envs.unwrapped is envs
    assert "VectorEnv" in repr(envs)
    assert "num_envs=4" in repr(envs)


def test_custom_spaces_travel_as_tuples(vector_env_of):
    envs = vector_env_of([WordEnv] * 4)
    assert isinstance(envs.single_action_space, WordSpace)
    assert isinstance(envs.action_space, spaces.Tuple)
    assert envs.reset()[0] == ("reset",) * 4
    observations, *_ = envs.step(("action-2", "action-3", "action-5", "action-7"))
    assert observations == ("step(action-2)", "step(action-3)", "step(action-5)", "step(action-7)")


# ---------------------------------------------------------------- metadata, rendering, calls, attributes


def test_metadata_of_the_envs_is_left_alone(vector_env_of):
    one = vector_env_of(cartpoles(1), autoreset_mode=AutoresetMode.NEXT_STEP)
    other = vector_env_of(cartpoles(1), autoreset_mode=AutoresetMode.SAME_STEP)
    assert one.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert other.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    env = cartpoles(1)[0]()
    assert "autoreset_mode" not in env.metadata
    env.close()


def test_render_returns_a_frame_of_each_env(vector_env_of):
    envs = vector_env_of([partial(CountingEnv, i, render_mode="rgb_array") for i in range(3)])
    assert envs.render_mode == "rgb_array"
    envs.reset(seed=0)
    frames = envs.render()
    assert isinstance(frames, tuple)
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 16, 32]
    assert vector_env_of(cartpoles(2)).render_mode is None


def test_call_reaches_methods_and_attributes_through_wrappers(vector_env_of):
    envs = vector_env_of(cartpoles(4))
    assert envs.call("gravity") == (9.8, 9.8, 9.8, 9.8)
    assert envs.get_attr("gravity") == (9.8, 9.8, 9.8, 9.8)
    assert envs.call("get_wrapper_attr", "length") == (0.5, 0.5, 0.5, 0.5)


def test_set_attr_takes_one_value_or_one_for_each(vector_env_of):
    envs = vector_env_of(cartpoles(4))
    envs.set_attr("gravity", [9.81, 3.72, 8.87, 1.62])
    assert envs.get_attr("gravity") == (9.81, 3.72, 8.87, 1.62)
    envs.set_attr("gravity", 1.0)
    assert envs.get_attr("gravity") == (1.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="4"):
        envs.set_attr("gravity", [1.0, 2.0])


def test_seeds_of_the_envs_can_be_read(vector_env_of):
    envs = vector_env_of(cartpoles(4))
    assert envs.np_random_seed == (0, 1, 2, 3)
    envs.reset(seed=42)
    assert envs.np_random_seed == (42, 43, 44, 45)
    envs.reset(seed=None)
    assert envs.np_random_seed == (42, 43, 44, 45)
    assert all(isinstance(rng, np.random.Generator) for rng in envs.np_random)


# ---------------------------------------------------------------- asynchronous halves


def test_waiting_for_what_was_not_asked_is_an_error(vector_env_of):
    envs = vector_env_of(cartpoles(2))
    with pytest.raises(stepmill.UsageError, match="reset_async"):
        envs.reset_wait()
    envs.reset()
    with pytest.raises(stepmill.UsageError, match="step_async"):
        envs.step_wait()
    with pytest.raises(stepmill.UsageError, match="call_async"):
        envs.call_wait()


def test_the_asynchronous_halves_do_what_the_whole_does(vector_env_of):
    halves, whole = vector_env_of(cartpoles(3)), vector_env_of(cartpoles(3))
    halves.reset_async(seed=1)
    assert_equal(halves.reset_wait(), whole.reset(seed=1))
    action = np.array([0, 1, 0])
    halves.step_async(action)
    assert_equal(halves.step_wait(), whole.step(action))
    halves.call_async("gravity")
    assert halves.call_wait() == whole.call("gravity")


@pytest.mark.parametrize("where", ["thread", "fork"])
@pytest.mark.parametrize(
    ("what", "arguments", "expected"),
    [
        ("reset", {"options": {"gate": True}}, [[0, 1, 0], [1, 1, 0]]),
        ("step", {"actions": np.full(2, GATED_ACTION)}, [[0, 0, 1], [1, 0, 1]]),
        ("call", {"name": "wait_here"}, (0, 1)),
    ],
    ids=["reset", "step", "call"],
)
def test_what_takes_too_long_times_out_and_is_not_lost(vector_env_of, what, arguments, expected, gate):
    envs = begun(vector_env_of([partial(GateEnv, gate.path, i) for i in range(2)]))
    getattr(envs, f"{what}_async")(**arguments)
    gate.wait_arrivals(2)
    wait = getattr(envs, f"{what}_wait")
    with pytest.raises(TimeoutError):
        wait(timeout=0.01)
    gate.open(2)
    result = wait(timeout=HANG_GUARD_S)
    assert result == expected if what == "call" else result[0].tolist() == expected
    if what == "step":
        assert result[1].tolist() == [GATED_ACTION, GATED_ACTION]
    envs.close()


def test_options_with_numbers_as_keys_reach_each_env_whole(vector_env_of):
    envs = vector_env_of([SeedRecorder] * 2)
    options = {0: {"level": 1}, 1: {"level": 2}}
    envs.reset(options=options)
    envs.reset(options={**options, "reset_mask": np.array([False, True])})
    envs.reset_async(options=options)
    envs.reset_wait()
    assert envs.get_attr("options") == ([options] * 2, [options] * 3)


def test_use_after_close_is_an_error_and_closing_twice_is_not(vector_env_of):
    envs = vector_env_of(cartpoles(2))
    envs.close()
    envs.close()
    step, call = partial(envs.step, np.array([0, 0])), partial(envs.call, "gravity")
    for use in (envs.reset, envs.step_wait, envs.call_wait, envs.render, step, call):
        with pytest.raises(ClosedVectorEnvError, match="was called after close"):
            use()


# ---------------------------------------------------------------- partial resets and actions


@pytest.mark.covers("G-6")
def test_with_copies_a_partial_reset_repeats_observations_that_the_program_has_overwritten(vector_env_of):
    """As in Gymnasium. Without `copy=True`, there is no other copy of a lent observation: docs/results.md."""
    seen = []
    for make in (SyncVectorEnv, partial(vector_env_of, copy=True)):
        envs = make([partial(ImageEnv, identity) for identity in range(4)], autoreset_mode=AutoresetMode.DISABLED)
        envs.reset(seed=1)
        observations, *_ = envs.step(np.zeros(4, np.int64))
        last = observations.copy()
        observations[:] = 255
        partly, _ = envs.reset(options={"reset_mask": np.array([False, True, False, True])})
        assert np.array_equal(partly[::2], last[::2])
        seen.append(partly.copy())
        envs.close()
    assert_equal(*seen)


@pytest.mark.covers("G-9")
def test_a_reset_mask_may_be_a_list(vector_env_of):
    envs = vector_env_of(cartpoles(3), autoreset_mode=AutoresetMode.DISABLED)
    first, _ = envs.reset(seed=0)
    last, *_ = envs.step(np.array([0, 0, 0]))
    options = {"reset_mask": [True, False, False]}
    again, _ = envs.reset(seed=0, options=options)
    assert np.array_equal(again[0], first[0])
    assert np.array_equal(again[1:], last[1:])
    assert options == {"reset_mask": [True, False, False]}


@pytest.mark.parametrize("where", ["thread"])
@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (np.array([True]), r"\(3,\)"),
        (np.array([True, True, False, False]), r"\(3,\)"),
        (np.array([[True, True, True]]), r"\(3,\)"),
        (np.array([False, False, False]), "True"),
        (np.array([1, 1, 0]), "bool"),
        (np.array([1.0, 1.0, 0.0]), "bool"),
        ([True, False, 1], "array"),
        (None, "array"),
    ],
    ids=["short", "long", "2d", "empty", "int", "float", "list", "none"],
)
def test_a_bad_reset_mask_is_refused_and_changes_nothing(vector_env_of, mask, names):
    envs = vector_env_of(cartpoles(3), autoreset_mode=AutoresetMode.DISABLED)
    envs.reset(seed=0, options={"reset_mask": np.array([True, True, True])})
    with pytest.raises((TypeError, ValueError), match=names):
        envs.reset(options={"reset_mask": mask})
    assert envs.step(np.array([0, 0, 0]))[0].shape == (3, 4)
