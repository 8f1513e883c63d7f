"""Envs of other libraries' APIs for tests of adapters: dm_env, PettingZoo, and gym before Gymnasium."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces

dm_env = pytest.importorskip("dm_env")  # these two have no wheels for CPython 3.15
ParallelEnv = pytest.importorskip("pettingzoo").ParallelEnv
StackedAgents = import_module("stepmill.envs.pettingzoo").StackedAgents
specs = dm_env.specs


class Pair(NamedTuple):
    left: Any
    right: Any


class Catch(dm_env.Environment):
    """Counts to `length`; then the discount is `last_discount`. Observation: a dict, a list, a named tuple, a scalar."""

    def __init__(self, length: int = 2, last_discount: float = 0.0, reward_shape: tuple[int, ...] = ()) -> None:
        self.length, self.last_discount, self.reward_shape = length, last_discount, reward_shape
        self.t = 0
        self.level = 0
        self.seeds: list[int] = []
        self.num_closed = 0

    def seed(self, number):
        self.seeds.append(number)

    def observation_spec(self):
        return {
            "pair": Pair(specs.Array((2,), np.float32), specs.BoundedArray((), np.int32, 0, 9)),
            "list": [specs.Array((1,), np.float64), specs.Array((1,), bool)],
        }

    def action_spec(self):
        return {"turn": specs.DiscreteArray(3), "push": specs.BoundedArray((2,), np.float32, -1.0, 1.0)}

    def reward_spec(self):
        return specs.Array(self.reward_shape, np.float32)

    def observe(self):
        return {
            "pair": Pair(np.full(2, self.t, np.float32), np.int32(self.t)),
            "list": [np.array([self.t / 2]), np.array([self.t % 2 == 1])],
        }

    def reset(self):
        self.t = 0
        return dm_env.restart(self.observe())

    def step(self, action):
        assert isinstance(action["turn"], np.integer)
        self.t += 1
        reward = np.float32(action["turn"] + action["push"].sum())
        if self.reward_shape:
            reward = np.full(self.reward_shape, reward)
        if self.t == self.length:
            return dm_env.TimeStep(dm_env.StepType.LAST, reward, self.last_discount, self.observe())
        return dm_env.transition(reward, self.observe(), 0.9)

    def close(self):
        self.num_closed += 1


class Seedless(Catch):
    seed = None


class Tag(ParallelEnv):
    """Agent a_i leaves at step i + 2: the first terminated, the others truncated. `kinds`: each has a space of its own."""

    metadata = {"name": "tag"}
    render_mode = None

    def __init__(self, num_agents: int = 3, *, kinds: bool = False) -> None:
        self.possible_agents = [f"a_{i}" for i in range(num_agents)]
        self.agents: list[str] = []
        self.kinds = kinds
        self.t = 0
        self.heard: list[dict[str, int]] = []
        self.resets: list[tuple[Any, Any]] = []

    def observation_space(self, agent):
        size = 1 + (self.possible_agents.index(agent) if self.kinds else 1)
        return spaces.Dict({"own": spaces.Box(-9, 99, (size,), np.float32), "t": spaces.Discrete(100)})

    def action_space(self, agent):
        return spaces.Discrete(5)

    def observe(self, agents):
        return {
            agent: {"own": np.full(self.observation_space(agent)["own"].shape, self.t, np.float32), "t": self.t}
            for agent in agents
        }

    def reset(self, seed=None, options=None):
        self.resets.append((seed, options))
        self.t = 0
        self.agents = self.possible_agents[:]
        return self.observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.heard.append({agent: int(action) for agent, action in actions.items()})
        acting = self.agents
        self.t += 1
        leaves = {agent: self.t == i + 2 for i, agent in enumerate(self.possible_agents) if agent in acting}
        self.agents = [agent for agent in acting if not leaves[agent]]
        rewards = {agent: float(actions[agent]) for agent in acting}
        terminated = {agent: leaves[agent] and agent == "a_0" for agent in acting}
        truncated = {agent: leaves[agent] and agent != "a_0" for agent in acting}
        infos = {agent: {"t": self.t} if agent == "a_1" else {} for agent in acting}
        return self.observe(acting), rewards, terminated, truncated, infos


class OldBox:
    """Stands for gym.spaces.Box: the adapter looks at names, and never imports gym."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)


OldBox.__module__, OldBox.__name__, OldBox.__qualname__ = "gym.spaces.box", "Box", "Box"


class OldDiscrete:
    shape: tuple[int, ...] = ()
    dtype = np.dtype(np.int64)


OldDiscrete.__module__, OldDiscrete.__name__, OldDiscrete.__qualname__ = "gym.spaces.discrete", "Discrete", "Discrete"


class GymEnv:
    """Stands for gym.Env."""


GymEnv.__module__, GymEnv.__name__, GymEnv.__qualname__ = "gym.core", "Env", "Env"


class OldCounter(GymEnv):
    """As gym 0.21 had it: four values, `seed()`, and a reset that returns the observation alone and takes keywords."""

    def __init__(self, length: int = 2, *, is_cut: bool = False) -> None:
        self.observation_space, self.action_space = OldBox((2,), np.float32), OldDiscrete()
        self.length, self.is_cut = length, is_cut
        self.log: list[Any] = []
        self.t = 0

    def seed(self, number=None):
        self.log.append(("seed", number))

    def reset(self, **keywords):
        self.log.append(("reset", keywords))
        self.t = 0
        return np.zeros(2, np.float32)

    def step(self, action):
        self.t += 1
        done = self.t == self.length
        info = {"TimeLimit.truncated": self.is_cut} if done else {}
        return np.full(2, self.t, np.float32), float(action), done, info


class NewerCounter(OldCounter):
    """As gym 0.26 had it: five values, and a reset that takes a seed and options and returns an info."""

    def reset(self, *, seed=None, options=None):
        self.log.append((seed, options))
        self.t = 0
        return np.zeros(2, np.float32), {"fresh": True}

    def step(self, action):
        obs, reward, done, info = super().step(action)
        return obs, reward, done and not self.is_cut, done and self.is_cut, info
