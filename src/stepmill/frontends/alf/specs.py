"""What an ALF env says of itself, as its worker told it, and whether all envs say the same."""

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
    """The specs of an env and what goes with them; nests of what the env calls a spec."""

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
        """Read them from what the engine was told."""
        told: Mapping[str, Any] = pickle.loads(spec.spaces)
        return cls(**told)


class HasSpecs:
    """What can be asked of one env or of many alike: the specs of one env, without a batch dimension, known since the start."""

    def _known(self) -> AlfSpecs:
        raise NotImplementedError

    def observation_spec(self) -> Any:
        """Return the spec of an observation."""
        return self._known().observation_spec

    def action_spec(self) -> Any:
        """Return the spec of an action."""
        return self._known().action_spec

    def reward_spec(self) -> Any:
        """Return the spec of a reward."""
        return self._known().reward_spec

    def time_step_spec(self) -> Any:
        """Return the spec of a TimeStep."""
        return self._known().time_step_spec

    def env_info_spec(self) -> Any:
        """Return the spec of an env_info."""
        return self._known().env_info_spec


# What must be the same in all envs, in the order in which it is looked at, and ALF's name for it.
_SHARED = {
    "action_spec": "action spec",
    "time_step_spec": "time_step_spec",
    "env_info_spec": "env_info_spec",
    "batch_size": "batch_size",
    "batched": "batched",
}


def check_specs(all_specs: Sequence[AlfSpecs]) -> None:
    """Refuse envs, spares too, that cannot be stepped together.

    Raises:
        UsageError: in ALF's words, with the first env that differs.
    """
    for env_id, specs in enumerate(all_specs):
        if specs.is_tensor_based:
            raise UsageError(f"All environments must be array-based environments. Env {env_id} is tensor-based.")
    for name, title in _SHARED.items():
        first = getattr(all_specs[0], name)
        for env_id, specs in enumerate(all_specs):
            own = getattr(specs, name)
            if not is_same(own, first):
                raise UsageError(
                    f"All environments must have the same {title}. Env {env_id} has {own}, and env 0 has {first}."
                )


def is_same(one: Any, other: Any) -> bool:
    """Whether two nests of specs say the same.

    A class that a script or a function defines comes from each worker anew: specs of classes of one name are compared by
    what they hold.
    """
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if _name_of(one) != _name_of(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is type(other):
        return bool(np.all(one == other))
    return is_same(_held_by(one), _held_by(other))


def _name_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _held_by(value: object) -> dict[str, Any]:
    names = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(value, name, None) for name in names}, **getattr(value, "__dict__", {})}
