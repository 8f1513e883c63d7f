"""Rewards of any shape, agents and which of them are alive, and parts of the info that have a fixed shape."""

from __future__ import annotations

import os
import signal
import warnings
from functools import partial

import numpy as np
import pytest

import stepmill
from stepmill.pool.port import PoolPort
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import DictNode, Leaf, Opaque
from tests.harness.agents import ACTION, F32, F64, I64, Agents, Fate, FixedInfo, Guests, VectorReward
from tests.harness.pools import begun, make_pool

MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A-20")
@pytest.mark.parametrize(("dtype", "shape"), [(F64, (2,)), (F32, (2,)), (F32, ()), (F64, (2, 1)), (F64, (1,))])
def test_rewards_have_the_shape_and_dtype_that_the_env_declares(pool_of, dtype, shape):
    pool = pool_of([partial(VectorReward, 3, dtype, shape)] * 3)
    assert not pool.reset(seed=0).reward.any()
    batch = pool.step([5, 6, 7])
    assert batch.reward.shape == (3, *shape)
    assert batch.reward.dtype == dtype
    assert batch.reward.tolist() == [np.resize([1.0, action], shape).tolist() for action in (5, 6, 7)]
    pool.send([8], [2])
    assert pool.recv(1).reward.tolist() == [np.resize([2.0, 8], shape).tolist()]


@MODES
def test_returns_have_the_shape_of_the_reward(pool_of, mode):
    pool = begun(pool_of([partial(VectorReward, 2, F32), partial(VectorReward, 3, F32)], autoreset_mode=mode))
    pool.step([1, 1])
    episode = pool.step([2, 2]).info["episode"]
    assert episode["r"].tolist() == [[1 + 2, 1 + 2], [0, 0]]
    assert episode["l"].tolist() == [2, 0]
    assert episode["_r"].tolist() == [True, False]


def test_the_shortest_way_hands_out_vector_rewards_too(pool_of):
    pool = begun(pool_of([VectorReward] * 2))
    assert PoolPort(pool).step_fast(np.array([1, 2]))[1].tolist() == [[1, 1], [1, 2]]


def test_a_reward_of_another_shape_is_the_envs_fault_and_named(pool_of):
    class Wrong(VectorReward):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return (obs, reward[:1] if action == 9 else reward, *rest)

    pool = begun(pool_of([Wrong] * 2))
    with pytest.raises(stepmill.BadOutput, match=r"env 1 gave a wrong .*reward has shape \(1,\).*says \(2,\)"):
        pool.step([1, 9])
    pool.reset()


# ---- agents ----------------------------------------------------------------------------------------------------------


def test_each_agent_has_a_reward_and_flags_of_its_own(pool_of):
    pool = pool_of([Agents] * 2)
    first = pool.reset(seed=0)
    assert first.alive.tolist() == [[True] * 3] * 2
    assert first.reward.tolist() == [[0.0] * 3] * 2
    one = pool.step([[10, 10, 10], [20, 20, 20]])
    assert one.reward.tolist() == [[10, 11, 12], [20, 21, 22]]
    assert one.terminated.tolist() == [[True, False, False]] * 2
    assert one.alive.tolist() == [[False, True, True]] * 2
    two = pool.step(np.ones((2, 3), int))
    assert two.reward.tolist() == [[0, 2, 3]] * 2
    assert two.truncated.tolist() == [[False, True, False]] * 2
    assert two.alive.tolist() == [[False, False, True]] * 2
    assert two.env_id.tolist() == [0, 1]
    assert len(tuple(two)) == 5  # Gymnasium's five values


@MODES
def test_the_episode_is_over_when_no_agent_is_alive(pool_of, mode):
    pool = begun(pool_of([Agents, partial(Agents, (Fate(9),) * 3)], autoreset_mode=mode))
    act = np.ones((2, 3), int)
    for _ in range(2):
        assert "episode" not in pool.step(act).info
    last = pool.step(act)
    assert last.terminated[0].tolist() == [False, False, True]
    assert last.info["episode"]["r"].tolist() == [[1, 2 + 2, 3 + 3 + 3], [0, 0, 0]]
    assert last.info["episode"]["l"].tolist() == [3, 0]
    if mode == "SameStep":
        assert last.info["final_obs"][0].tolist() == [0, 0, 3]
        assert last.alive.tolist() == [[True] * 3] * 2  # of the next episode
    else:
        assert last.alive.tolist() == [[False] * 3, [True] * 3]
    if mode == "Disabled":
        with pytest.raises(stepmill.UsageError, match=r"episodes of envs \[0\] are over"):
            pool.step(act)
        pool.reset(env_ids=[0])
    elif mode == "NextStep":
        again = pool.step(act)
        assert again.alive.tolist() == [[True] * 3] * 2
        assert again.reward.tolist() == [[0, 0, 0], [1, 2, 3]]
    assert pool.get_attr("num_resets") == (2, 1)
    assert pool.step(act).terminated[0].tolist() == [True, False, False]


