"""Envs whose agents come and go: any number of them up to a capacity, each known by a number of its own.

A subclass of `RaggedEnv` says which agents are there after each step, and what each of them sees, by dicts from agent id.
In the slab each agent has a slot as long as it is there: observations and actions are `[B, A, ...]` with A the capacity,
`batch.alive` says which slots are taken, `batch.info["agent_id"]` by whom (-1: nobody), and `batch.players` has one row
per agent that is really there.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from stepmill.envs import Steppable
from stepmill.envs.adapted import Adapted
from stepmill.envs.agents import row_of, stack, stack_values, zeros
from stepmill.envs.gymnasium import tree_of
from stepmill.spec.batch import AGENT_ID, NO_AGENT
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import DictNode, Leaf

ByAgent = Mapping[int, Any]


class RaggedEnv(ABC):
    """What an env with agents that come and go offers.

    Attributes:
        capacity: how many agents there may be at once, those included that ended in the newest step.
        single_observation_space, single_action_space: of one agent.
        is_open: agents come and go for ever. With False the episode is over when nobody is there.
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
        """Return the observations of who is there, by agent id, and an info."""

    @abstractmethod
    def step(self, actions: ByAgent) -> tuple[ByAgent, ByAgent, ByAgent, ByAgent, Mapping[str, Any]]:
        """Return observations, rewards, terminated, truncated by agent id, and an info.

        Args:
            actions: of who is there, by agent id.
        Returns:
            Observations of who is there now, and of who ended in this step. Who is in none is gone without a word. Of the
            other dicts what is missing is 0 or False.
        """


class SlotBook:
    """Which agent sits in which slot. An agent keeps its slot until it is gone; a newcomer gets the lowest free one."""

    def __init__(self, capacity: int) -> None:
        self.agents: NDArray[np.int64] = np.full(capacity, NO_AGENT, np.int64)  # [A]

    def seat(self, agents: Iterable[int]) -> dict[int, int]:
        """Return the slot of each of these agents; all others are gone.

        Raises:
            UsageError: there are more of them than slots.
        """
        present = [int(agent) for agent in agents]
        capacity = len(self.agents)
        if len(present) > capacity:
            raise UsageError(
                f"{len(present)} agents are there at once, and the env has a capacity of {capacity}; declare a larger capacity"
            )
        if any(agent < 0 for agent in present):
            raise UsageError(f"agent ids {sorted(present)} must be 0 or more: {NO_AGENT} stands for nobody")
        self.agents[~np.isin(self.agents, present)] = NO_AGENT
        for agent in present:
            if agent not in self.agents:
                self.agents[np.flatnonzero(self.agents == NO_AGENT)[0]] = agent
        return {int(agent): slot for slot, agent in enumerate(self.agents) if agent != NO_AGENT}


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return what a ragged env says of itself; `like` itself if that says the same."""
    known: Any = env
    if not isinstance(known.capacity, int) or known.capacity < 1:
        raise UsageError(f"capacity of {known} is {known.capacity!r}; set it to how many agents there may be at once")
    observation = tree_of(known.single_observation_space, "single_observation_space")
    action = tree_of(known.single_action_space, "single_action_space")
    spec = EnvSpec(
        observation=stack([observation] * known.capacity),
        action=stack([action] * known.capacity),
        agents=tuple(range(known.capacity)),
        is_open=known.is_open,
        info=DictNode(((AGENT_ID, Leaf(np.dtype(np.int64), (known.capacity,))),)),
        render_mode=known.render_mode,
        metadata=dict(known.metadata),
        spaces=pickle.dumps((known.single_observation_space, known.single_action_space)),
    )
    return like if like is not None and spec == like else spec


def adapt(env: object) -> Steppable:
    """Return what the hot loop steps."""
    return RaggedAgents(env)


class RaggedAgents(Adapted):
    """Steps a ragged env for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._observation = tree_of(self.env.single_observation_space, "")
        self._action = tree_of(self.env.single_action_space, "")
        self._nothing = zeros(self._observation)
        self._seats = SlotBook(self.env.capacity)
        self._alive = np.zeros(self.env.capacity, np.bool_)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None) -> Any:
        """Begin anew: observations, info, who is alive."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._seats = SlotBook(self.env.capacity)
        slots = self._seats.seat(obs)
        self._alive = self._row(dict.fromkeys(obs, True), slots, np.bool_)
        return self._filled(obs, slots), {**info, AGENT_ID: self._seats.agents.copy()}, self._alive

    def step(self, action: Any) -> Any:
        """Step with the actions of who is there. Hot path."""
        agents = self._seats.agents
        actions = {int(agents[slot]): row_of(self._action, action, int(slot)) for slot in np.flatnonzero(self._alive)}
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        slots = self._seats.seat(obs)
        ends = [self._row(flags, slots, np.bool_) for flags in (terminated, truncated)]
        there = self._row(dict.fromkeys(obs, True), slots, np.bool_)
        self._alive = there & ~ends[0] & ~ends[1]
        reward = self._row(rewards, slots, np.float64)
        own = {**info, AGENT_ID: self._seats.agents.copy()}
        return self._filled(obs, slots), reward, *ends, own, self._alive

    def _row(self, values: ByAgent, slots: Mapping[int, int], dtype: Any) -> NDArray[Any]:
        row = np.zeros(len(self._seats.agents), dtype)
        for agent, value in values.items():
            if agent not in slots:
                raise KeyError(
                    f"agent {agent} has a reward or a flag, and no observation; give one for its last step, too"
                )
            row[slots[agent]] = value
        return row

    def _filled(self, obs: ByAgent, slots: Mapping[int, int]) -> Any:
        values = [self._nothing] * len(self._seats.agents)
        for agent, value in obs.items():
            values[slots[agent]] = value
        return stack_values(self._observation, values)
