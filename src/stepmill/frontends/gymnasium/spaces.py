"""Batches the spaces of many envs to the spaces of one vector env, with Gymnasium's functions."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, TypeAlias

from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from stepmill.frontends.gymnasium.errors import SpaceMismatchError
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ArgumentTypeError, UsageError

SpacePair: TypeAlias = tuple[Space[Any], Space[Any]]


def read_spaces(env_specs: Sequence[EnvSpec], *, allows_vectors: bool = False) -> list[SpacePair]:
    """Return (observation space, action space) of each env. Envs with equal pickled spaces share the objects.

    Raises:
        UsageError: rewards are vectors, which `allows_vectors` does not permit; or an env declares no space.
    """
    if env_specs[0].reward_space and not allows_vectors:
        raise UsageError(
            f"a reward of these envs has {math.prod(env_specs[0].reward.shape)} numbers, and this front-end needs one; wrap each "
            "env in mo_gymnasium.wrappers.LinearReward, or use stepmill.VectorEnv or stepmill.Pool"
        )
    known: dict[bytes, SpacePair] = {}
    for spec in env_specs:
        if spec.spaces not in known:
            pair: Any = pickle.loads(spec.spaces) if spec.spaces else (None, None)
            names = ("observation_space", "action_space")
            missing = [name for name, space in zip(names, pair, strict=True) if space is None]
            if missing:
                raise UsageError(
                    f"the envs declare no {' and no '.join(missing)}, which this front-end needs; set it to a gymnasium.Space in "
                    "each env, or use stepmill.Pool"
                )
            known[spec.spaces] = pair
    return [known[spec.spaces] for spec in env_specs]


def batch_observations(
    spaces: Sequence[Space[Any]], observation_mode: str | SpacePair
) -> tuple[Space[Any], Space[Any]]:
    """Return the batched and the single observation space.

    Args:
        spaces: one per row.
        observation_mode: "same", "different", or the two spaces to return.
    """
    if observation_mode == "same":
        return batch_space(spaces[0], len(spaces)), spaces[0]
    if observation_mode == "different":
        return batch_differing_spaces(list(spaces)), spaces[0]
    if not isinstance(observation_mode, tuple) or len(observation_mode) != 2:
        raise UsageError(
            f"observation_mode={observation_mode!r} is invalid; give 'same', 'different', or a tuple (batched observation "
            "space, single observation space)"
        )
    if not all(isinstance(space, Space) for space in observation_mode):
        types = " and ".join(type(space).__name__ for space in observation_mode)
        raise ArgumentTypeError(f"observation_mode is a tuple of {types}; give two Spaces, the batched space first")
    return observation_mode


def check_spaces(pairs: Sequence[SpacePair], single: Space[Any], *, is_same: bool) -> None:
    """Check every env's spaces against those of the vector env.

    Args:
        pairs: (observation space, action space) of each env.
        single: the single observation space.
        is_same: whether observation spaces must be equal; if not, only structure, shapes and dtypes must be.

    Raises:
        SpaceMismatchError: an env's spaces differ.
    """
    checked: set[int] = set()
    for env_id, (observation, action) in enumerate(pairs):
        if id(observation) in checked:
            continue
        checked.add(id(observation))
        if is_same and observation != single:
            raise SpaceMismatchError(
                f"env {env_id} has the observation space {observation}, but env 0 has {single}; make the spaces equal, or use "
                "observation_mode='different' if only the bounds differ"
            )
        if not is_same and not is_space_dtype_shape_equiv(observation, single):
            raise SpaceMismatchError(
                f"env {env_id} has the observation space {observation}, which differs in structure, shape or dtype from the "
                f"vector env's {single}; make these equal in all envs"
            )
        if action != pairs[0][1]:
            raise SpaceMismatchError(
                f"env {env_id} has the action space {action}, but env 0 has {pairs[0][1]}; make all action spaces equal"
            )
