"""The interface that every manager of Unity envs offers to a trainer, and the manager of one env in this process."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepmill import timers
from stepmill.envs.unity import Generation, generation_of, read_results, read_specs, set_agent_actions
from stepmill.frontends.mlagents.settings import checked_parameters
from stepmill.frontends.mlagents.steps import ActionInfo, EnvironmentStep, plain_actions, unpack
from stepmill.frontends.mlagents.timing import time_decisions
from stepmill.frontends.overrides import refuse_overrides

logger = logging.getLogger("stepmill.mlagents")

Actions = dict[str, Any]
"""The ActionInfo that a policy returned, by behaviour (which old versions of ML-Agents call brain)."""


class EnvManager(ABC):
    """Steps envs with the actions of policies, and passes the results to agent managers.

    A policy has `get_action(decision_steps, worker_id)`, which returns an ActionInfo. If its class also has
    `get_action_batch(list of decision_steps, list of worker_ids)`, which returns a list of ActionInfo, that method is
    called once for all workers that need actions. An agent manager has `add_experiences`, `end_episode` and
    `policy_queue`, and may have `record_environment_stats`, as those of ML-Agents do.
    """

    NOT_CALLED: dict[str, str] = {}

    def __init__(self) -> None:
        refuse_overrides(type(self))
        _join_to_mlagents()
        self.policies: dict[str, Any] = {}
        self.agent_managers: dict[str, Any] = {}
        self.first_step_infos: list[EnvironmentStep] = []
        self._unmanaged: set[str] = set()

    # ---- policies and agent managers --------------------------------------------------------------------------------

    def set_policy(self, brain_name: str, policy: Any) -> None:
        """Set the policy of a behaviour. Agents of a behaviour without a policy get no actions."""
        self.policies[brain_name] = policy
        if brain_name in self.agent_managers:
            self.agent_managers[brain_name].policy = policy

    def set_agent_manager(self, brain_name: str, manager: Any) -> None:
        """Set the agent manager that receives the results of a behaviour."""
        self.agent_managers[brain_name] = manager

    # ---- methods that trainers call ---------------------------------------------------------------------------------

    def reset(self, config: Mapping[str, Any] | None = None) -> int:
        """Tell all agent managers that their episodes ended, and reset all envs. The next `get_steps` returns the first steps.

        Args:
            config: parameters that are sent to the envs before they are reset; None sends nothing. (In ML-Agents,
                None stops the workers.)
        Returns:
            The number of first steps, one for each env.
        """
        for manager in self.agent_managers.values():
            manager.end_episode()
        self.first_step_infos = self._reset_env(config)
        return len(self.first_step_infos)

    def advance(self) -> int:
        """Step the envs once, and pass the steps to the agent managers. Return the number of steps."""
        return self.process_steps(self.get_steps())

    def get_steps(self) -> list[EnvironmentStep]:
        """Switch to the newest policies, step the envs, and return the steps, which the caller passes to `process_steps`."""
        if self.first_step_infos:
            # reset() cannot do this: the trainer makes its agent managers after the first reset.
            self._process_step_infos(self.first_step_infos)
            self.first_step_infos = []
        for name, manager in self.agent_managers.items():
            policy = _take_newest(manager.policy_queue)
            if policy is not None:
                self.set_policy(name, policy)
        return self._step()

    def process_steps(self, new_step_infos: Sequence[EnvironmentStep]) -> int:
        """Pass steps to the agent managers. Return the number of steps."""
        return self._process_step_infos(new_step_infos)

    def _process_step_infos(self, step_infos: Sequence[EnvironmentStep]) -> int:
        for step in step_infos:
            for name, results in step.current_all_step_result.items():
                manager = self.agent_managers.get(name)
                if manager is None:
                    self._warn_unmanaged(name)
                    continue
                info = step.brain_name_to_action_info.get(name, ActionInfo.empty())
                manager.add_experiences(*(results if isinstance(results, tuple) else (results,)), step.worker_id, info)
                if hasattr(manager, "record_environment_stats"):
                    manager.record_environment_stats(step.environment_stats, step.worker_id)
        return len(step_infos)

    def _warn_unmanaged(self, name: str) -> None:
        if name not in self._unmanaged:
            self._unmanaged.add(name)
            logger.warning(
                "Agent manager was not created for behavior id %s: its experience is dropped; call set_agent_manager()",
                name,
            )

    def on_training_started(self, behavior_name: str, trainer_settings: Any) -> None:  # noqa: B027 - optional for managers
        """Report to the envs that training of a behaviour begins. By default, this does nothing."""

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _take_step(self, last_step: EnvironmentStep) -> Actions:
        """Return the actions that the policies choose for one worker."""
        return self._take_steps([last_step])[0]

    def _decisions(self, last_steps: Sequence[EnvironmentStep]) -> list[Actions]:
        """Return the actions of several workers. If `_take_step` is overridden, it is called for each of them."""
        if getattr(self._take_step, "__func__", None) is not EnvManager._take_step:
            return [self._take_step(step) for step in last_steps]
        return self._take_steps(last_steps)

    def _take_steps(self, last_steps: Sequence[EnvironmentStep]) -> list[Actions]:
        """Return the actions that the policies choose for several workers. A policy with `get_action_batch` is called once."""
        decided: list[Actions] = [{} for _ in last_steps]
        names = dict.fromkeys(name for step in last_steps for name in step.current_all_step_result)
        with time_decisions(f"{type(self).__name__}._take_step", len(last_steps)):
            for name in [each for each in names if self.policies.get(each) is not None]:
                places = [place for place, step in enumerate(last_steps) if name in step.current_all_step_result]
                infos = _call_policy(self.policies[name], name, [last_steps[place] for place in places])
                for place, info in zip(places, infos, strict=True):
                    decided[place][name] = info
        return decided

    # ---- methods that each manager defines --------------------------------------------------------------------------

    @abstractmethod
    def _step(self) -> list[EnvironmentStep]:
        """Step the envs."""

    @abstractmethod
    def _reset_env(self, config: Mapping[str, Any] | None = None) -> list[EnvironmentStep]:
        """Reset the envs."""

    @abstractmethod
    def set_env_parameters(self, config: Mapping[str, Any] | None = None) -> None:
        """Send parameters to the envs before their next step or reset."""

    @property
    @abstractmethod
    def training_behaviors(self) -> dict[str, Any]:
        """The specs of all behaviours of all envs, by name."""

    @property
    def external_brains(self) -> dict[str, BrainParameters]:
        """The specs as BrainParameters, which trainers of the first generation use."""
        return {name: brain_parameters(name, spec) for name, spec in self.training_behaviors.items()}

    @property
    @abstractmethod
    def get_properties(self) -> dict[str, float]:
        """A copy of the float properties of the first env."""

    @abstractmethod
    def close(self) -> None:
        """Close the envs."""


def _join_to_mlagents() -> None:
    """Make EnvManager a virtual subclass of ML-Agents' class if that is imported already. Its import takes seconds."""
    original = getattr(sys.modules.get("mlagents.trainers.env_manager"), "EnvManager", None)
    if original is not None:
        original.register(EnvManager)


