"""What every manager of Unity envs is to a trainer: policies in, experience out."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from stepmill import timers
from stepmill.envs.unity import (
    Generation,
    behavior_names,
    generation_of,
    read_results,
    read_spec,
    set_agent_actions,
)
from stepmill.frontends.mlagents.settings import checked_parameters
from stepmill.frontends.mlagents.specs import BrainParameters, brain_parameters
from stepmill.frontends.mlagents.steps import ActionInfo, EnvironmentStep, plain_actions, unpack
from stepmill.frontends.mlagents.timing import time_decisions

logger = logging.getLogger("stepmill.mlagents")

Actions = dict[str, Any]
"""By behaviour, what its policy decided: an ActionInfo."""


class EnvManager(ABC):
    """Steps envs with the policies that it was given, and hands what they return to the agent managers.

    A policy has `get_action(decision_steps, worker_id)`, which returns an ActionInfo. One that also has
    `get_action_batch(list of decision_steps, list of worker_ids)`, which returns a list of ActionInfo, is asked once
    for all workers that wait. An agent manager has `add_experiences`, `end_episode`, `policy_queue`, and may have
    `record_environment_stats`; ML-Agents' own does.
    """

    def __init__(self) -> None:
        self.policies: dict[str, Any] = {}
        self.agent_managers: dict[str, Any] = {}
        self.first_step_infos: list[EnvironmentStep] = []
        self._unmanaged: set[str] = set()

    # ---- who decides, and who learns --------------------------------------------------------------------------------

    def set_policy(self, brain_name: str, policy: Any) -> None:
        """Let a policy decide for a behaviour. Without one its agents are left to the env."""
        self.policies[brain_name] = policy
        if brain_name in self.agent_managers:
            self.agent_managers[brain_name].policy = policy

    def set_agent_manager(self, brain_name: str, manager: Any) -> None:
        """Hand the experience of a behaviour to an agent manager."""
        self.agent_managers[brain_name] = manager

    # ---- what trainers call -----------------------------------------------------------------------------------------

    def reset(self, config: Mapping[str, Any] | None = None) -> int:
        """End the episodes under way and reset all envs; their first steps are handed out by the next `advance`.

        Args:
            config: parameters that are sent to the envs before they are reset; None, the default, is none. (The
                original's workers die of None: U-B3.)
        Returns:
            How many first steps there are.
        """
        for manager in self.agent_managers.values():
            manager.end_episode()
        self.first_step_infos = self._reset_env(config)
        return len(self.first_step_infos)

    def advance(self) -> int:
        """Step the envs once, and hand out what they return. Returns how many envs have answered."""
        return self.process_steps(self.get_steps())

    def get_steps(self) -> list[EnvironmentStep]:
        """Take the newest policies, step the envs, and return what they give; to be handed to `process_steps`."""
        if self.first_step_infos:
            # Not within reset(): after the very first one the trainer still has to make its agent managers.
            first, self.first_step_infos = self.first_step_infos, []
            self._process_step_infos(first)
        for name, manager in self.agent_managers.items():
            policy = _take_newest(manager.policy_queue)
            if policy is not None:
                self.set_policy(name, policy)
        return self._step()

    def process_steps(self, new_step_infos: Sequence[EnvironmentStep]) -> int:
        """Hand steps to the agent managers. Returns how many steps there are."""
        return self._process_step_infos(new_step_infos)

    def _process_step_infos(self, step_infos: Sequence[EnvironmentStep]) -> int:
        for step in step_infos:
            for name, results in step.current_all_step_result.items():
                manager = self.agent_managers.get(name)
                if manager is None:
                    self._warn_of(name)
                    continue
                info = step.brain_name_to_action_info.get(name, ActionInfo.empty())
                manager.add_experiences(*(results if isinstance(results, tuple) else (results,)), step.worker_id, info)
                if hasattr(manager, "record_environment_stats"):
                    manager.record_environment_stats(step.environment_stats, step.worker_id)
        return len(step_infos)

    def _warn_of(self, name: str) -> None:
        if name not in self._unmanaged:
            self._unmanaged.add(name)
            logger.warning(
                "Agent manager was not created for behavior id %s: its experience is dropped; call set_agent_manager()",
                name,
            )

    def on_training_started(self, behavior_name: str, trainer_settings: Any) -> None:  # noqa: B027 - not every manager cares
        """Tell the envs that training of a behaviour begins."""

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _take_step(self, last_step: EnvironmentStep) -> Actions:
        """Ask the policies for the actions of one worker."""
        return self._take_steps([last_step])[0]

    def _decisions(self, last_steps: Sequence[EnvironmentStep]) -> list[Actions]:
        """Return the actions of several workers: from `_take_step` of each if it was replaced, else from all at once."""
        if getattr(self._take_step, "__func__", None) is not EnvManager._take_step:
            return [self._take_step(step) for step in last_steps]
        return self._take_steps(last_steps)

    def _take_steps(self, last_steps: Sequence[EnvironmentStep]) -> list[Actions]:
        """Ask the policies for the actions of several workers: once for all, where a policy offers that."""
        with time_decisions(f"{type(self).__name__}._take_step", len(last_steps)):
            return self._decide(last_steps)

    def _decide(self, last_steps: Sequence[EnvironmentStep]) -> list[Actions]:
        decided: list[Actions] = [{} for _ in last_steps]
        names = dict.fromkeys(name for step in last_steps for name in step.current_all_step_result)
        for name in names:
            policy = self.policies.get(name)
            if policy is None:
                continue
            places = [place for place, step in enumerate(last_steps) if name in step.current_all_step_result]
            infos = _ask(policy, name, [last_steps[place] for place in places])
            for place, info in zip(places, infos, strict=True):
                decided[place][name] = info
        return decided

    # ---- of each manager --------------------------------------------------------------------------------------------

    @abstractmethod
    def _step(self) -> list[EnvironmentStep]:
        """Step the envs."""

    @abstractmethod
    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        """Reset the envs."""

    @abstractmethod
    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send parameters to the envs, which get them with their next step or reset."""

    @property
    @abstractmethod
    def training_behaviors(self) -> dict[str, Any]:
        """The specs of all behaviours that any env has, by name."""

    @property
    def external_brains(self) -> dict[str, BrainParameters]:
        """The same as parameters of brains, the first generation's trainers' words."""
        return {name: brain_parameters(name, spec) for name, spec in self.training_behaviors.items()}

    @property
    @abstractmethod
    def get_properties(self) -> dict[str, float]:
        """The float properties of the first env, as a copy."""

    @abstractmethod
    def close(self) -> None:
        """Close the envs."""


def _ask(policy: Any, name: str, steps: Sequence[EnvironmentStep]) -> Sequence[Any]:
    deciding = [_deciding(step.current_all_step_result[name]) for step in steps]
    workers = [step.worker_id for step in steps]
    if callable(getattr(type(policy), "get_action_batch", None)):
        infos: Sequence[Any] = policy.get_action_batch(deciding, workers)
        return infos
    return [policy.get_action(agents, worker) for agents, worker in zip(deciding, workers, strict=True)]


def _deciding(results: Any) -> Any:
    return results[0] if isinstance(results, tuple) else results


def _take_newest(queue: Any) -> Any:
    """Empty a queue of policies and return the last; None if it was empty."""
    newest = None
    while True:
        try:
            newest = queue.get_nowait()
        except Exception as exc:
            if type(exc).__name__ != "Empty":  # ML-Agents' queues have an Empty of their own
                raise
            return newest


class SimpleEnvManager(EnvManager):
    """Steps one env that is here already. What it raises comes as it is.

    Args:
        env: a BaseEnv of either generation.
        env_params: the channel that the env was made with: FloatPropertiesChannel or EnvironmentParametersChannel.
    """

    def __init__(self, env: Any, env_params: Any) -> None:
        super().__init__()
        self.env = env
        self.env_params = env_params
        self.previous_step = EnvironmentStep.empty(0)
        self.previous_all_action_info: dict[str, Any] = {}
        self._generation: Generation = generation_of(env)

    def _step(self) -> list[EnvironmentStep]:
        self.previous_all_action_info = self._take_step(self.previous_step)
        is_second = self.previous_step.is_second_generation
        actions = plain_actions(self.previous_all_action_info, is_second_generation=is_second)
        set_agent_actions(self.env, actions)
        with timers.timed("env.step"):
            self.env.step()
        self.previous_step = EnvironmentStep(self._results(), 0, self.previous_all_action_info, {})
        return [self.previous_step]

    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        self.set_env_parameters(config)
        self.env.reset()
        self.previous_step = EnvironmentStep(self._results(), 0, {}, {})
        return [self.previous_step]

    def _results(self) -> Any:
        return unpack(read_results(self.env, self._generation))

    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send parameters on the channel; floats as what it has for them."""
        for name, value in checked_parameters(config).items():
            if not isinstance(value, float):
                value.apply(name, self.env_params)
            elif hasattr(self.env_params, "set_property"):
                self.env_params.set_property(name, value)
            else:
                self.env_params.set_float_parameter(name, value)

    @property
    def training_behaviors(self) -> dict[str, Any]:
        """The specs of the env's behaviours, by name."""
        names = behavior_names(self.env, self._generation)
        return {name: read_spec(self.env, self._generation, name) for name in names}

    @property
    def get_properties(self) -> dict[str, float]:
        """The float properties of the env, as a copy; none if its channel has none."""
        read = getattr(self.env_params, "get_property_dict_copy", None)
        return dict(read()) if callable(read) else {}

    def close(self) -> None:
        """Close the env."""
        self.env.close()
