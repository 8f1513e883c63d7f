"""BrainParameters, a class of mlagents.trainers 0.15, which describes the behaviours of envs of both generations.

The specs of behaviours are the env's own objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
