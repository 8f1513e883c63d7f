"""The front-end for ALF: what FastParallelEnvironment returns, how it resets, and what can be asked of it."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.frontends.alf import BatchEnvironmentWrapper
from tests.harness.alf_envs import (
    FIRST,
    LAST,
    MID,
    AlfCounter,
    FaultyAlf,
    GatedAlf,
    NestedAlf,
    RandomAlf,
    Reference,
    actions,
    assert_same,
)

# ---- what it returns --------------------------------------------------------------------------------------------------


@pytest.mark.covers("A-8", "A-10", "G-16/cases")
def test_a_hundred_steps_are_those_of_the_envs_stepped_one_by_one(env_of):
    env, reference = env_of([RandomAlf] * 2), Reference([RandomAlf] * 2)
    assert env.seed([0, 1]) == reference.seed([0, 1]) == [0, 10]
    one, other = env.reset(), reference.reset()
    for _ in range(100):
        assert_same(one, other)
        one, other = env.step(one.prev_action), reference.step(other.prev_action)


@pytest.mark.covers("A-6", "A-16", "A-19")
def test_six_envs_are_the_same_as_three_workers_with_two_each(env_of):
    def batch(env_id):
        return BatchEnvironmentWrapper([RandomAlf(env_id=2 * env_id + i) for i in range(2)])

    pairs, reference = env_of([batch] * 3), Reference([RandomAlf] * 6)
    assert (pairs.batch_size, pairs.num_envs, pairs.batched) == (6, 3, True)
    pairs.seed([0, 1, 2])  # the wrapper gives its env i the seed 2 s + i
    reference.seed(list(range(6)))
    one, other = pairs.reset(), reference.reset()
    for _ in range(100):
        assert_same(one, other)  # each env resets itself, in the middle of its worker's batch
        one, other = pairs.step(one.prev_action), reference.step(other.prev_action)


@pytest.mark.covers("A-26")
def test_nests_of_any_depth_and_dtype_arrive_as_they_are(env_of):
    env, reference = env_of([NestedAlf] * 2, num_workers=1), Reference([NestedAlf] * 2)
    assert_same(env.reset(), reference.reset())
    action = {
        "move": np.array([[1, 2], [3, 4]], np.float32),
        "jump": (np.array([5, 6]), [np.array([[7], [8]], np.int32)]),
    }
    for _ in range(5):
        assert_same(env.step(action), reference.step(action))
    assert env.step(action).untransformed == ()


@pytest.mark.covers("A-9")
def test_results_are_not_written_again_while_they_are_kept(env_of):
    env = env_of([AlfCounter] * 2, num_workers=1)
    kept = [env.reset()] + [env.step(actions(2)) for _ in range(12)]
    assert [time_step.observation[0, 2] for time_step in kept] == [0, 1, 2, 3] * 3 + [0]


@pytest.mark.covers("A-14")
def test_env_id_is_the_slot_and_every_result_has_its_own(env_of):
    env = env_of([partial(AlfCounter, length=2)] * 3)
    env.reset().env_id[:] = 7
    for _ in range(4):
        time_step = env.step(actions(3))
        assert time_step.env_id.tolist() == [0, 1, 2]
        assert time_step.env_id.dtype == np.int32


@pytest.mark.covers("A-1", "A-3", "A-20")
def test_it_says_what_it_is(env_of):
    env = env_of([AlfCounter] * 2, blocking=True, flatten=False)
    here = AlfCounter()
    assert (env.batched, env.batch_size, env.num_envs, env.num_spare_envs_for_reload) == (True, 2, 2, 0)
    assert (env.num_tasks, env.task_names, env.is_tensor_based) == (2, ["count", "more"], False)
    for name in ("observation_spec", "action_spec", "reward_spec", "time_step_spec", "env_info_spec"):
        assert getattr(env, name)() == getattr(here, name)()
        assert getattr(env.envs[1], name)() == getattr(here, name)()
    assert env.metadata == AlfCounter.metadata
    frame, mode = env.render()
    assert (frame.tolist(), mode) == (np.zeros((2, 2, 3)).tolist(), "rgb_array")
    assert env.envs[1].render("human")[1] == "human"


def test_a_batched_env_of_one_row_is_allowed(env_of):
    env = env_of([lambda env_id: BatchEnvironmentWrapper([AlfCounter(env_id)])] * 2)
    env.reset()
    assert env.step(actions(2)).observation.shape == (2, 4)


@pytest.mark.covers("A-2")
def test_constructors_are_given_their_numbers_and_run_elsewhere(env_of):
    env = env_of([AlfCounter] * 3)
    results = env.call_envs_with_same_args("whoami")
    assert [made_with for made_with, *_ in results] == [0, 1, 2]
    pids = {pid for _, pid, *_ in results}
    assert len(pids) == 3  # a process each
    assert os.getpid() not in pids
    shared = env_of([AlfCounter] * 4, num_workers=2)
    assert len({pid for _, pid, *_ in shared.call_envs_with_same_args("whoami")}) == 2


# ---- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A-10", "A-27/time_step")
def test_the_first_step_and_the_first_look_reset(env_of):
    env = env_of([AlfCounter] * 2)
    assert env.step(actions(2)).step_type.tolist() == [FIRST, FIRST]
    assert env.step(actions(2)).observation[:, 2].tolist() == [1, 1]
    other = env_of([AlfCounter] * 2)
    assert other.current_time_step().step_type.tolist() == [FIRST, FIRST]
    newest = other.step(actions(2))
    assert other.current_time_step() is newest


@pytest.mark.covers("A-B11")
def test_a_discount_says_whether_the_end_was_a_time_limit():
    from stepmill.envs.alf import AlfEnvMaker

    makers = [AlfEnvMaker(partial(AlfCounter, length=1, discount=discount), i) for i, discount in enumerate((0.0, 1.0))]
    with stepmill.Pool(makers, backend="thread", num_workers=2) as pool:
        pool.reset()
        batch = pool.step(actions(2))
        assert (batch.terminated.tolist(), batch.truncated.tolist()) == ([True, False], [False, True])
        assert batch.reward.tolist() == [1, 1]
        pool.send(actions(1), env_ids=[1])  # a step of some envs, which ALF does not have
        assert pool.recv().obs.step_type.tolist() == [FIRST]
        assert pool.reset(env_ids=[0]).obs.step_type.tolist() == [FIRST]


@pytest.mark.covers("A-11")
def test_a_finished_env_is_reset_before_anybody_asks(env_of, gate):
    env = env_of([partial(GatedAlf, reset_gate=gate.path, free_resets=1, length=1)] * 2)
    env.reset()
    assert env.step(actions(2)).step_type.tolist() == [LAST, LAST]
    gate.wait_arrivals(2)  # both resets have begun, and no step has been asked for
    gate.open(2)
    assert env.step(actions(2)).step_type.tolist() == [FIRST, FIRST]


@pytest.mark.covers("A-B12")
def test_an_explicit_reset_takes_the_early_one_and_does_not_repeat_it(env_of, tmp_path, gate):
    env = env_of([partial(GatedAlf, reset_gate=gate.path, free_resets=1, length=1, folder=tmp_path)])
    env.reset()
    env.step(actions(1))
    gate.wait_arrivals(1)
    gate.open(1)
    time_step = env.reset()
    assert time_step.observation[0].tolist() == [0, 2, 0, 0]
    assert (tmp_path / "resets").read_bytes() == b".."


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_an_episode_that_a_fault_cuts_short_ends_without_the_reward_before(env_of, how):
    env = env_of([partial(FaultyAlf, how=how), AlfCounter], on_fault="truncate")
    env.reset()
    assert env.step(actions(2)).reward.tolist() == [1, 1]
    cut = env.step(np.array([13, 1], np.float32))
    assert cut.step_type.tolist() == [LAST, MID]
    assert cut.reward.tolist() == [0, 2]
    assert env.step(actions(2)).step_type.tolist() == [FIRST, LAST]
    env.close()
