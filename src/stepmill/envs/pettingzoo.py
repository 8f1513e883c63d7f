"""PettingZoo's parallel envs: each of `possible_agents` has a slot, in that order.

Observations and actions are dicts by agent. Rewards and flags are arrays [A] in the order of the slots. An agent is alive if
it is in `env.agents` after the step. An absent agent has an observation of zeros and reward 0, and its action is not passed
to the env. An agent that acted must have a reward and both flags; an agent that joins may have none. An agent that joins in the
step that also ends it has its flag, although it was not alive before.

Infos are `{agent: info}` for the agents that have one. The key of an agent whose name is also a key of the engine, such as
"fault", is `info_key(agent)`: "agent:fault".

`StackedAgents(env)` gives arrays [A, ...] in place of the dicts; all agents must then have equal spaces.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from stepmill.envs import Steppable
from stepmill.envs.agent_stacking import row_of, stack, stack_values, zeros
from stepmill.envs.env_adapter import EnvAdapter
from stepmill.envs.gymnasium import tree_of
from stepmill.spec.batch import ENGINE_INFO_KEYS
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.tree import DictNode

with needs_extra("pettingzoo", "pettingzoo"):
    from pettingzoo.utils.env import AECEnv


_PREFIX = "agent:"


class StackedAgents(EnvAdapter):
    """Wraps a parallel env so that its observations and actions are arrays [A, ...]. Return it from an env_fn."""


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a parallel env.

    Raises:
        UsageError: the env has no `possible_agents`, or they cannot be stacked.
    """
    is_stacked = isinstance(env, StackedAgents)
    known: Any = env.env if isinstance(env, StackedAgents) else env
    agents = _agents_of(known)
    observation = [tree_of(known.observation_space(agent), f"observation of {agent!r}") for agent in agents]
    action = [tree_of(known.action_space(agent), f"action of {agent!r}") for agent in agents]
    return EnvSpec(
        observation=stack(observation) if is_stacked else DictNode(tuple(zip(agents, observation, strict=True))),
        action=stack(action) if is_stacked else DictNode(tuple(zip(agents, action, strict=True))),
        agents=tuple(agents),
        render_mode=getattr(known, "render_mode", None),
        metadata=dict(getattr(known, "metadata", None) or {}),
        spaces=pickle.dumps(tuple(_space_of(known, name, agents) for name in ("observation_space", "action_space"))),
    )


def adapt(env: object) -> Steppable:
    """Return the object that the hot loop steps."""
    if isinstance(env, StackedAgents):
        return cast("Steppable", _StackedParallelAgents(env.env))
    return cast("Steppable", ParallelAgents(env))


class ParallelAgents(EnvAdapter):
    """Steps a parallel env for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._agents = _agents_of(self.env)
        self._slot = {agent: slot for slot, agent in enumerate(self._agents)}
        self._zero_observations = {
            agent: zeros(tree_of(self.env.observation_space(agent), "")) for agent in self._agents
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, object, object]:
        """Begin an episode; return (observations, infos, flags of the agents that are alive)."""
        obs, infos = self.env.reset(seed=seed, options=options)
        return self._fill(obs), _infos(infos), self._alive()

    def step(self, action: Any) -> tuple[object, object, object, object, object, object]:
        """Step the env with the actions of the agents that are alive. Hot path."""
        chosen = {agent: self._action_of(action, agent) for agent in self.env.agents}
        obs, rewards, terminated, truncated, infos = self.env.step(chosen)
        for name, values in (("reward", rewards), ("termination", terminated), ("truncation", truncated)):
            if not chosen.keys() <= values.keys():
                missing = [agent for agent in chosen if agent not in values]
                raise ValueError(f"the agents {missing} acted but have no {name}; return one for each agent that acted")
        flags = self._row(terminated, np.bool_), self._row(truncated, np.bool_)
        return self._fill(obs), self._row(rewards, np.float64), *flags, _infos(infos), self._alive()

    def _fill(self, obs: Mapping[Any, Any]) -> Any:
        if missing := [agent for agent in self.env.agents if agent not in obs]:
            raise ValueError(
                f"the agents {missing} are alive but have no observation; return one for each of env.agents"
            )
        return {agent: obs.get(agent, nothing) for agent, nothing in self._zero_observations.items()}

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


class _StackedParallelAgents(ParallelAgents):
    """Like ParallelAgents, with arrays [A, ...] in place of dicts."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        first = self._agents[0]
        self._observation = tree_of(self.env.observation_space(first), "")
        self._action = tree_of(self.env.action_space(first), "")

    def _fill(self, obs: Mapping[Any, Any]) -> Any:
        return stack_values(self._observation, list(super()._fill(obs).values()))

    def _action_of(self, action: Any, agent: Any) -> Any:
        return row_of(self._action, action, self._slot[agent])


def _agents_of(env: Any) -> list[Any]:
    if isinstance(env, AECEnv):
        raise UsageError(
            f"{env} is an AEC env, whose agents act in turn; make it parallel: pettingzoo.utils.aec_to_parallel(env)"
        )
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise UsageError(f"{env} has no possible_agents, and each agent needs a slot; set them in its constructor")
    return agents


def _space_of(env: Any, name: str, agents: Sequence[Any]) -> spaces.Dict:
    return spaces.Dict({str(agent): getattr(env, name)(agent) for agent in agents})


def _infos(infos: Mapping[Any, Any]) -> dict[Any, Any]:
    for agent, info in infos.items():
        if info and not isinstance(info, dict):
            raise TypeError(f"the info of agent {agent!r} must be a dict, got {type(info)}")
    return {info_key(agent): info for agent, info in infos.items() if info}


def info_key(agent: Any) -> Any:
    """Return the key of an agent in the infos: its name, unless that may also be a key of the engine."""
    is_ambiguous = isinstance(agent, str) and (agent in ENGINE_INFO_KEYS or agent.startswith(_PREFIX))
    return f"{_PREFIX}{agent}" if is_ambiguous else agent
