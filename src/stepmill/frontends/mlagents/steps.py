"""Results of steps in both generations, actions, and batches of the agents of several workers.

The classes are stepmill's own, because mlagents_envs is optional and its versions have the classes of one generation only. Field
names are those of ML-Agents, so that policies and agent managers that are written for it work. Arrays are [A, ...] for A
agents. The number, the ids and the order of the agents may change with every step.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill.envs.unity import BATCH_FIELDS, DECISION_FIELDS, TERMINAL_FIELDS, Results
from stepmill.frontends.mlagents.failures import load

Array: TypeAlias = NDArray[Any]


# ---- one agent -------------------------------------------------------------------------------------------------------


def _one_agent(name: str, fields: tuple[str, ...]) -> Any:
    """Return a class for one agent: mlagents_envs' if it has these fields, because trainers call isinstance()."""
    theirs = load("base_env", name)
    return theirs if getattr(theirs, "_fields", ()) == fields else namedtuple(name, fields)  # noqa: PYI024 - no types


DecisionStep = _one_agent("DecisionStep", DECISION_FIELDS)
TerminalStep = _one_agent("TerminalStep", TERMINAL_FIELDS)
StepResult = _one_agent("StepResult", BATCH_FIELDS)


# ---- the agents of a behaviour ---------------------------------------------------------------------------------------


_GROUPS = {"group_id": np.int32, "group_reward": np.float32}


class _Agents(Mapping[int, Any]):
    """A mapping from an agent's id to its row of the arrays, as an object of `_row_class`."""

    agent_id: Array
    _row_class: ClassVar[Any]

    def __post_init__(self) -> None:
        for name, value in vars(self).copy().items():
            if name in ("obs", "action_mask") and value is not None:
                setattr(self, name, list(value))
            elif name in _GROUPS:
                # Older envs lack these columns, which become zeros. mlagents_envs gives group ids as a list.
                given = np.zeros(len(self)) if value is None else value
                setattr(self, name, np.asarray(given, _GROUPS[name]))

    @cached_property
    def agent_id_to_index(self) -> dict[int, int]:
        """The row of every agent."""
        return {int(agent): row for row, agent in enumerate(self.agent_id)}

    def __len__(self) -> int:
        """Return A."""
        return len(self.agent_id)

    def __iter__(self) -> Iterator[int]:
        return iter(self.agent_id)

    def __getitem__(self, agent_id: int) -> Any:
        row = self.agent_id_to_index.get(agent_id)
        if row is None:
            raise KeyError(f"agent_id {agent_id} is not present in the {type(self).__name__}")
        return self._row_class(*(self._part(name, row) for name in self._row_class._fields))._replace(agent_id=agent_id)

    def _part(self, name: str, row: int) -> Any:
        value = getattr(self, name)
        if name in ("obs", "action_mask"):
            return None if value is None else [array[row] for array in value]
        return value[row]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(agent_id={np.asarray(self.agent_id).tolist()})"


@dataclass(eq=False, repr=False)
class DecisionSteps(_Agents):
    """Agents that need a decision.

    Attributes:
        obs: the observations, as a list of arrays [A, ...].
        reward: [A] float32, the reward since the last step of each agent.
        agent_id: [A] int32.
        action_mask: a list of arrays [A, branch size] bool, True where an action is not allowed; None without discrete
            actions.
        group_id: [A] int32, 0 for no group.
        group_reward: [A] float32.
    """

    _row_class: ClassVar[Any] = DecisionStep
    obs: Sequence[Array]
    reward: Array
    agent_id: Array
    action_mask: Sequence[Array] | None = None
    group_id: Any = None
    group_reward: Any = None

    @staticmethod
    def empty(spec: Any) -> DecisionSteps:
        """Return no agents of a behaviour."""
        return DecisionSteps(_no_obs(spec), np.zeros(0, np.float32), np.zeros(0, np.int32))


