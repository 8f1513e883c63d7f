"""Gymnasium vector envs as batched envs: one call steps k rows. A vector env resets its rows itself."""

from __future__ import annotations

from enum import Enum
from typing import cast

from gymnasium.vector import VectorEnv

from stepmill.envs import Steppable
from stepmill.envs.gymnasium import declared_space, pickle_spaces, tree_of
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return the spec of one row of a vector env, with the number of rows."""
    env = cast("VectorEnv[object, object, object]", env)
    observation = declared_space(env, "single_observation_space")
    action = declared_space(env, "single_action_space")
    if observation is None or action is None:
        raise UsageError(f"{env} lacks one of single_observation_space and single_action_space; declare both")
    return EnvSpec(
        observation=tree_of(observation, "single_observation_space"),
        action=tree_of(action, "single_action_space"),
        batch_size=_read_num_envs(env),
        is_batched=True,
        render_mode=env.render_mode,
        metadata=_read_metadata(env),
        spaces=pickle_spaces(observation, action, None if like is None else like.spaces),
    )


def adapt(env: object) -> Steppable:
    """Return the vector env itself, which has the engine's API with a leading dimension."""
    return cast("Steppable", env)


def _read_num_envs(env: VectorEnv[object, object, object]) -> int:
    num_envs = getattr(env, "num_envs", None)
    if not isinstance(num_envs, int) or num_envs < 1:
        raise UsageError(f"num_envs of {env} is {num_envs!r}; set it to the number of rows that one call steps")
    return num_envs


def _read_metadata(env: VectorEnv[object, object, object]) -> dict[str, object]:
    # The mode as a string, so that readers of the spec need not import Gymnasium.
    metadata = dict(env.metadata)
    mode = metadata.get("autoreset_mode")
    if isinstance(mode, Enum):
        metadata["autoreset_mode"] = mode.value
    return metadata
