"""Defines the specs of behaviours in both generations and BrainParameters, and sends specs from workers to the learner."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from stepmill.envs.unity import ActionTuple


class ActionSpec(NamedTuple):
    """The actions of a behaviour's agents.

    Attributes:
        continuous_size: the number of an agent's continuous actions.
        discrete_branches: the number of choices of each discrete action.
    """

    continuous_size: int
    discrete_branches: tuple[int, ...]

    @property
    def discrete_size(self) -> int:
        """The number of an agent's discrete actions."""
        return len(self.discrete_branches)

    def is_discrete(self) -> bool:
        """Whether all actions are discrete."""
        return self.discrete_size > 0 and self.continuous_size == 0

    def is_continuous(self) -> bool:
        """Whether all actions are continuous."""
        return self.discrete_size == 0 and self.continuous_size > 0

    def empty_action(self, n_agents: int) -> ActionTuple:
        """Return zeros for `n_agents` agents."""
        return ActionTuple(
            np.zeros((n_agents, self.continuous_size), np.float32), np.zeros((n_agents, self.discrete_size), np.int32)
        )

    def random_action(self, n_agents: int) -> ActionTuple:
        """Return actions that NumPy's global generator draws. Continuous actions are from -1 to 1."""
        action = self.empty_action(n_agents)
        action.continuous[:] = np.random.uniform(-1.0, 1.0, action.continuous.shape)  # noqa: NPY002 - as in ML-Agents
        for branch, size in enumerate(self.discrete_branches):
            action.discrete[:, branch] = np.random.randint(0, size, n_agents)  # noqa: NPY002
        return action


class ObservationSpec(NamedTuple):
    """One observation of an agent. `dimension_property` and `observation_type` are values of mlagents_envs' enums."""

    shape: tuple[int, ...]
    dimension_property: tuple[int, ...] = ()
    observation_type: int = 0
    name: str = ""


class BehaviorSpec(NamedTuple):
    """The observations and actions of a behaviour's agents."""

    observation_specs: list[ObservationSpec]
    action_spec: ActionSpec


class AgentGroupSpec(NamedTuple):
    """A BehaviorSpec of the first generation.

    `action_type` is 0 for discrete actions and 1 for continuous ones. `action_shape` is the tuple of branches, or a
    size.
    """

    observation_shapes: list[tuple[int, ...]]
    action_type: int
    action_shape: Any

    def is_action_discrete(self) -> bool:
        """Whether actions are discrete."""
        return self.action_type == 0

    def is_action_continuous(self) -> bool:
        """Whether actions are continuous."""
        return self.action_type == 1

    @property
    def discrete_action_branches(self) -> tuple[int, ...] | None:
        """The number of choices of each discrete action, or None if actions are continuous."""
        return tuple(self.action_shape) if self.is_action_discrete() else None

    @property
    def action_size(self) -> int:
        """The number of values in an agent's action."""
        return len(self.action_shape) if self.is_action_discrete() else int(self.action_shape)


class CameraResolution(NamedTuple):
    """The size of an image."""

    height: int
    width: int
    num_channels: int

    @property
    def gray_scale(self) -> bool:
        """Whether the image has one channel."""
        return self.num_channels == 1


class BrainParameters:
    """The observations and actions of a behaviour's agents, as trainers of the first generation describe them."""

    def __init__(
        self,
        brain_name: str,
        vector_observation_space_size: int,
        camera_resolutions: list[CameraResolution],
        vector_action_space_size: list[int],
        vector_action_descriptions: list[str],
        vector_action_space_type: int,
    ) -> None:
        """`vector_action_space_type` is 0 for discrete actions, and 1 for continuous ones."""
        self.brain_name = brain_name
        self.vector_observation_space_size = vector_observation_space_size
        self.number_visual_observations = len(camera_resolutions)
        self.camera_resolutions = camera_resolutions
        self.vector_action_space_size = vector_action_space_size
        self.vector_action_descriptions = vector_action_descriptions
        self.vector_action_space_type = ("discrete", "continuous")[vector_action_space_type]

    def __repr__(self) -> str:
        return (
            f"BrainParameters({self.brain_name!r}, vectors {self.vector_observation_space_size}, "
            f"cameras {self.camera_resolutions}, {self.vector_action_space_type} {self.vector_action_space_size})"
        )


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


# ---- between processes -------------------------------------------------------------------------------------------------


def pack_spec(spec: Any) -> tuple[bytes | None, dict[str, Any]]:
    """Return a pickle of a spec, and its plain values, which a learner without the env's library uses."""
    try:
        pickled: bytes | None = cloudpickle.dumps(spec)
    except Exception:  # a spec may contain anything; the plain values are enough
        pickled = None
    return pickled, _plain(spec)


def _plain(spec: Any) -> dict[str, Any]:
    if hasattr(spec, "observation_specs"):
        action = spec.action_spec
        return {
            "observation_specs": [_plain_observation(each) for each in spec.observation_specs],
            "continuous_size": int(action.continuous_size),
            "discrete_branches": [int(size) for size in action.discrete_branches],
        }
    is_discrete = bool(spec.is_action_discrete())
    return {
        "observation_shapes": [tuple(int(size) for size in shape) for shape in spec.observation_shapes],
        "action_type": 0 if is_discrete else 1,
        "action_shape": [int(size) for size in spec.discrete_action_branches] if is_discrete else int(spec.action_size),
    }


def _plain_observation(spec: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, str]:
    kind = getattr(spec, "observation_type", 0)
    return (
        tuple(int(size) for size in spec.shape),
        tuple(int(flag) for flag in getattr(spec, "dimension_property", None) or ()),
        int(getattr(kind, "value", kind)),
        str(getattr(spec, "name", "")),
    )


def unpack_spec(packed: tuple[bytes | None, dict[str, Any]]) -> Any:
    """Return the env's own spec if its class can be loaded, else a spec of this module with the same fields."""
    pickled, plain = packed
    loaded = None if pickled is None else _load(pickled)
    if loaded is not None:
        return loaded
    if "observation_shapes" in plain:
        shape = plain["action_shape"]
        shape = tuple(shape) if isinstance(shape, list) else shape
        return AgentGroupSpec(plain["observation_shapes"], plain["action_type"], shape)
    observations = [ObservationSpec(*each) for each in plain["observation_specs"]]
    return BehaviorSpec(observations, ActionSpec(plain["continuous_size"], tuple(plain["discrete_branches"])))


def _load(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception:  # the library of the spec is not installed here
        return None
