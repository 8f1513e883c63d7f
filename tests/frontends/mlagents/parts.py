"""Policies, agent managers and hooks that the tests of the managers share."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stepmill.envs.unity import ActionTuple
from stepmill.frontends.mlagents import ActionInfo, EnvironmentStep
from stepmill.testing.gates import wait_at
from tests.harness.unity_envs import ScriptedGroups

WALK = {"walk": [[1, 2], [2], [2, 3]]}


class Policy:
    """Gives every agent the same number as its action, and records its calls: (agents, worker)."""

    def __init__(self, number: float = 1.0) -> None:
        self.number = number
        self.asked: list[tuple[list[int], int]] = []

    def get_action(self, steps: Any, worker_id: int) -> ActionInfo:
        self.asked.append(([int(agent) for agent in steps.agent_id], worker_id))
        return decide(steps, self.number)


class BatchPolicy(Policy):
    """A policy that is called once for all workers."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def get_action_batch(self, steps: Sequence[Any], worker_ids: Sequence[int]) -> list[ActionInfo]:
        self.batches.append(list(worker_ids))
        return [decide(each, float(worker)) for each, worker in zip(steps, worker_ids, strict=True)]


def decide(steps: Any, number: float) -> ActionInfo:
    values = np.full((len(steps.agent_id), 2), number, np.float32)
    return ActionInfo(values, ActionTuple(values), {"number": number}, list(steps.agent_id))


class AgentManager:
    """Records what it receives. The test fills `policy_queue`."""

    def __init__(self) -> None:
        self.policy: Any = None
        self.policy_queue: queue.Queue[Any] = queue.Queue()
        self.experiences: list[tuple[Any, ...]] = []
        self.stats: list[Any] = []
        self.num_ended = 0

    def add_experiences(self, *experience: Any) -> None:
        self.experiences.append(experience)

    def record_environment_stats(self, stats: Any, worker_id: int) -> None:
        self.stats.append((stats, worker_id))

    def end_episode(self) -> None:
        self.num_ended += 1


def deciding(step: EnvironmentStep, name: str = "walk") -> list[int]:
    """The agents that need a decision."""
    agents: Any = step.current_all_step_result[name]
    if isinstance(agents, tuple):
        return [int(each) for each in agents[0].agent_id]
    return [int(each) for each, is_done in zip(agents.agent_id, agents.done, strict=True) if not is_done]


def ended(step: EnvironmentStep, name: str = "walk") -> dict[int, bool]:
    """The agents whose episode ended, and whether a limit ended it."""
    agents: Any = step.current_all_step_result[name]
    if isinstance(agents, tuple):
        return {int(each): bool(flag) for each, flag in zip(agents[1].agent_id, agents[1].interrupted, strict=True)}
    rows = zip(agents.agent_id, agents.done, agents.max_step, strict=True)
    return {int(each): bool(limit) for each, is_done, limit in rows if is_done}


def decided(step: EnvironmentStep, name: str = "walk") -> float | None:
    """The number that the policy gave for the actions that led to a step."""
    info = step.brain_name_to_action_info.get(name)
    return None if info is None else info.outputs["number"]


def given_action(script: type[Any], number: float, num_agents: int = 1) -> Any:
    """What a scripted env records of an action of `Policy`."""
    rows = [[number, number]] * num_agents
    return rows if issubclass(script, ScriptedGroups) else (rows, [[]] * num_agents)


# ---- factories, and loops ---------------------------------------------------------------------------------------------


def walking(script: type[Any], **arguments: Any) -> Any:
    """A factory of scripted envs."""
    return lambda worker_id, channels: script(WALK, side_channels=channels, **arguments)


def with_hooks(script: type[Any], worker: int, hooks: dict[tuple[str, int], Any]) -> Any:
    """A factory: one worker has hooks."""
    return lambda worker_id, channels: script(WALK, side_channels=channels, hooks=hooks if worker_id == worker else {})


def step_until(manager: Any, is_enough: Callable[[list[Any]], Any]) -> list[Any]:
    """Step until the results so far are enough."""
    steps: list[Any] = []
    while not is_enough(steps):
        steps += manager.get_steps()
    return steps


def step_workers(manager: Any, worker_ids: set[int]) -> list[Any]:
    """Step until each of these workers has had a result."""
    return step_until(manager, lambda steps: worker_ids <= {step.worker_id for step in steps})


# ---- hooks -------------------------------------------------------------------------------------------------------------


def wait(path: Path) -> Callable[[Any], None]:
    return lambda env: wait_at(path)


def die(env: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_(error: Callable[[], BaseException]) -> Callable[[Any], None]:
    def hook(env: Any) -> None:
        raise error()

    return hook


def once(flag: Path, hook: Callable[[Any], None]) -> Callable[[Any], None]:
    """The hook, but only for the first process that calls it."""
    return partial(_once, flag, hook)


def _once(flag: Path, hook: Callable[[Any], None], env: Any) -> None:
    if not flag.exists():
        flag.touch()
        hook(env)
