"""PettingZoo's parallel envs: each of `possible_agents` has a slot, in their order.

Observations and actions are dicts by agent. Rewards and flags are `[A]`, in the order of the slots; who of the agents goes
on is what `env.agents` says after each step. An agent that is not there has an observation of zeros, and reward 0; its
actions are not handed on. Infos are `{agent: info}`, of the agents that gave one.

`StackedAgents(env)` makes it arrays with a dimension for the agents instead, `[A, ...]`, where all have the same spaces.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from stepmill.envs import Steppable
from stepmill.envs.adapted import Adapted
from stepmill.envs.agents import row_of, stack, stack_values, zeros
from stepmill.envs.gymnasium import tree_of
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import MissingExtraError, UsageError
from stepmill.spec.tree import DictNode

try:
    from pettingzoo.utils.env import AECEnv
except ModuleNotFoundError as exc:
    raise MissingExtraError(module="pettingzoo", extra="pettingzoo") from exc


class StackedAgents(Adapted):
    """A parallel env whose agents' observations and actions are to be arrays `[A, ...]`. Return it from an env_fn."""


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return what a parallel env says of itself; `like` itself if that says the same.

    Raises:
        UsageError: its agents are not known beforehand, or cannot be stacked.
    """
    is_stacked = isinstance(env, StackedAgents)
    known: Any = env.env if isinstance(env, StackedAgents) else env
    agents = _agents_of(known)
    observation = [tree_of(known.observation_space(agent), f"observation of {agent!r}") for agent in agents]
    action = [tree_of(known.action_space(agent), f"action of {agent!r}") for agent in agents]
    spec = EnvSpec(
        observation=stack(observation) if is_stacked else DictNode(tuple(zip(agents, observation, strict=True))),
        action=stack(action) if is_stacked else DictNode(tuple(zip(agents, action, strict=True))),
        agents=tuple(agents),
        render_mode=getattr(known, "render_mode", None),
        metadata=dict(getattr(known, "metadata", None) or {}),
        spaces=pickle.dumps(tuple(_space_of(known, name, agents) for name in ("observation_space", "action_space"))),
    )
    return like if like is not None and spec == like else spec


def adapt(env: object) -> Steppable:
    """Return what the hot loop steps."""
    if isinstance(env, StackedAgents):
        return cast("Steppable", _Stacked(env.env))
    return cast("Steppable", ParallelAgents(env))


class ParallelAgents(Adapted):
    """Steps a parallel env for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._agents = _agents_of(self.env)
        self._slot = {agent: slot for slot, agent in enumerate(self._agents)}
        self._nothing = {agent: zeros(tree_of(self.env.observation_space(agent), "")) for agent in self._agents}

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, object, object]:
        """Begin an episode: observations, infos, who is alive."""
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._filled(obs), _infos(infos), self._alive()

    def step(self, action: Any) -> tuple[object, object, object, object, object, object]:
        """Step with the actions of who is alive. Hot path."""
        chosen = {agent: self._action_of(action, agent) for agent in self.env.agents}
        obs, rewards, terminated, truncated, infos = self.env.step(chosen)
        flags = self._row(terminated, np.bool_), self._row(truncated, np.bool_)
        return self._filled(obs), self._row(rewards, np.float64), *flags, _infos(infos), self._alive()

    def _filled(self, obs: Mapping[Any, Any]) -> Any:
        return {agent: obs.get(agent, nothing) for agent, nothing in self._nothing.items()}

    def _action_of(self, action: Any, agent: Any) -> Any:
        return action[agent]

    def _row(self, values: Mapping[Any, Any], dtype: Any) -> Any:
        row = np.zeros(len(self._agents), dtype)
        for agent, value in values.items():
            row[self._slot[agent]] = value
        return row

    def _alive(self) -> Any:
        alive = np.zeros(len(self._agents), np.bool_)
        alive[[self._slot[agent] for agent in self.env.agents]] = True
        return alive


class _Stacked(ParallelAgents):
    """The same with arrays in place of dicts."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        first = self._agents[0]
        self._observation = tree_of(self.env.observation_space(first), "")
        self._action = tree_of(self.env.action_space(first), "")

    def _filled(self, obs: Mapping[Any, Any]) -> Any:
        return stack_values(self._observation, list(super()._filled(obs).values()))

    def _action_of(self, action: Any, agent: Any) -> Any:
        return row_of(self._action, action, self._slot[agent])


def _agents_of(env: Any) -> list[Any]:
    if isinstance(env, AECEnv):
        raise UsageError(
            f"{env} is an AEC env, whose agents act in turn; make it parallel: pettingzoo.utils.aec_to_parallel(env)"
        )
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise UsageError(f"{env} does not name its possible_agents, and each needs a slot; set them in the constructor")
    return agents


def _space_of(env: Any, name: str, agents: Sequence[Any]) -> spaces.Dict:
    return spaces.Dict({str(agent): getattr(env, name)(agent) for agent in agents})


def _infos(infos: Mapping[Any, Any]) -> dict[Any, Any]:
    return {agent: info for agent, info in infos.items() if info}
