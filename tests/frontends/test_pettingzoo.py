"""PettingZoo's parallel envs out of workers, alone and as rows of a vector env."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from pettingzoo.test import api_test, parallel_api_test
from pettingzoo.utils import aec_to_parallel, parallel_to_aec

import stepmill
from stepmill.frontends.pettingzoo import AgentVectorEnv, StepmillParallelEnv
from tests.harness.envs_of_other_apis import Catch, Tag
from tests.harness.pools import BACKENDS, begun

WHERE = {where: BACKENDS[where] for where in ("serial", "fork")}


class Frail(Tag):
    """Raises at its second step, once."""

    is_mended = False

    def step(self, actions):
        if self.t == 1 and not Frail.is_mended:
            Frail.is_mended = True
            raise ValueError("a deliberate failure")
        return super().step(actions)

    def state(self):
        return np.full(2, self.t)


class Seen(Tag):
    """Has a global view, with a space."""

    state_space = gymnasium.spaces.Box(0, 99, (2,), np.int64)

    def state(self):
        return np.full(2, self.t)


class Plain(Tag):
    """Observations are arrays, which PettingZoo's test of AEC envs wants."""

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0, 99, (2,), np.float32)

    def observe(self, agents):
        return {agent: np.full(2, self.t + 1, np.float32) for agent in agents}


class Tight(Tag):
    """Its agents' spaces have different bounds alone."""

    def action_space(self, agent):
        return gymnasium.spaces.Box(0, int(agent[-1]) + 1, (1,), np.float32)


class Careless(Tag):
    """In its second step, `part` of what it returns for agent a_1 is left out, or is a list."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def step(self, actions):
        obs, *outcome, infos = super().step(actions)
        if self.t == 2 and self.part == "observation":
            del obs["a_1"]
        if self.t == 2 and self.part == "info":
            infos["a_1"] = ["t", 2]
        return obs, *outcome, infos


def ones(env):
    return dict.fromkeys(env.agents, 1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kinds", [False, True])
def test_pettingzoos_parallel_test_passes(made, where, kinds):
    parallel_api_test(made(StepmillParallelEnv(partial(Tag, kinds=kinds), **WHERE[where])), num_cycles=30)


def test_pettingzoos_conversions_work_in_both_directions(made):
    env = made(StepmillParallelEnv(Plain, **WHERE["fork"]))
    api_test(parallel_to_aec(env), num_cycles=30)
    turns = made(StepmillParallelEnv(lambda: aec_to_parallel(parallel_to_aec(Tag())), **WHERE["serial"]))
    turns.reset(seed=1)
    assert turns.step(ones(turns))[1] == {"a_0": 1, "a_1": 1, "a_2": 1}


@pytest.mark.covers("G-18")
@pytest.mark.parametrize("where", WHERE)
def test_agents_leave_as_they_do_in_the_env_itself(made, where):
    ours, theirs = made(StepmillParallelEnv(partial(Tag, kinds=True), **WHERE[where])), Tag(kinds=True)
    for _ in range(2):
        assert repr(ours.reset(seed=3)) == repr(theirs.reset(seed=3)).replace("'t': 0", "'t': np.int64(0)")
        while theirs.agents:
            assert ours.agents == theirs.agents
            mine, wanted = ours.step(ones(theirs)), theirs.step(ones(theirs))
            assert mine[1:] == wanted[1:]
            assert {agent: obs["own"].tolist() for agent, obs in mine[0].items()} == {
                agent: obs["own"].tolist() for agent, obs in wanted[0].items()
            }
        assert ours.agents == []


class Joining(Tag):
    """Begins with two agents; the third joins in the first step."""

    def reset(self, seed=None, options=None):
        obs, infos = super().reset(seed, options)
        self.agents = self.agents[:2]
        return tuple({agent: part[agent] for agent in self.agents} for part in (obs, infos))

    def step(self, actions):
        parts = super().step(actions)
        if self.t == 1:
            self.agents.append("a_2")
            joined = self.observe(["a_2"]), {"a_2": 0.0}, {"a_2": False}, {"a_2": False}, {"a_2": {}}
            parts = tuple({**part, **new} for part, new in zip(parts, joined, strict=True))
        return parts


def first_steps(ours, theirs):
    """Return what the first step of two agents returns in each env."""
    for env in (ours, theirs):
        env.reset(seed=3)
    return [env.step({"a_0": 1, "a_1": 1}) for env in (ours, theirs)]


def test_an_agent_that_joins_has_an_observation_at_once(made):
    ours, theirs = made(StepmillParallelEnv(Joining, **WHERE["serial"])), Joining()
    mine, wanted = first_steps(ours, theirs)
    assert ours.agents == theirs.agents == ["a_0", "a_1", "a_2"]
    assert mine[1:] == wanted[1:]
    assert mine[0]["a_2"]["own"].tolist() == wanted[0]["a_2"]["own"].tolist() == [1, 1]
    ours.step(dict.fromkeys(ours.agents, 1))


class Brief(Joining):
    """The third agent joins in the first step, and a time limit ends all in the same step."""

    def step(self, actions):
        obs, rewards, terminated, truncated, infos = super().step(actions)
        self.agents = []
        return obs, {**rewards, "a_2": 7.0}, terminated, dict.fromkeys(truncated, True), {**infos, "a_2": {"n": 1}}


def test_an_agent_that_joins_in_the_step_that_ends_it_is_in_all_results(made):
    ours = made(StepmillParallelEnv(Brief, **WHERE["serial"]))
    mine, wanted = first_steps(ours, Brief())
    assert mine[1:] == wanted[1:]
    assert mine[1]["a_2"] == 7.0
    assert mine[0].keys() == wanted[0].keys()
    assert ours.agents == []


class Reserved(Tag):
    """Its agents have names that are also keys of the engine's infos."""

    def __init__(self):
        super().__init__()
        self.possible_agents = ["fault", "omitted", "agent:fault"]

    def step(self, actions):
        obs, rewards, terminated, truncated, _ = super().step(actions)
        return obs, rewards, terminated, truncated, {agent: {"own": agent} for agent in rewards}


