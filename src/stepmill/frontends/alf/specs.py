"""Reads the specs of ALF envs, which come from the workers, and checks that they are equal in all envs."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError


@dataclass(frozen=True)
class AlfSpecs:
    """The specs of an env, as nests of the env's own spec objects, and its other properties."""

    action_spec: Any
    observation_spec: Any
    reward_spec: Any
    time_step_spec: Any
    env_info_spec: Any
    batch_size: int
    batched: bool
    is_tensor_based: bool
    num_tasks: int
    task_names: Sequence[str]

    @classmethod
    def of(cls, spec: EnvSpec) -> AlfSpecs:
        """Read the specs from the EnvSpec of an ALF env."""
        described: Mapping[str, Any] = pickle.loads(spec.spaces)
        return cls(**described)


class HasSpecs:
    """The spec methods of ALF envs, without a batch dimension. The specs are known from the start."""

    def _env_specs(self) -> AlfSpecs:
        raise NotImplementedError

    def observation_spec(self) -> Any:
        """Return the spec of an observation."""
        return self._env_specs().observation_spec

    def action_spec(self) -> Any:
        """Return the spec of an action."""
        return self._env_specs().action_spec

    def reward_spec(self) -> Any:
        """Return the spec of a reward."""
        return self._env_specs().reward_spec

    def time_step_spec(self) -> Any:
        """Return the spec of a TimeStep."""
        return self._env_specs().time_step_spec

    def env_info_spec(self) -> Any:
        """Return the spec of an env_info."""
        return self._env_specs().env_info_spec


# The fields that must be equal in all envs, in the order of the checks, and ALF's names for them.
_MUST_BE_EQUAL = {
    "action_spec": "action spec",
    "time_step_spec": "time_step_spec",
    "env_info_spec": "env_info_spec",
    "batch_size": "batch_size",
    "batched": "batched",
}


def check_specs(all_specs: Sequence[AlfSpecs]) -> None:
    """Check that all envs and spares can be stepped together.

    Raises:
        UsageError: an env is tensor-based, or differs from env 0. The message is ALF's, and names the first such env.
    """
    for env_id, specs in enumerate(all_specs):
        if specs.is_tensor_based:
            raise UsageError(f"All environments must be array-based environments. Env {env_id} is tensor-based.")
    for name, title in _MUST_BE_EQUAL.items():
        first = getattr(all_specs[0], name)
        for env_id, specs in enumerate(all_specs):
            own = getattr(specs, name)
            if not is_equal(own, first):
                raise UsageError(
                    f"All environments must have the same {title}. Env {env_id} has {own}, and env 0 has {first}."
                )


def is_equal(one: Any, other: Any) -> bool:
    """Whether two nests of specs are equal.

    A class that a script or a function defines is another class in each worker: specs whose classes have the same name are
    compared by their attributes.
    """
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(is_equal(one[key], other[key]) for key in one)
    if _name_of(one) != _name_of(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if type(one) is type(other):
        return bool(np.all(one == other))
    return is_equal(_attributes_of(one), _attributes_of(other))


def _name_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _attributes_of(value: object) -> dict[str, Any]:
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(value, name, None) for name in names}, **getattr(value, "__dict__", {})}