@dataclass(eq=False, repr=False)
class TerminalSteps(_Agents):
    """Agents whose episode ended.

    Attributes:
        obs, reward, agent_id, group_id, group_reward: as in DecisionSteps.
        interrupted: [A] bool, True if a limit ended the episode.
    """

    _row_class: ClassVar[Any] = TerminalStep
    obs: Sequence[Array]
    reward: Array
    interrupted: Array
    agent_id: Array
    group_id: Any = None
    group_reward: Any = None

    @staticmethod
    def empty(spec: Any) -> TerminalSteps:
        """Return no agents of a behaviour."""
        return TerminalSteps(_no_obs(spec), np.zeros(0, np.float32), np.zeros(0, np.bool_), np.zeros(0, np.int32))


for _ours in (DecisionSteps, TerminalSteps):
    _theirs = load("base_env", _ours.__name__)
    if _theirs is not None:
        _theirs.register(_ours)


@dataclass(eq=False, repr=False)
class BatchedStepResult(_Agents):
    """All agents of a group that need a decision or whose episode ended, in the first generation.

    Attributes:
        obs, reward, agent_id, action_mask: as in DecisionSteps.
        done: [A] bool, whether the agent's episode ended.
        max_step: [A] bool, whether a limit ended it.
    """

    _row_class: ClassVar[Any] = StepResult
    obs: Sequence[Array]
    reward: Array
    done: Array
    max_step: Array
    agent_id: Array
    action_mask: Sequence[Array] | None = None

    def n_agents(self) -> int:
        """Return A."""
        return len(self.agent_id)

    def contains_agent(self, agent_id: int) -> bool:
        """Whether the agent is in this result."""
        return agent_id in self.agent_id_to_index

    def get_agent_step_result(self, agent_id: int) -> Any:
        """Return one agent's row.

        Raises:
            IndexError: the agent is not in this result.
        """
        if not self.contains_agent(agent_id):
            raise IndexError(f"agent_id {agent_id} is not present in the BatchedStepResult")
        return self[agent_id]


AllStepResult: TypeAlias = dict[str, "tuple[DecisionSteps, TerminalSteps] | BatchedStepResult"]


def _no_obs(spec: Any) -> list[Array]:
    shapes = [tuple(each.shape) for each in spec.observation_specs]
    return [np.zeros((0, *shape), np.float32) for shape in shapes]


def unpack(results: Results) -> AllStepResult:
    """Return an observation of `UnityEnv` as step results."""
    return {
        name: (DecisionSteps(**agents[0]), TerminalSteps(**agents[1]))
        if isinstance(agents, tuple)
        else BatchedStepResult(**agents)
        for name, agents in results.items()
    }


# ---- actions, and one worker's result ----------------------------------------------------------------------------------


class ActionInfo(NamedTuple):
    """The actions that a policy chose for the agents of one behaviour of one worker.

    Attributes:
        action: the action as the policy returned it, for envs of the first generation.
        env_action: the action for envs of the second generation, perhaps clipped: an ActionTuple, or an array [A, ...]. In the first
            generation this field holds value estimates.
        outputs: all outputs of the policy.
        agent_ids: [A] ids of the agents.
    """

    action: Any
    env_action: Any
    outputs: dict[str, Any]
    agent_ids: Sequence[int]

    @property
    def value(self) -> Any:
        """The second field, which has this name in the first generation."""
        return self.env_action

    @staticmethod
    def empty() -> ActionInfo:
        """Return an ActionInfo without agents."""
        return ActionInfo([], [], {}, [])