@pytest.mark.covers("G-18")
def test_agents_come_and_go_as_the_env_says_and_no_episode_ends(pool_of):
    pool = pool_of([Guests] * 2)
    assert pool.reset(seed=0).alive.tolist() == [[False, True, True]] * 2
    for t in range(1, 8):
        batch = pool.step(np.ones((2, 3), int))
        assert batch.alive.tolist() == [[(t + a) % 3 != 0 for a in range(3)]] * 2
        assert batch.terminated.tolist() == [[(t + a) % 3 == 0 for a in range(3)]] * 2
    assert pool.get_attr("num_resets") == (1, 1)


def test_an_open_env_goes_on_when_no_agent_is_present(pool_of):
    pool = begun(pool_of([partial(Guests, 1)]))
    alive = [pool.step([[1]]).alive[0, 0] for _ in range(6)]
    assert alive == [True, True, False, True, True, False]
    assert pool.get_attr("num_resets") == (1,)


def test_overlapped_resets_and_budgets_know_agents(pool_of):
    pool = begun(pool_of([Agents] * 2, resets={"overlap": True}, num_episodes=2))
    act = np.ones((2, 3), int)
    for _ in range(7):
        batch = pool.step(act)
    assert pool.exhausted.all()
    assert not batch.alive.any()
    assert pool.get_attr("num_resets") == (2, 2)


def test_an_exhausted_env_has_no_living_agents(pool_of):
    pool = begun(pool_of([partial(Agents, (Fate(1), Fate(1))), partial(Agents, (Fate(5), Fate(5)))], num_episodes=1))
    pool.step(np.ones((2, 2), int))
    batch = pool.step(np.ones((2, 2), int))
    assert batch.alive.tolist() == [[False, False], [True, True]]
    assert batch.reward.tolist() == [[0, 0], [1, 2]]


@pytest.mark.parametrize("where", ["fork"])
def test_when_the_worker_dies_the_living_agents_are_truncated(pool_of, where):
    pool = begun(pool_of([partial(Agents, (Fate(1), Fate(50), Fate(50)))] * 2, num_workers=2, on_fault="truncate"))
    act = np.ones((2, 3), int)
    pool.step(act)
    os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
    batch = pool.step(act)
    while not batch.truncated[1].any():
        batch = pool.step(act)
    assert batch.truncated[1].tolist() == [False, True, True]
    assert batch.alive[1].tolist() == [False] * 3
    assert batch.reward[1].tolist() == [0.0] * 3
    assert pool.step(act).alive[1].tolist() == [True] * 3


@pytest.mark.parametrize(
    ("mode", "on_fault"), [("SameStep", "truncate"), ("NextStep", "replay"), ("SameStep", "replay")]
)
def test_agents_that_had_ended_before_a_fault_do_not_end_twice(pool_of, mode, on_fault):
    def raises_at_nine():
        env = Agents((Fate(1), Fate(50), Fate(50)))
        step = env.step
        env.step = lambda action: step(action) if action[0] != 9 else 1 / 0
        return env

    pool = begun(pool_of([raises_at_nine], autoreset_mode=mode, on_fault=on_fault, seeding="per_episode"))
    assert pool.step([[1, 1, 1]]).truncated.tolist() == [[False] * 3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the env raises again in its replay
        batch = pool.step([[9, 1, 1]])
    assert batch.truncated.tolist() == [[False, True, True]]


@pytest.mark.parametrize("where", ["fork"])
def test_episodes_of_agents_are_played_again(pool_of, where):
    env_fns = [partial(Agents, (Fate(2), Fate(50), Fate(50)))] * 2
    pool = begun(pool_of(env_fns, num_workers=2, on_fault="replay", seeding="per_episode"))
    for k in range(4):
        pool.step(np.full((2, 3), k))
    os.kill(pool.stats().workers[1].pid, signal.SIGKILL)
    batch = pool.step(np.full((2, 3), 7))
    assert batch.reward.tolist() == [[0, 8, 9]] * 2
    assert batch.obs.tolist() == [[0, 5, 5]] * 2
    assert "fault" not in batch.info


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out: (*out[:2], [True], *out[3:]), "terminated has 1 items, but the env has 3 agents"),
        (lambda out: (*out[:1], [1.0, 2.0], *out[2:]), r"reward has shape \(2,\).*says \(3,\)"),
        (lambda out: (*out, [True]), "alive has 1 items, but the env has 3 agents"),
        (lambda out: out[:4], "got 4 values"),
    ],
)
def test_what_does_not_fit_the_agents_is_named(pool_of, change, text):
    class Wrong(Agents):
        def step(self, action):
            out = super().step(action)
            return change(out) if action[0] == 9 else out

    pool = begun(pool_of([Wrong] * 2))
    with pytest.raises(stepmill.BadOutput, match=text):
        pool.step([[1, 1, 1], [9, 9, 9]])
    assert pool.recv().env_id.tolist() == [0]


