"""Unity ML-Agents envs (`BaseEnv`) of both API generations, which are distinguished by their methods and not by class.

    0.14, 0.15        get_agent_groups, get_agent_group_spec, get_step_result ─► one batch of agents with a flag `done`
    0.28 and newer    behavior_specs, get_steps ─► agents that need a decision, and agents whose episode ended

An observation is a dict from behaviour to dicts of arrays. The number of agents changes, so that an observation has no fixed
size: it is sent through the slab as an opaque value, without pickling. mlagents_envs itself is never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from stepmill.envs import Steppable
from stepmill.spec.batch import NO_AGENT, Batch, Players
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import Opaque

PAYLOAD_BYTES = 4 << 20  # the space for one step's agents in the slab; larger results take a slower path
DECISION_FIELDS = ("obs", "reward", "agent_id", "action_mask", "group_id", "group_reward")
TERMINAL_FIELDS = ("obs", "reward", "interrupted", "agent_id", "group_id", "group_reward")
BATCH_FIELDS = ("obs", "reward", "done", "max_step", "agent_id", "action_mask")

Agents = dict[str, Any]
"""Fields of a batch of agents by ML-Agents' names for them; obs and action_mask are lists of arrays."""

Results = dict[str, Any]
"""By behaviour: (Agents that need a decision, Agents whose episode ended); in the first generation one Agents of all."""


class Generation(IntEnum):
    """The API of a `BaseEnv`. The values are minor versions of mlagents-envs that have it."""

    GROUPS = 15
    BEHAVIORS = 28


class BaseEnv(Protocol):
    """The methods that both generations have."""

    def step(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def set_actions(self, name: str, action: Any, /) -> None: ...


class ActionTuple:
    """Actions of a behaviour's agents, for envs of the second generation.

    Attributes:
        continuous: [A, continuous size] float32.
        discrete: [A, branches] int32.
    """

    def __init__(self, continuous: NDArray[Any] | None = None, discrete: NDArray[Any] | None = None) -> None:
        self.continuous = self.discrete = np.zeros((0, 0), np.float32)
        if continuous is not None:
            self.add_continuous(continuous)
        if discrete is not None:
            self.add_discrete(discrete)

    def add_continuous(self, continuous: NDArray[Any]) -> None:
        """Set the continuous part. The discrete part is empty unless it was set before."""
        self.continuous = np.asarray(continuous, np.float32)
        if len(self.discrete) != len(self.continuous):
            self.discrete = np.zeros((len(self.continuous), 0), np.int32)

    def add_discrete(self, discrete: NDArray[Any]) -> None:
        """Set the discrete part. The continuous part is empty unless it was set before."""
        self.discrete = np.asarray(discrete, np.int32)
        if len(self.continuous) != len(self.discrete):
            self.continuous = np.zeros((len(self.discrete), 0), np.float32)

    def __repr__(self) -> str:
        return f"ActionTuple(continuous={self.continuous!r}, discrete={self.discrete!r})"


# ---- the adapter -----------------------------------------------------------------------------------------------------


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a Unity env, whose data are all opaque."""
    payload_bytes = env.payload_bytes if isinstance(env, UnityEnv) else PAYLOAD_BYTES
    return EnvSpec(observation=Opaque(), action=Opaque(), payload_bytes=payload_bytes)


def adapt(env: object) -> Steppable:
    """Return the object that the hot loop steps."""
    return cast("Steppable", env if isinstance(env, UnityEnv) else UnityEnv(cast("BaseEnv", env)))


class UnityEnv:
    """A `BaseEnv` with the engine's API, for a `Pool`.

    `reset` and `step` return a dict from behaviour to agents. In the second generation these are a pair of dicts: agents
    that need a decision (obs, reward, agent_id, action_mask, group_id, group_reward) and agents whose episode ended
    (obs, reward, interrupted, agent_id, group_id, group_reward). In the first they are one dict of all agents (obs, reward,
    done, max_step, agent_id, action_mask). Arrays are [A, ...]; A changes from step to step.

    An action is a dict from behaviour to an array [A, ...], or to (continuous, discrete). A behaviour without an action, or
    with an empty one, gets none. Each agent has its own reward and flags; those of the env are 0 and False.
    """

    def __init__(self, env: BaseEnv, *, payload_bytes: int = PAYLOAD_BYTES) -> None:
        self.env = env
        self.payload_bytes = payload_bytes
        self.generation = generation_of(env)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[Results, dict[str, object]]:
        """Reset the simulation. The seed is ignored: a Unity env is seeded by its constructor."""
        self.env.reset()
        return read_results(self.env, self.generation), {}

    def step(self, action: Mapping[str, Any]) -> tuple[Results, float, bool, bool, dict[str, object]]:
        """Set the agents' actions and run the simulation until at least one agent needs a decision."""
        set_agent_actions(self.env, action)
        self.env.step()
        return read_results(self.env, self.generation), 0.0, False, False, {}

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def __getattr__(self, name: str) -> Any:
        # Attributes that this class does not have are the env's.
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


# ---- agents of several envs as one batch -----------------------------------------------------------------------------


def players(batch: Batch, name: str) -> Players:
    """Return the agents of a behaviour in a batch of Unity envs, one row each, including those whose episode ended.

    `slot` is an agent's row in the action of its env, which is its index among the agents that need a decision; NO_AGENT if
    its episode ended. An interrupted episode counts as truncated.

    Raises:
        KeyError: no env of the batch has that behaviour.
    """
    parts = [
        part
        for row, (env_id, results) in enumerate(zip(batch.env_id, batch.obs, strict=True))
        if name in results
        for part in _player_rows(results[name], row, int(env_id))
    ]
    if not parts:
        raise KeyError(f"no env of this batch has a behaviour {name!r}")
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if key != "obs"}
    obs = [np.concatenate(leaves) for leaves in zip(*(part["obs"] for part in parts), strict=True)]
    return Players(obs=obs, **columns)


