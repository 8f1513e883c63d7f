"""Runs PettingZoo's parallel envs: one as a `ParallelEnv` in a worker, or many as a vector env with one row per agent.

    from stepmill.frontends.pettingzoo import AgentVectorEnv, StepmillParallelEnv
    env = StepmillParallelEnv(make_env)          # dicts by agent
    envs = AgentVectorEnv([make_env] * 64)       # 64 x A rows, for learners whose agents share their parameters

Convert AEC envs with `pettingzoo.utils.aec_to_parallel`, and the result back with `pettingzoo.utils.parallel_to_aec`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode as GymnasiumAutoreset
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from stepmill.envs.agent_stacking import zeros
from stepmill.envs.pettingzoo import StackedAgents, info_key
from stepmill.frontends.batch_rows import stack_rows, view_row
from stepmill.frontends.pool_options import options_of
from stepmill.pool.pool import Pool
from stepmill.pool.port import CLOSE_TIMEOUT_S, OMITTED, Options, PoolPort, Seed, checked_fns, merge, rows_of
from stepmill.spec.batch import Batch
from stepmill.spec.closing import close_on_error
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.options import AutoresetMode, BackendName, OptionKeywords, PoolOptions
from stepmill.spec.stats import PoolStats
from stepmill.spec.tree import DictNode, Leaf, Node, Opaque, map_tree

with needs_extra("pettingzoo", "pettingzoo"):
    from pettingzoo.utils.env import ParallelEnv

if TYPE_CHECKING:
    from typing_extensions import Unpack

Agent: TypeAlias = Any
StepResult: TypeAlias = tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


class StepmillParallelEnv(ParallelEnv):
    """Runs one parallel env in its own worker.

    Args:
        env_fn: a function that makes the env. Its worker calls it.
        options: how the env is run. The default backend is "process"; "serial" runs the env in the caller's thread. The
            autoreset mode is always DISABLED, because the caller resets the env, as PettingZoo specifies.
        **keywords: fields of PoolOptions by name, in place of `options` or in addition.

    Attributes:
        possible_agents: all agents, as the env names them.
        agents: the agents that are alive. It is empty before the first reset, when the episode is over, and after a fault.

    Raises:
        UsageError: the env is not a parallel env.
        EnvError: the constructor raised an exception.
    """

    def __init__(
        self, env_fn: Callable[[], object], *, options: PoolOptions | None = None, **keywords: Unpack[OptionKeywords]
    ) -> None:
        fixed = {"autoreset_mode": AutoresetMode.DISABLED, "episode_stats": False}
        chosen = options_of("StepmillParallelEnv", options, keywords, fixed, backend=BackendName.PROCESS)
        self.agents: list[Agent] = []
        self._pool = Pool([env_fn], options=chosen)
        with close_on_error(self._pool.close):
            spec = self._pool.spec
            self._observation, self._action = _trees_by_agent(spec)
            self.possible_agents: list[Agent] = list(spec.agents)
            self.observation_spaces, self.action_spaces = _spaces_by_agent(spec)
        self.metadata = dict(spec.metadata)
        self.render_mode = spec.render_mode
        self._zero_actions = zeros(self._pool.spec.action)

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[Agent, Any], dict[Agent, dict[str, Any]]]:
        """Begin an episode; return dicts of observations and infos by agent that takes part.

        Args:
            seed, options: the arguments of the env's `reset`.
        """
        self.agents = []
        batch = self._pool.reset(seed=seed, options=options)
        self.agents = self._alive(batch)
        return self._observations(batch, self.agents), _infos(batch, self.agents)

    def step(self, actions: Mapping[Agent, Any]) -> tuple[dict[Agent, Any], ...]:
        """Step with an action for each of `agents`.

        Returns:
            Observations, rewards (float), terminations and truncations (bool) and infos, each as a dict by agent that
            acted or has joined.

        Raises:
            UsageError: an agent that is alive has no action, an agent is unknown, or the episode is over. The env is not
                stepped.
            EnvError, WorkerDied: the env failed; `reset` repairs it, in a new worker if necessary.
        """
        acting = self.agents
        self._check(actions)
        batched = stack_rows(self._pool.spec.action, [self._zero_actions | {agent: actions[agent] for agent in acting}])
        self.agents = []  # if an error interrupts this step, reset() must come next
        self._pool.send(batched)
        return self._results(self._pool.recv(1), acting)

    def _as_returned(self, batch: Batch) -> tuple[dict[Agent, Any], ...]:
        """Return what `stepmill.restore` returns: the results of the last step before the env was saved, or of the reset."""
        return self._results(batch, ())

    def _results(self, batch: Batch, acting: Sequence[Agent]) -> tuple[dict[Agent, Any], ...]:
        self.agents = self._alive(batch)
        # An agent that joined has a flag, too, if the same step ended it. A fault gives the flags of the whole env.
        ended = (
            np.zeros(len(self.possible_agents), bool)
            if "fault" in batch.info
            else batch.terminated[0] | batch.truncated[0]
        )
        flagged = [agent for agent, has_ended in zip(self.possible_agents, ended, strict=True) if has_ended]
        named = list(dict.fromkeys([*acting, *self.agents, *flagged]))
        slots = {agent: slot for slot, agent in enumerate(self.possible_agents) if agent in named}
        return (
            self._observations(batch, named),
            {agent: float(batch.reward[0, slots[agent]]) for agent in named},
            {agent: bool(batch.terminated[0, slots[agent]]) for agent in named},
            {agent: bool(batch.truncated[0, slots[agent]]) for agent in named},
            _infos(batch, named),
        )

    def _check(self, actions: Mapping[Agent, Any]) -> None:
        if not self.agents:
            raise UsageError("no agent is alive; call reset() before step()")
        unknown = [agent for agent in actions if agent not in self._zero_actions]
        missing = [agent for agent in self.agents if agent not in actions]
        if unknown or missing:
            raise UsageError(
                f"actions are missing for agents {missing}, and given for unknown agents {unknown}; "
                f"give one for each of env.agents: {self.agents}"
            )

    def _alive(self, batch: Batch) -> list[Agent]:
        alive = np.ones(len(self.possible_agents), bool) if batch.alive is None else batch.alive[0]
        return [agent for agent, is_alive in zip(self.possible_agents, alive, strict=True) if is_alive]

    def _observations(self, batch: Batch, agents: Sequence[Agent]) -> dict[Agent, Any]:
        return {agent: view_row(self._observation[agent], batch.obs[agent]) for agent in agents}

    def observation_space(self, agent: Agent) -> Space[Any]:
        """Return an agent's observation space, which is the same object each time."""
        return self.observation_spaces[agent]

    def action_space(self, agent: Agent) -> Space[Any]:
        """Return an agent's action space, which is the same object each time."""
        return self.action_spaces[agent]

    def render(self) -> Any:
        """Return the result of the env's `render`."""
        return self._pool.render()[0]

    def state(self) -> Any:
        """Return the result of the env's `state`: a global view of the env."""
        return self.call("state")

    @cached_property
    def state_space(self) -> Space[Any]:
        """The space of `state`; an AttributeError if the env has none."""
        space: Space[Any] = self.get_attr("state_space")
        return space

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the env, through wrappers, and return its result."""
        return self._pool.call(name, *args, **kwargs)[0]

    def get_attr(self, name: str) -> Any:
        """Return an attribute of the env, through wrappers."""
        return self._pool.get_attr(name)[0]

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        return self._pool.stats()

    def close(self) -> None:
        """Close the env and end its worker within 2 s; the serial backend has no limit. Idempotent."""
        self.agents = []
        self._pool.close()


class AgentVectorEnv(GymnasiumVectorEnv[Any, Any, NDArray[Any]]):
    """Runs N parallel envs as a vector env of N x A rows, for agents with equal spaces that share their parameters.

    Row `n * A + a` is agent a of env n. An agent whose episode ended before that of its env keeps its row, with zeros, reward 0
    and no flags, and its actions are ignored. `infos["alive"]`, `[N * A]` bool, is True for agents that need an action. A row of a
    step is valid if its agent was alive before the step. If no agent of an env is alive, the next step resets the env
    (NEXT_STEP).

    Args:
        env_fns: functions that make the envs. Each runs in the worker that owns its env.
        options: how the envs are run.
        **keywords: fields of PoolOptions by name, in place of `options` or in addition.

    Raises:
        UsageError: the agents' spaces or the envs' spaces differ, or the autoreset mode is not NEXT_STEP.
        EnvError: a constructor raised an exception.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], object]],
        *,
        options: PoolOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> None:
        # Agents of one env end at different times.
        fixed = {"autoreset_mode": AutoresetMode.NEXT_STEP, "episode_stats": False}
        chosen = options_of("AgentVectorEnv", options, keywords, fixed)
        self._pool = Pool([partial(_make_stacked, env_fn) for env_fn in checked_fns(env_fns)], options=chosen)
        with close_on_error(self._pool.close):
            self._describe(self._pool.spec)

    def _describe(self, spec: EnvSpec) -> None:
        pairs = [
            (own[0][agent], own[1][agent])
            for own in map(_spaces_by_agent, PoolPort(self._pool).env_specs)
            for agent in spec.agents
        ]
        if any(pair != pairs[0] for pair in pairs):
            raise UsageError(
                "the agents' spaces have different bounds, but all rows of a vector env have the same space; make them equal"
            )
        self.single_observation_space, self.single_action_space = pairs[0]
        self.possible_agents: list[Agent] = list(spec.agents)
        self.num_agents = len(spec.agents)
        self.num_envs = self._pool.num_envs * self.num_agents
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**spec.metadata, "autoreset_mode": GymnasiumAutoreset.NEXT_STEP}
        self.render_mode = spec.render_mode

    def reset(self, *, seed: Seed = None, options: Options = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs.

        Args:
            seed: an int s, which seeds env n with s + n; or a list with one seed, or None, per env (not per row).
            options: as for `Pool.reset`.

        Returns:
            observations [N * A, ...] and infos.
        """
        batch = self._pool.reset(seed=seed, options=options)
        return self._rows(self._pool.spec.observation, batch.obs), self._infos(batch)

    def step(self, actions: Any) -> StepResult:
        """Step all envs.

        Args:
            actions: an element of `action_space`, [N * A, ...]. Actions of agents that are not alive are ignored.

        Returns:
            observations [N * A, ...], rewards [N * A] float64, terminations and truncations [N * A] bool, infos.
        """
        return self._as_returned(self._pool.step(self._by_env(self._pool.spec.action, actions)))

    def _as_returned(self, batch: Batch) -> StepResult:
        """Return a batch as `step` does; also for `stepmill.restore`."""
        flags = batch.terminated.reshape(-1), batch.truncated.reshape(-1)
        obs = self._rows(self._pool.spec.observation, batch.obs)
        return obs, batch.reward.reshape(-1), *flags, self._infos(batch)

    def _rows(self, node: Node, value: Any) -> Any:
        return map_tree(lambda leaf, array: array.reshape(self.num_envs, *_shape_of(leaf)[1:]), node, value)

    def _by_env(self, node: Node, value: Any) -> Any:
        def split(leaf: Leaf | Opaque, array: Any) -> Any:
            rows, shape = np.asarray(array), _shape_of(leaf)
            if rows.shape != (self.num_envs, *shape[1:]):
                raise UsageError(
                    f"actions have shape {rows.shape}; give shape {(self.num_envs, *shape[1:])}, one action per row of the "
                    "vector env"
                )
            return rows.reshape(-1, *shape)

        return map_tree(split, node, value)

    def _infos(self, batch: Batch) -> dict[str, Any]:
        rows = [
            (env * self.num_agents + slot, info)
            for env, by_agent in rows_of(batch.info)
            for slot, info in self._by_slot(by_agent)
        ]
        infos = merge(rows, self.num_envs, env_ids=np.arange(self.num_envs) // self.num_agents)
        infos["alive"] = np.ones(self.num_envs, bool) if batch.alive is None else batch.alive.reshape(-1)
        return infos

    def _by_slot(self, by_agent: Any) -> list[tuple[int, Mapping[str, Any]]]:
        of_env = _of_env(by_agent)
        of_slots = [{**by_agent.get(info_key(agent), {}), **of_env} for agent in self.possible_agents]
        return [(slot, info) for slot, info in enumerate(of_slots) if info]

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every env, through wrappers, and return one result per env, not per row."""
        return self._pool.call(name, *args, **kwargs)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every env, through wrappers, with one value per env, not per row."""
        return self._pool.get_attr(name)

    def render(self) -> tuple[Any, ...]:
        """Return the results of the envs' `render`, with one result per env, not per row."""
        return self._pool.render()

    def stats(self) -> PoolStats:
        """Return how each worker has spent its time since the start."""
        return self._pool.stats()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs and end the workers; see `VectorEnv.close_extras` for the arguments."""
        self._pool.close(0.0 if terminate else CLOSE_TIMEOUT_S if timeout is None else timeout)


def _make_stacked(env_fn: Callable[[], object]) -> StackedAgents:
    """Make an env whose arrays have a dimension for agents."""
    return StackedAgents(env_fn())


def _trees_by_agent(spec: EnvSpec) -> tuple[dict[Agent, Node], dict[Agent, Node]]:
    trees = [dict(node.items) if isinstance(node, DictNode) else {} for node in (spec.observation, spec.action)]
    if not spec.agents or any(set(tree) != set(spec.agents) for tree in trees):
        raise UsageError(
            "the env is not a parallel env of PettingZoo, whose spaces are dicts by agent; return one from env_fn"
        )
    return trees[0], trees[1]


def _spaces_by_agent(spec: EnvSpec) -> tuple[dict[Agent, Space[Any]], dict[Agent, Space[Any]]]:
    observation, action = pickle.loads(spec.spaces)
    named = [{agent: space[str(agent)] for agent in spec.agents} for space in (observation, action)]
    return named[0], named[1]


def _infos(batch: Batch, agents: Sequence[Agent]) -> dict[Agent, dict[str, Any]]:
    """Return each agent's info. The engine's keys, such as "fault", concern the env and are in all of them."""
    by_agent: Any = next((info for _, info in rows_of(batch.info)), {})
    of_env = _of_env(by_agent)
    return {agent: {**by_agent.get(info_key(agent), {}), **of_env} for agent in agents}


def _of_env(by_agent: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the engine's keys of an info, which concern the env as a whole."""
    return {key: by_agent[key] for key in ("fault", OMITTED) if key in by_agent}


def _shape_of(leaf: Leaf | Opaque) -> tuple[int, ...]:
    if isinstance(leaf, Opaque):
        raise UsageError("a part of the space has no fixed size, so it has no row per agent; wrap the env")
    return leaf.shape