def test_envs_of_a_pool_agree_in_their_agents():
    with pytest.raises(stepmill.UsageError, match=r"env 1 has another .* than env 0"):
        make_pool("serial", [Agents, partial(Agents, (Fate(1),))])
    with pytest.raises(stepmill.UsageError, match="env 1 has another set of agents than env 0"):
        make_pool("serial", [partial(Agents, (Fate(1),)), partial(Agents, (Fate(1),), is_open=True)])


def test_a_gymnasium_vector_env_takes_no_agents():
    with pytest.raises(stepmill.UsageError, match=r"3 agents, but a Gymnasium vector env has one; use stepmill\.Pool"):
        stepmill.VectorEnv([Agents], backend="serial")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"reward": Leaf(I64, ())}, "dtype int64 is not supported"),
        ({"reward": Leaf(F64, (3,)), "agents": ("a", "b")}, r"shape \(3,\), but there are 2 agents"),
        ({"agents": ("a",), "is_batched": True}, "a batched env cannot have agents"),
        ({"info": DictNode((("text", Opaque()),))}, r"\['text'\].* have no fixed size"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(arguments, text):
    with pytest.raises(stepmill.UsageError, match=text):
        EnvSpec(observation=ACTION, action=ACTION, **arguments)


# ---- infos of fixed shape ----------------------------------------------------------------------------------------------


def info_envs(num_envs, length=2):
    return [partial(FixedInfo, identity, length) for identity in range(num_envs)]


@pytest.mark.covers("A-26")
def test_parts_of_fixed_shape_are_arrays_and_the_rest_comes_as_ever(pool_of):
    pool = begun(pool_of(info_envs(3)))
    info = pool.step([0, 0, 0]).info
    assert info["discount"].dtype == F32
    assert info["discount"].tolist() == [0.5] * 3
    assert info["place"].tolist() == [[0, 1], [0, 0], [2, 1]]  # zeros where the env gave none
    assert info["nest"]["count"].tolist() == [1, 1, 1]
    assert "_discount" not in info
    assert info["loose"].tolist() == [1, 0, 1]
    assert info["_loose"].tolist() == [True, False, True]
    assert pool.call("keys")[0] == ["discount", "place", "nest", "loose"]  # the env's own dict is whole


def test_they_are_there_in_every_batch(pool_of):
    pool = pool_of(info_envs(3))
    assert pool.reset(seed=0).info["nest"]["count"].tolist() == [0, 0, 0]
    pool.send([0, 0], [2, 0])
    batch = pool.recv(2)
    place = dict(zip(batch.env_id.tolist(), batch.info["place"].tolist(), strict=True))
    assert place == {2: [2, 1], 0: [0, 1]}
    _, info = PoolPort(pool).reset_rows(np.array([False, False, True]))
    assert info["nest"]["count"].tolist() == [1, 0, 0]


def test_arrays_that_were_handed_out_are_not_written_again(pool_of):
    pool = begun(pool_of(info_envs(2, 50)))
    first = pool.step([0, 0]).info["nest"]["count"]
    pool.step([0, 0])
    assert first.tolist() == [1, 1]


def test_the_last_info_of_an_episode_is_whole(pool_of):
    pool = begun(pool_of(info_envs(1, 1), autoreset_mode="SameStep"))
    info = pool.step([0]).info
    assert info["nest"]["count"].tolist() == [0]  # of the next episode
    assert info["final_info"]["place"].tolist() == [[0, 1]]


def test_a_part_of_another_shape_is_the_envs_fault_and_named(pool_of):
    pool = begun(pool_of(info_envs(2)))
    with pytest.raises(stepmill.BadOutput, match=r"info\['place'\] has shape \(3,\), but its space says \(2,\)"):
        pool.step([0, 9])