def _player_rows(agents: Any, row: int, env_id: int) -> Iterator[dict[str, Any]]:
    if isinstance(agents, tuple):
        decision, terminal = agents
        interrupted = np.asarray(terminal["interrupted"], np.bool_)
        yield _player_part(decision, row, env_id, None, None)
        yield _player_part(terminal, row, env_id, ~interrupted, interrupted)
    else:
        done, limit = np.asarray(agents["done"], np.bool_), np.asarray(agents["max_step"], np.bool_)
        yield _player_part(agents, row, env_id, done & ~limit, done & limit)


def _player_part(agents: Agents, row: int, env_id: int, terminated: Any, truncated: Any) -> dict[str, Any]:
    size = len(agents["agent_id"])
    none_of_them = np.zeros(size, np.bool_)
    terminated = none_of_them if terminated is None else terminated
    truncated = none_of_them if truncated is None else truncated
    alive = ~(terminated | truncated)
    return {
        "env_id": np.full(size, env_id, np.int64),
        "agent_id": np.asarray(agents["agent_id"], np.int64),
        "slot": np.where(alive, np.arange(size), NO_AGENT),
        "row": np.full(size, row, np.int64),
        "obs": agents["obs"],
        "reward": np.asarray(agents["reward"]),
        "terminated": terminated,
        "truncated": truncated,
        "alive": alive,
    }


# ---- both generations ------------------------------------------------------------------------------------------------


def generation_of(env: object) -> Generation:
    """Return which of the two APIs an env has.

    Raises:
        UsageError: the env has neither.
    """
    if callable(getattr(env, "get_steps", None)):
        return Generation.BEHAVIORS
    if callable(getattr(env, "get_step_result", None)):
        return Generation.GROUPS
    raise UsageError(
        f"a {type(env).__module__}.{type(env).__qualname__} is not a Unity env: it has neither get_steps (mlagents-envs 0.28) "
        "nor get_step_result (0.15); return a BaseEnv from the env factory"
    )


def read_specs(env: Any, generation: Generation) -> dict[str, Any]:
    """Return the env's own specs of the behaviours, or agent groups, that it has now. It may add more later."""
    if generation is Generation.BEHAVIORS:
        return dict(env.behavior_specs)
    return {name: env.get_agent_group_spec(name) for name in env.get_agent_groups()}


def read_results(env: Any, generation: Generation) -> Results:
    """Return all agents of all behaviours as dicts of arrays."""
    if generation is Generation.BEHAVIORS:
        return {name: _read_pair(*env.get_steps(name)) for name in env.behavior_specs}
    return {name: _read_fields(env.get_step_result(name), BATCH_FIELDS) for name in env.get_agent_groups()}


def _read_pair(decision: object, terminal: object) -> tuple[Agents, Agents]:
    return _read_fields(decision, DECISION_FIELDS), _read_fields(terminal, TERMINAL_FIELDS)


def _read_fields(agents: object, fields: tuple[str, ...]) -> Agents:
    values: Agents = {name: getattr(agents, name, None) for name in fields}
    for name in ("obs", "action_mask"):
        if values.get(name) is not None:
            values[name] = list(values[name])
    return values


def set_agent_actions(env: BaseEnv, actions: Mapping[str, Any]) -> None:
    """Set the actions of each behaviour that has an action for at least one agent."""
    for name, action in actions.items():
        if isinstance(action, tuple):
            if any(part is not None and len(part) for part in action):
                env.set_actions(name, make_action_tuple(*action))
        elif len(action):
            env.set_actions(name, action)


def make_action_tuple(continuous: NDArray[Any] | None, discrete: NDArray[Any] | None) -> object:
    """Return an ActionTuple: that of mlagents_envs if it is loaded, else that of this module."""
    library = sys.modules.get("mlagents_envs.base_env")
    cls = getattr(library, "ActionTuple", ActionTuple)
    made: object = cls(continuous=continuous, discrete=discrete)
    return made
