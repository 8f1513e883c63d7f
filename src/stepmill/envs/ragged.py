"""Envs whose agents join and leave: any number up to a capacity, each identified by a number.

A subclass of `RaggedEnv` returns the observations of the agents that are present after each step, as a dict by agent id. In
the slab each agent has a slot while it is present: observations and actions are [B, A, ...], where A is the capacity,
`batch.alive` says which slots are in use, `batch.info["agent_id"]` has the agent of each slot (-1 if there is none), and
`batch.players` has one row per agent that is present.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.envs.agent_stacking import row_of, stack, stack_values, zeros
from stepmill.envs.env_adapter import EnvAdapter
from stepmill.envs.gymnasium import tree_of
from stepmill.spec.batch import AGENT_ID, NO_AGENT
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf

ByAgent = Mapping[int, Any]


class RaggedEnv(ABC):
    """The base class of envs whose agents join and leave.

    Attributes:
        capacity: how many agents may be present at once, including those whose episode ended in the newest step.
        single_observation_space, single_action_space: the spaces of one agent.
        is_open: True if new agents can join at any time. If False, the episode is over when no agent is present.
    """

    capacity: int
    single_observation_space: spaces.Space[Any]
    single_action_space: spaces.Space[Any]
    is_open: bool = True
    metadata: ClassVar[Mapping[str, Any]] = {}
    render_mode: str | None = None

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[ByAgent, Mapping[str, Any]]:
        """Begin an episode; return (observations of the agents that are present, by agent id, info)."""

    @abstractmethod
    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, Mapping[str, Any]]:
        """Step the env; return (observations, rewards, terminated, truncated, info), all by agent id except the info.

        Args:
            actions: the actions of the agents that are present, by agent id.
        Returns:
            Observations of the agents that are present now, and of those whose episode ended in this step. An agent
            without an observation has left. Missing rewards count as 0, and missing flags as False.
        """


class AgentSlots:
    """Assigns slots to agents. An agent has the same slot until it leaves; a new agent gets the lowest free slot."""

    def __init__(self, capacity: int) -> None:
        self.agents: NDArray[np.int64] = np.full(capacity, NO_AGENT, np.int64)  # [A]

    def assign(self, agents: Iterable[int]) -> dict[int, int]:
        """Return the slot of each of these agents, and free the slots of all others.

        Raises:
            UsageError: there are more agents than slots.
        """
        present = [int(agent) for agent in agents]
        capacity = len(self.agents)
        if len(present) > capacity:
            raise UsageError(
                f"{len(present)} agents are present at once, but the env's capacity is {capacity}; set a larger capacity"
            )
        if any(agent < 0 for agent in present):
            raise UsageError(f"agent ids {sorted(present)} must be 0 or more, since {NO_AGENT} means no agent")
        self.agents[~np.isin(self.agents, present)] = NO_AGENT
        for agent in present:
            if agent not in self.agents:
                self.agents[np.flatnonzero(self.agents == NO_AGENT)[0]] = agent
        return {int(agent): slot for slot, agent in enumerate(self.agents) if agent != NO_AGENT}


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a ragged env."""
    known: Any = env
    if not isinstance(known.capacity, int) or known.capacity < 1:
        raise UsageError(f"capacity of {known} is {known.capacity!r}; set it to how many agents may be present at once")
    observation = tree_of(known.single_observation_space, "single_observation_space")
    action = tree_of(known.single_action_space, "single_action_space")
    return EnvSpec(
        observation=stack([observation] * known.capacity),
        action=stack([action] * known.capacity),
        agents=tuple(range(known.capacity)),
        is_open=known.is_open,
        info=DictNode(((AGENT_ID, Leaf(np.dtype(np.int64), (known.capacity,))),)),
        render_mode=known.render_mode,
        metadata=dict(known.metadata),
        spaces=pickle.dumps((known.single_observation_space, known.single_action_space)),
    )


class RaggedAgents(EnvAdapter):
    """Steps a ragged env for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._observation = tree_of(self.env.single_observation_space, "")
        self._action = tree_of(self.env.single_action_space, "")
        self._zero_observation = zeros(self._observation)
        self._slots = AgentSlots(self.env.capacity)
        self._alive = np.zeros(self.env.capacity, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> Any:
        """Begin an episode; return (observations, info, flags of the agents that are alive)."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._slots = AgentSlots(self.env.capacity)
        slots = self._slots.assign(obs)
        self._alive = self._row(dict.fromkeys(obs, True), slots, np.bool_)
        return self._fill(obs, slots), {**info, AGENT_ID: self._slots.agents.copy()}, self._alive

    def step(self, action: Any) -> Any:
        """Step the env with the actions of the agents that are present. Hot path."""
        agents = self._slots.agents
        actions = {int(agents[slot]): row_of(self._action, action, int(slot)) for slot in np.flatnonzero(self._alive)}
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        slots = self._slots.assign(obs)
        ends = [self._row(flags, slots, np.bool_) for flags in (terminated, truncated)]
        is_present = self._row(dict.fromkeys(obs, True), slots, np.bool_)
        self._alive = is_present & ~ends[0] & ~ends[1]
        reward = self._row(rewards, slots, np.float64)
        full_info = {**info, AGENT_ID: self._slots.agents.copy()}
        return self._fill(obs, slots), reward, *ends, full_info, self._alive

    def _row(self, values: ByAgent, slots: Mapping[int, int], dtype: Any) -> NDArray[Any]:
        row = np.zeros(len(self._slots.agents), dtype)
        for agent, value in values.items():
            if agent not in slots:
                raise KeyError(
                    f"agent {agent} has a reward or a flag but no observation; return one for its last step too"
                )
            row[slots[agent]] = value
        return row

    def _fill(self, obs: ByAgent, slots: Mapping[int, int]) -> Any:
        values = [self._zero_observation] * len(self._slots.agents)
        for agent, value in obs.items():
            values[slots[agent]] = value
        return stack_values(self._observation, values)


adapt = RaggedAgents
