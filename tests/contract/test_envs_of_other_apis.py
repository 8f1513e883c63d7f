"""Envs of dm_env, PettingZoo and old gym, stepped by a pool as they are."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import stepmill
from tests.harness.envs_of_other_apis import Catch, NewerCounter, OldCounter, Pair, Seedless, StackedAgents, Tag
from tests.harness.pools import make_pool


def push(num, turn=1):
    return {"turn": np.full(num, turn), "push": np.full((num, 2), 0.5, np.float32)}


# ---- dm_env ------------------------------------------------------------------------------------------------------------


@pytest.mark.covers("A-26", "G-11")
def test_nests_of_dicts_lists_and_named_tuples_keep_their_structure(pool_of):
    pool = pool_of([Catch] * 3)
    obs = pool.reset().obs
    assert isinstance(obs["pair"], Pair)
    assert isinstance(obs["list"], list)
    obs = pool.step(push(3)).obs
    assert obs["pair"].left.tolist() == [[1, 1]] * 3
    assert obs["pair"].right.dtype == np.int32
    assert obs["list"][0].tolist() == [[0.5]] * 3
    assert obs["list"][1].tolist() == [[True]] * 3


@pytest.mark.parametrize(("last", "terminated"), [(0.0, True), (1.0, False)])
def test_the_last_discount_says_how_an_episode_ended(pool_of, last, terminated):
    pool = pool_of([partial(Catch, 2, last)] * 2)
    assert pool.reset().info["discount"].tolist() == [1, 1]
    one = pool.step(push(2))
    assert one.info["discount"].tolist() == [0.9, 0.9]
    assert one.reward.tolist() == [2.0, 2.0]
    assert one.reward.dtype == np.float32
    two = pool.step(push(2))
    assert two.terminated.tolist() == [terminated] * 2
    assert two.truncated.tolist() == [not terminated] * 2
    assert two.info["discount"].tolist() == [last] * 2
    assert pool.step(push(2)).obs["pair"].right.tolist() == [0, 0]  # the engine resets
    assert pool.step(push(2)).obs["pair"].right.tolist() == [1, 1]


def test_a_dm_env_may_have_a_vector_of_rewards(pool_of):
    pool = pool_of([partial(Catch, reward_shape=(2,))] * 2)
    pool.reset()
    assert pool.step(push(2)).reward.tolist() == [[2.0, 2.0]] * 2


def test_seeds_go_to_the_envs_own_seed_and_attributes_to_the_env(pool_of):
    pool = pool_of([Catch] * 2)
    pool.reset(seed=5)
    assert pool.get_attr("seeds") == ([5], [6])
    pool.set_attr("level", [3, 4])
    assert pool.get_attr("level") == (3, 4)


def test_what_dm_env_has_no_place_for_is_refused(pool_of):
    pool = pool_of([Seedless])
    pool.reset()
    with pytest.raises(stepmill.EnvError, match="takes no seed"):
        pool.reset(seed=1)
    with pytest.raises(stepmill.EnvError, match="takes no reset options"):
        pool.reset(options={"level": 1})


def test_a_gymnasium_vector_env_takes_dm_envs():
    class Flat(Catch):
        def observation_spec(self):
            return super().observation_spec()["pair"].left

        def action_spec(self):
            return super().action_spec()["turn"]

        def observe(self):
            return super().observe()["pair"].left

        def step(self, action):
            return super().step({"turn": action, "push": np.zeros(2)})

    envs = stepmill.VectorEnv([Flat] * 2, backend="serial")
    obs, _ = envs.reset()
    assert envs.single_action_space.n == 3
    assert envs.observation_space.contains(obs)
    assert envs.step(np.array([1, 2]))[1].tolist() == [1, 2]
    envs.close()


# ---- PettingZoo --------------------------------------------------------------------------------------------------------


def act(num, *actions):
    return {f"a_{slot}": np.full(num, action) for slot, action in enumerate(actions)}


@pytest.mark.covers("G-18")
def test_agents_of_a_parallel_env_have_slots_and_leave_when_they_end(pool_of):
    pool = pool_of([partial(Tag, kinds=True)] * 2)
    first = pool.reset(seed=3)
    assert pool.spec.agents == ("a_0", "a_1", "a_2")
    assert first.alive.all()
    assert first.obs["a_2"]["own"].shape == (2, 3)
    pool.step(act(2, 1, 2, 3))
    two = pool.step(act(2, 1, 2, 3))
    assert two.reward.tolist() == [[1, 2, 3]] * 2
    assert two.terminated.tolist() == [[True, False, False]] * 2
    assert two.alive.tolist() == [[False, True, True]] * 2
    three = pool.step(act(2, 4, 2, 3))
    assert three.obs["a_0"]["own"].tolist() == [[0.0]] * 2  # who has left has nothing to show
    assert three.obs["a_1"]["t"].tolist() == [3, 3]
    assert three.reward.tolist() == [[0, 2, 3]] * 2
    assert three.truncated.tolist() == [[False, True, False]] * 2
    assert three.info["a_1"]["t"].tolist() == [3, 3]
    last = pool.step(act(2, 4, 4, 3))
    assert not last.alive.any()
    assert last.info["episode"]["l"].tolist() == [4, 4]
    assert last.info["episode"]["r"].tolist() == [[2, 6, 12]] * 2
    heard = [{"a_0": 1, "a_1": 2, "a_2": 3}] * 2 + [{"a_1": 2, "a_2": 3}, {"a_2": 3}]
    assert pool.get_attr("heard") == (heard, heard)  # the dead are given no actions
    assert pool.step(act(2, 1, 1, 1)).alive.all()
    assert pool.get_attr("resets")[0] == [(3, None), (None, None)]


def test_agents_of_one_kind_may_be_a_dimension(pool_of):
    pool = pool_of([lambda: StackedAgents(Tag(3))] * 2)
    assert pool.reset(seed=0).obs["own"].shape == (2, 3, 2)
    batch = pool.step([[1, 2, 3], [4, 3, 2]])
    assert batch.reward.tolist() == [[1, 2, 3], [4, 3, 2]]
    assert batch.obs["t"].tolist() == [[1, 1, 1]] * 2
    pool.step([[1, 2, 3], [4, 3, 2]])
    assert pool.step([[9, 2, 3], [9, 3, 2]]).obs["own"][:, 0].tolist() == [[0, 0]] * 2
    assert pool.get_attr("heard")[1][-1] == {"a_1": 3, "a_2": 2}


def test_agents_of_different_kinds_cannot():
    with pytest.raises(stepmill.EnvError, match="the agents' spaces cannot be stacked"):
        make_pool("serial", [lambda: StackedAgents(Tag(2, kinds=True))])


def test_agents_must_be_known_beforehand():
    def nameless():
        env = Tag()
        env.possible_agents = []
        return env

    with pytest.raises(stepmill.EnvError, match="has no possible_agents"):
        make_pool("serial", [nameless])


# ---- gym before Gymnasium ----------------------------------------------------------------------------------------------


@pytest.mark.covers("T-5/four", "T-5/five")
@pytest.mark.parametrize("kind", [OldCounter, NewerCounter])
@pytest.mark.parametrize("is_cut", [False, True])
def test_four_values_and_five_say_the_same(pool_of, kind, is_cut):
    pool = pool_of([partial(kind, is_cut=is_cut)] * 2)
    assert pool.reset(seed=3).obs.tolist() == [[0, 0]] * 2
    pool.step([1, 2])
    batch = pool.step([3, 4])
    assert batch.reward.tolist() == [3, 4]
    assert batch.obs.tolist() == [[2, 2]] * 2
    assert batch.terminated.tolist() == [not is_cut] * 2
    assert batch.truncated.tolist() == [is_cut] * 2
    assert pool.step([1, 1]).obs.tolist() == [[0, 0]] * 2


def test_seeds_and_options_go_where_the_api_takes_them(pool_of):
    old, new = pool_of([OldCounter]), pool_of([NewerCounter])
    for pool in (old, new):
        info = pool.reset(seed=3, options={"level": 2}).info
    assert info["fresh"].tolist() == [True]
    assert old.get_attr("log") == ([("seed", 3), ("reset", {"level": 2})],)
    assert new.get_attr("log") == ([(3, {"level": 2})],)


def test_an_env_of_gym_0_26_whose_reset_takes_no_seed_is_reset_without_one(monkeypatch):
    class Bare(OldCounter):
        def reset(self):
            return super().reset()

    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace(__version__="0.26.2"))
    with stepmill.Pool([Bare], backend="serial") as pool:
        assert pool.reset().obs.tolist() == [[0, 0]]
        assert pool.get_attr("log") == ([("reset", {})],)