class EnvironmentStep(NamedTuple):
    """The result of one worker's step or reset, and the actions that led to it.

    Attributes:
        current_all_step_result: the agents by behaviour.
        worker_id: the id of the worker.
        brain_name_to_action_info: by behaviour, the actions that led to this result; empty after a reset.
        environment_stats: by name, a list of (value, aggregation method) that the env sent since its last step. It may be
            left out, as in the first generation.
    """

    current_all_step_result: AllStepResult
    worker_id: int
    brain_name_to_action_info: dict[str, Any]
    environment_stats: dict[str, Any] = {}

    @property
    def name_behavior_ids(self) -> Iterable[str]:
        """The behaviours in the result."""
        return self.current_all_step_result.keys()

    @property
    def is_second_generation(self) -> bool:
        """Whether the agents of a behaviour are a pair of DecisionSteps and TerminalSteps."""
        return any(isinstance(agents, tuple) for agents in self.current_all_step_result.values())

    @staticmethod
    def empty(worker_id: int) -> EnvironmentStep:
        """Return the result of a worker that was never reset."""
        return EnvironmentStep({}, worker_id, {}, {})


def plain_actions(infos: Mapping[str, Any], *, is_second_generation: bool) -> dict[str, Any]:
    """Return the actions of the behaviours that have some, in the form that `set_agent_actions` takes.

    Args:
        infos: by behaviour, the result of its policy.
        is_second_generation: whether the env is of the second generation. The generations use different fields of an
            ActionInfo.
    """
    actions = {}
    for name, info in infos.items():
        action = _behaviors_action(info) if is_second_generation else info.action
        if action is not None and (isinstance(action, tuple) or len(action)):
            actions[name] = action
    return actions


def _behaviors_action(info: Any) -> Any:
    action = getattr(info, "env_action", info.action)
    if not len(info.agent_ids):
        return None
    if hasattr(action, "continuous") and hasattr(action, "discrete"):
        return action.continuous, action.discrete
    return action


def join_steps(steps: Sequence[DecisionSteps]) -> DecisionSteps:
    """Return the agents of several workers as one batch, in the order of the workers.

    Args:
        steps: the steps of one behaviour, one per worker, with A_w agents each.
    Returns:
        A batch with [sum of A_w, ...] in every array. Agents of different workers may have the same agent_id.
    """
    first = steps[0]
    masks = [each.action_mask for each in steps if len(each)]
    joined = None
    if masks and all(mask is not None for mask in masks):
        joined = [np.concatenate(branch) for branch in zip(*masks, strict=True)]
    return DecisionSteps(
        [np.concatenate([each.obs[leaf] for each in steps]) for leaf in range(len(first.obs))],
        np.concatenate([each.reward for each in steps]),
        np.concatenate([each.agent_id for each in steps]),
        joined,
        np.concatenate([each.group_id for each in steps]),
        np.concatenate([each.group_reward for each in steps]),
    )


def split_info(info: ActionInfo, steps: Sequence[DecisionSteps]) -> list[ActionInfo]:
    """Return decisions for a joined batch as one ActionInfo per worker.

    Args:
        info: the decisions. The action, env_action and outputs are arrays [sum of A_w, ...], ActionTuples of such
            arrays, or dicts of them. Values of another length, or without a length, are given to every worker
            unchanged.
        steps: the argument of `join_steps`.
    """
    bounds = np.cumsum([0, *(len(each) for each in steps)]).tolist()
    return [
        ActionInfo(
            _part(info.action, begin, end, bounds[-1]),
            _part(info.env_action, begin, end, bounds[-1]),
            {name: _part(value, begin, end, bounds[-1]) for name, value in info.outputs.items()},
            list(each.agent_id),
        )
        for each, begin, end in zip(steps, bounds, bounds[1:], strict=False)
    ]


def _part(value: Any, begin: int, end: int, size: int) -> Any:
    if hasattr(value, "continuous") and hasattr(value, "discrete"):
        parts = (_part(value.continuous, begin, end, size), _part(value.discrete, begin, end, size))
        return type(value)(continuous=parts[0], discrete=parts[1])
    if isinstance(value, dict):
        return {name: _part(each, begin, end, size) for name, each in value.items()}
    has_rows = hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str)
    return value[begin:end] if has_rows and len(value) == size else value