_join_to_mlagents()


def _call_policy(policy: Any, name: str, steps: Sequence[EnvironmentStep]) -> Sequence[Any]:
    deciding = [_needing_decision(step.current_all_step_result[name]) for step in steps]
    workers = [step.worker_id for step in steps]
    if callable(getattr(type(policy), "get_action_batch", None)):
        infos: Sequence[Any] = policy.get_action_batch(deciding, workers)
        return infos
    return [policy.get_action(agents, worker) for agents, worker in zip(deciding, workers, strict=True)]


def _needing_decision(results: Any) -> Any:
    return results[0] if isinstance(results, tuple) else results


def _take_newest(queue: Any) -> Any:
    """Remove the policies that are in a queue and return the last, or None if the queue was empty."""
    newest = None
    num_queued = queue.qsize() if hasattr(queue, "qsize") else 1
    for _ in range(num_queued if isinstance(num_queued, int) else 1):  # a mock of a queue has no number
        try:
            newest = queue.get_nowait()
        except Exception as exc:
            if type(exc).__name__ != "Empty":  # ML-Agents' queues have their own class
                raise
            break
    return newest


class SimpleEnvManager(EnvManager):
    """Steps one env in this process, for tests and for debugging. Exceptions of the env are raised unchanged.

    Args:
        env: a BaseEnv of either generation.
        env_params: the channel that the env was built with: FloatPropertiesChannel or EnvironmentParametersChannel.
    """

    NOT_CALLED = {"_generate_all_results": "change what the env returns, or override _step() and _reset_env()"}

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
        """Send parameters on the channel. Floats are float properties or parameters, depending on the channel."""
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
        return read_specs(self.env, self._generation)

    @property
    def get_properties(self) -> dict[str, float]:
        """A copy of the float properties of the env. It is empty if the channel of the env has none."""
        read = getattr(self.env_params, "get_property_dict_copy", None)
        return dict(read()) if callable(read) else {}

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class CameraResolution(NamedTuple):
    """The size of an image."""

    height: int
    width: int
    num_channels: int

    @property
    def gray_scale(self) -> bool:
        """Whether the image has one channel."""
        return self.num_channels == 1


@dataclass(eq=False)
class BrainParameters:
    """The observations and actions of a behaviour's agents, as trainers of the first generation describe them.

    `vector_action_space_type` is given as 0 or 1, and becomes "discrete" or "continuous".
    """

    brain_name: str
    vector_observation_space_size: int
    camera_resolutions: list[CameraResolution]
    vector_action_space_size: list[int]
    vector_action_descriptions: list[str]
    vector_action_space_type: Any
    number_visual_observations: int = field(init=False)

    def __post_init__(self) -> None:
        self.number_visual_observations = len(self.camera_resolutions)
        self.vector_action_space_type = ("discrete", "continuous")[self.vector_action_space_type]


def brain_parameters(name: str, spec: Any) -> BrainParameters:
    """Return the parameters of a behaviour of either generation. The sizes of vectors are added; images are cameras."""
    if hasattr(spec, "observation_specs"):
        shapes = [tuple(each.shape) for each in spec.observation_specs]
        branches = [int(size) for size in spec.action_spec.discrete_branches]
        is_discrete = bool(branches)
        size = branches if is_discrete else [int(spec.action_spec.continuous_size)]
    else:
        shapes = [tuple(shape) for shape in spec.observation_shapes]
        is_discrete = bool(spec.is_action_discrete())
        size = [int(each) for each in spec.discrete_action_branches] if is_discrete else [int(spec.action_size)]
    vectors = sum(int(shape[0]) for shape in shapes if len(shape) == 1)
    cameras = [CameraResolution(*map(int, shape)) for shape in shapes if len(shape) == 3]
    return BrainParameters(name, vectors, cameras, size, [], 0 if is_discrete else 1)