@pytest.mark.parametrize("where", WHERE)
def test_agents_may_be_named_as_keys_of_the_engine(made, where):
    env = begun(made(StepmillParallelEnv(Reserved, **WHERE[where])))
    assert env.step(ones(env))[4] == {agent: {"own": agent} for agent in env.possible_agents}
    envs = begun(made(AgentVectorEnv([Reserved], backend="serial")))
    assert envs.step(np.ones(3, int))[4]["own"].tolist() == env.possible_agents


@pytest.mark.parametrize(("part", "name"), [(1, "reward"), (2, "termination"), (3, "truncation")])
def test_an_agent_that_acted_must_have_a_reward_and_flags(made, part, name):
    class Silent(Tag):
        def step(self, actions):
            parts = super().step(actions)
            del parts[part]["a_1"]
            return parts

    env = begun(made(StepmillParallelEnv(Silent, **WHERE["serial"])))
    with pytest.raises(stepmill.EnvError, match=rf"agents \['a_1'\] acted but have no {name}"):
        env.step(ones(env))


@pytest.mark.parametrize(
    ("part", "words"), [("observation", r"agents \['a_1'\] are alive"), ("info", "info of agent 'a_1' must be a dict")]
)
def test_what_an_env_leaves_out_for_a_living_agent_is_an_error_of_that_env(made, part, words):
    env = begun(made(AgentVectorEnv([Tag, partial(Careless, part)], backend="serial")))
    env.step(np.ones(6, int))
    with pytest.raises(stepmill.EnvError, match=rf"env 1 raised \w+ in step: .*{words}"):
        env.step(np.ones(6, int))


def test_missing_actions_and_actions_of_unknown_agents_are_refused(made):
    env = made(StepmillParallelEnv(Tag, **WHERE["serial"]))
    with pytest.raises(stepmill.UsageError, match=r"no agent is alive; call reset\(\) before"):
        env.step({})
    env.reset()
    with pytest.raises(
        stepmill.UsageError, match=r"missing for agents \['a_2'\], and given for unknown agents \['bob'\]"
    ):
        env.step({"a_0": 1, "a_1": 1, "bob": 1})
    assert len(env.step(ones(env))[1]) == 3
    env.step(ones(env))
    assert env.agents == ["a_1", "a_2"]
    env.step({"a_0": 4, "a_1": 2, "a_2": 3})  # who has gone may be given one: nobody hears it
    assert env.get_attr("heard")[-1] == {"a_1": 2, "a_2": 3}


def test_an_env_that_failed_is_reported_and_can_be_reset(made, monkeypatch):
    monkeypatch.setattr(Frail, "is_mended", False)
    env = begun(made(StepmillParallelEnv(Frail, **WHERE["serial"])))
    env.step(ones(env))
    with pytest.raises(stepmill.EnvError, match="a deliberate failure"):
        env.step({"a_0": 0, "a_1": 0, "a_2": 0})
    assert env.agents == []
    env.reset()
    assert env.state().tolist() == [0, 0]
    assert len(env.agents) == 3


def test_the_state_has_the_space_of_the_env_if_there_is_one(made):
    env = begun(made(StepmillParallelEnv(Seen, **WHERE["fork"])))
    assert env.state_space.contains(env.state())
    assert env.state_space is env.state_space
    assert not hasattr(made(StepmillParallelEnv(Tag, **WHERE["serial"])), "state_space")


