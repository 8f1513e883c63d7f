"""What the engine gives a manager of Unity envs: shared memory, batches over workers, timers, the same data every time."""

from __future__ import annotations

import os
import pickle

import cloudpickle
import numpy as np
import pytest

from stepmill import timers
from stepmill.frontends.mlagents import join_steps, split_info
from stepmill.frontends.mlagents.steps import DecisionSteps
from tests.frontends.mlagents.parts import WALK, BatchPolicy, Policy, decide, decided, wait, walking, with_hooks
from tests.harness.unity_envs import ScriptedBehaviors


@pytest.mark.covers("U-B6")
def test_a_policy_that_can_is_asked_once_for_all_workers_that_wait(manager_of, script):
    manager = manager_of(walking(script), 3, is_deterministic=True)
    policy = BatchPolicy()
    manager.set_policy("walk", policy)
    manager.reset()
    steps = manager.get_steps()

    assert policy.batches == [[0, 1, 2]]
    assert policy.asked == []
    assert [decided(step) for step in steps] == [0.0, 1.0, 2.0]


@pytest.mark.covers("U-B6")
def test_agents_of_several_workers_are_joined_and_decisions_split():
    steps = [
        DecisionSteps(
            [np.full((size, 3), size, np.float32)],
            np.zeros(size, np.float32),
            np.arange(size),
            [np.ones((size, 2), bool)],
        )
        for size in (2, 0, 1)
    ]
    joined = join_steps(steps)
    assert joined.obs[0][:, 0].tolist() == [2, 2, 1]
    assert joined.agent_id.tolist() == [0, 1, 0]
    assert joined.action_mask[0].shape == (3, 2)

    infos = split_info(decide(joined, 5.0), steps)
    assert [info.action.shape for info in infos] == [(2, 2), (0, 2), (1, 2)]
    assert [info.env_action.continuous.shape for info in infos] == [(2, 2), (0, 2), (1, 2)]
    assert [list(info.agent_ids) for info in infos] == [[0, 1], [], [0]]
    assert infos[0].outputs == {"number": 5.0}


def measuring(worker_id, channels):
    """An env with a gauge, which counts how often its worker's timers are read."""

    def read():
        env.num_read += 1
        return snapshot()

    env = ScriptedBehaviors(
        WALK, hooks={("step", n): lambda env: timers.gauge("agents", worker_id) for n in range(1, 4)}
    )
    env.num_read, snapshot, timers.snapshot = 0, timers.snapshot, read
    return env


@pytest.mark.covers("U-10/tree", "U-B5", "G-17")
def test_timers_and_gauges_of_all_workers_are_merged_and_travel_only_when_asked_for(manager_of):
    manager = manager_of(measuring, 2, is_deterministic=True)
    manager.set_policy("walk", Policy())
    timers.clear()
    timers.enable()
    manager.reset()
    for _ in range(3):
        manager.get_steps()
    assert manager._pool.get_attr("num_read") == (0, 0)
    tree = manager.get_timer_tree()
    timers.disable()

    assert manager._pool.get_attr("num_read") == (1, 1)
    root = tree["children"]["workers"]["children"]["worker_root"]
    stepped = root["children"]["envs"]["children"]["env.step"]
    assert (stepped["count"], root["is_parallel"], stepped["is_parallel"]) == (6, True, True)
    assert set(stepped) == {"name", "total", "count", "self", "children", "is_parallel"}
    assert tree["children"]["SubprocessEnvManager._take_step"]["count"] == 6  # two workers, three steps
    assert (tree["gauges"]["agents"]["min"], tree["gauges"]["agents"]["max"]) == (0, 1)
    assert tree["gauges"]["agents"]["count"] == 6
    assert "metadata" in tree


@pytest.mark.covers("U-B7")
def test_observations_lie_in_shared_memory_and_pass_through_no_pipe_and_no_pickle(manager_of, script, monkeypatch):
    def refuse(data):
        raise AssertionError("an observation was pickled")

    manager = manager_of(walking(script, shape=(84, 84, 3)), 2, is_deterministic=True)
    manager.reset()  # specs are sent once, as pickles
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(cloudpickle, "loads", refuse)
    for step in manager.get_steps():
        agents = step.current_all_step_result["walk"]
        assert (agents[0] if isinstance(agents, tuple) else agents).obs[0].shape[1:] == (84, 84, 3)
    overflows = [os.fstat(fd).st_size for fd in manager._pool._runtime.slab.fds[2::2]]
    assert overflows == [0, 0]


@pytest.mark.covers("U-B10")
def test_in_deterministic_mode_all_workers_answer_in_their_order_whichever_is_fastest(started_of, script, gate):
    manager = started_of(with_hooks(script, 0, {("step", 1): wait(gate.path)}), 3, is_deterministic=True)
    gate.open()
    assert [step.worker_id for step in manager.get_steps()] == [0, 1, 2]
    assert [step.worker_id for step in manager.get_steps()] == [0, 1, 2]


@pytest.mark.covers("U-B10")
def test_workers_are_seeded_one_by_one(manager_of, script):
    def factory(worker_id, channels, seed):
        env = script(WALK)
        env.drawn = (seed, int(np.random.randint(1 << 30)))  # noqa: NPY002 - what is seeded
        return env

    drawn = [manager_of(factory, 2, seed=seed)._pool.get_attr("drawn") for seed in (5, 5, 9)]

    assert [seed for seed, _ in drawn[0]] == [5, 6]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


@pytest.mark.covers("U-B10", "U-1/processes")
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_how_workers_start_can_be_chosen(manager_of, context):
    manager = manager_of(walking(ScriptedBehaviors), 1, context=context)
    assert manager.reset() == 1
