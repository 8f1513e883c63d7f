"""A manager of one env, in the process of the learner: for tests, and to look into what a worker would do."""

from __future__ import annotations

from collections.abc import Mapping
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
from stepmill.frontends.mlagents.actions import plain_actions
from stepmill.frontends.mlagents.manager import EnvManager
from stepmill.frontends.mlagents.settings import checked_parameters
from stepmill.frontends.mlagents.steps import EnvironmentStep, unpack


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
        set_agent_actions(self.env, plain_actions(self.previous_all_action_info, self.previous_step))
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