def test_what_is_no_parallel_env_is_refused():
    for env_fn in (Catch, lambda: gymnasium.make("CartPole-v1")):
        with pytest.raises(stepmill.UsageError, match="not a parallel env of PettingZoo"):
            StepmillParallelEnv(env_fn, **WHERE["serial"])


# ---- a row per agent ---------------------------------------------------------------------------------------------------


@pytest.mark.covers("G-18")
@pytest.mark.parametrize("backend", ["serial", "thread", "fork"])
def test_rows_are_agents_and_masks_mark_living_agents(made, backend):
    workers = {} if backend == "serial" else {"num_workers": 2}
    envs = made(AgentVectorEnv([Tag] * 2, **BACKENDS[backend], **workers))
    assert (envs.num_envs, envs.num_agents, envs.single_action_space.n) == (6, 3, 5)
    obs, infos = envs.reset(seed=0)
    assert envs.observation_space.contains(obs)
    assert infos["alive"].all()
    alive, rewards, ended, times = [], [], [], []
    for _ in range(5):
        obs, reward, terminated, truncated, infos = envs.step(np.arange(6) % 5)
        assert envs.observation_space.contains(obs)
        alive.append(infos["alive"].tolist())
        rewards.append(reward.tolist())
        ended.append((terminated + 2 * truncated).tolist())
        times.append(obs["own"][:, 0].tolist())
    assert alive == [[1] * 6, [0, 1, 1] * 2, [0, 0, 1] * 2, [0] * 6, [1] * 6]
    assert rewards == [[0, 1, 2, 3, 4, 0]] * 2 + [[0, 1, 2, 0, 4, 0], [0, 0, 2, 0, 0, 0], [0] * 6]
    assert ended == [[0] * 6, [1, 0, 0] * 2, [0, 2, 0] * 2, [0, 0, 2] * 2, [0] * 6]
    assert times == [[1] * 6, [2] * 6, [0, 3, 3] * 2, [0, 0, 4] * 2, [0] * 6]


def test_infos_are_each_agents_own(made):
    envs = begun(made(AgentVectorEnv([Tag] * 2, backend="serial")))
    infos = envs.step(np.zeros(6, int))[4]
    assert infos["t"].tolist() == [0, 1, 0, 0, 1, 0]
    assert infos["_t"].tolist() == [False, True, False] * 2


def test_seeds_are_one_per_env(made):
    envs = made(AgentVectorEnv([Tag] * 2, backend="serial"))
    envs.reset(seed=5)
    assert envs.get_attr("resets") == ([(5, None)], [(6, None)])


def test_gymnasiums_vector_wrappers_go_around_it(made):
    envs = made(gymnasium.wrappers.vector.TransformReward(AgentVectorEnv([Tag], backend="serial"), lambda r: 2 * r))
    envs.reset(seed=1)
    assert envs.step(np.array([1, 2, 3]))[1].tolist() == [2, 4, 6]


def test_a_fault_that_is_truncated_ends_all_agents_of_its_env(made, monkeypatch):
    monkeypatch.setattr(Frail, "is_mended", False)
    envs = begun(
        made(AgentVectorEnv([Frail, Tag], backend="serial", options=stepmill.PoolOptions(on_fault="truncate")))
    )
    envs.step(np.ones(6, int))
    _, _, _, truncated, infos = envs.step(np.ones(6, int))
    assert truncated.tolist() == [True] * 3 + [False] * 3
    assert infos["alive"].tolist() == [False] * 3 + [False, True, True]
    assert infos["fault"]["kind"].tolist() == ["raised"] * 3 + [None] * 3
    assert envs.step(np.ones(6, int))[4]["alive"].tolist() == [True] * 3 + [False, False, True]


def test_what_has_no_rows_of_one_kind_is_refused():
    with pytest.raises(stepmill.EnvError, match="agents' spaces cannot be stacked"):
        AgentVectorEnv([partial(Tag, kinds=True)], backend="serial")
    with pytest.raises(stepmill.UsageError, match="have different bounds"):
        AgentVectorEnv([Tight], backend="serial")
    with pytest.raises(stepmill.UsageError, match="needs autoreset_mode='NextStep'"):
        AgentVectorEnv([Tag], backend="serial", options=stepmill.PoolOptions(autoreset_mode="SameStep"))


def test_actions_of_another_shape_change_nothing(made):
    envs = begun(made(AgentVectorEnv([Tag] * 2, backend="serial")))
    with pytest.raises(stepmill.UsageError, match="one action per row"):
        envs.step(np.zeros((2, 3), int))
    assert envs.step(np.zeros(6, int))[0]["own"][0, 0] == 1
