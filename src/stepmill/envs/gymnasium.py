"""Gymnasium envs: spaces become trees, and the hot loop steps the env itself. Without a space, values are opaque."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.vector.utils import batch_space

from stepmill.envs import Steppable
from stepmill.envs.mujoco_contexts import make_contexts_current
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError
from stepmill.spec.tree import PLAIN_DTYPE_KINDS, DictNode, Leaf, LeafKind, Node, Opaque, TupleNode

_WEIGHTED_SUM = "LinearReward"  # MO-Gymnasium's wrapper that converts a vector to a number
_MAX_DIMS = 64 if int(np.__version__.split(".")[0]) >= 2 else 32


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a Gymnasium env."""
    observation = declared_space(env, "observation_space")
    action = declared_space(env, "action_space")
    reward = _vector_reward_space(env)
    return EnvSpec(
        observation=tree_of(observation, "observation_space"),
        action=tree_of(action, "action_space"),
        reward=_reward_leaf(reward),
        render_mode=getattr(env, "render_mode", None),
        metadata=dict(getattr(env, "metadata", None) or {}),
        spaces=pickle_spaces(observation, action, None if like is None else like.spaces),
        reward_space=b"" if reward is None else pickle.dumps(reward, pickle.HIGHEST_PROTOCOL),
        gym_spec=_pickle_spec(env) if like is None else like.gym_spec,
    )


def describe_opaque(_env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of an env without spaces: its observations and actions are any values, of one agent."""
    return EnvSpec(observation=Opaque(), action=Opaque(), spaces=pickle_spaces(None, None, None))


def adapt(env: object) -> Steppable:
    """Return the env itself, which has the engine's API."""
    make_contexts_current()
    return cast("Steppable", env)


def declared_space(env: object, name: str) -> spaces.Space[object] | None:
    """Return one of an env's spaces, or None if the env does not declare it.

    Raises:
        UsageError: the object is not a space.
    """
    space = getattr(env, name, None)
    if space is not None and not isinstance(space, spaces.Space):
        found = f"a {type(space).__name__}"
        raise UsageError(
            f"{name} of {env} is {found}; set it to a gymnasium.Space in the env's constructor, or to None"
        )
    return space


def _vector_reward_space(env: object) -> spaces.Box | None:
    """Return the space of an env's rewards, as MO-Gymnasium's envs declare it; None if a reward is a number.

    The outermost wrapper that has an attribute `reward_space` decides. If it is None there, a reward is a number.
    """
    while not hasattr(env, "reward_space"):
        if not isinstance(env, gymnasium.Wrapper) or type(env).__name__ == _WEIGHTED_SUM:
            return None
        env = env.env
    space = env.reward_space
    is_vector = isinstance(space, spaces.Box) and np.prod(space.shape) > 1
    return cast("spaces.Box", space) if is_vector else None


def _reward_leaf(space: spaces.Box | None) -> Leaf:
    if space is None:
        return Leaf(np.dtype(np.float64), ())
    dtype = np.dtype(np.float32 if space.dtype == np.float32 else np.float64)
    return Leaf(dtype, tuple(int(size) for size in space.shape))


def tree_of(space: spaces.Space[object] | None, path: str) -> Node:
    """Return the tree of a space; None stands for any value. `path` is its name in errors.

    Raises:
        UsageError: a part of the space has a structured or object dtype.
    """
    if isinstance(space, spaces.Dict):
        return DictNode(tuple((key, tree_of(child, f"{path}[{key!r}]")) for key, child in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return TupleNode(tuple(tree_of(child, f"{path}[{index}]") for index, child in enumerate(space.spaces)))
    if isinstance(space, spaces.Discrete):
        return _leaf(space, (), LeafKind.DISCRETE, path)
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return _leaf(space, tuple(space.shape), LeafKind.ARRAY if space.shape else LeafKind.SCALAR, path)
    return Opaque()


def _leaf(space: spaces.Space[object], shape: tuple[int, ...], kind: LeafKind, path: str) -> Leaf:
    dtype = space.dtype
    if dtype is None or dtype.kind not in PLAIN_DTYPE_KINDS:
        raise UsageError(
            f"{path} has dtype {dtype}, which cannot lie in shared memory; use numbers or bools, or a custom space"
        )
    if len(shape) >= _MAX_DIMS:
        raise UsageError(
            f"{path} has {len(shape)} dimensions, and NumPy's limit is {_MAX_DIMS} with the batch dimension; use fewer"
        )
    # Numbers in the slab have the machine's byte order. The hot loop swaps the bytes of other numbers.
    return Leaf(dtype.newbyteorder("="), tuple(int(size) for size in shape), kind)


def pickle_spaces(
    observation: spaces.Space[object] | None, action: spaces.Space[object] | None, like: bytes | None
) -> bytes:
    """Return both spaces pickled, for the front-end; or the object `like` if it equals those bytes."""
    pair = (observation, action)
    try:
        pickled = pickle.dumps(pair, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Spaces of classes that are defined in a script or a function must be pickled together with their class.
        pickled = cloudpickle.dumps(pair, pickle.HIGHEST_PROTOCOL)
    return like if like == pickled else pickled


class VectorSpaces(NamedTuple):
    """The spaces of a vector env of N rows: those of all rows, and those of one row. They are None if not declared."""

    observation: spaces.Space[Any] | None
    action: spaces.Space[Any] | None
    single_observation: spaces.Space[Any] | None
    single_action: spaces.Space[Any] | None


def vector_spaces(spec: EnvSpec, num_rows: int) -> VectorSpaces:
    """Return the spaces of `num_rows` rows of an env.

    Raises:
        UsageError: the env has no Gymnasium spaces.
    """
    pair: tuple[Any, Any] = pickle.loads(spec.spaces) if spec.spaces else (None, None)
    if spec.agents or not all(space is None or isinstance(space, spaces.Space) for space in pair):
        raise UsageError(
            "these envs have no Gymnasium spaces of a single agent; pool.spec.observation and pool.spec.action describe "
            "their observations and actions"
        )
    observation, action = (None if space is None else batch_space(space, num_rows) for space in pair)
    return VectorSpaces(observation, action, *pair)


def _pickle_spec(env: Any) -> bytes | None:
    # For information only. Gymnasium makes the spec from the arguments of every wrapper; their __deepcopy__ and
    # __reduce__ run here, and may raise anything.
    try:
        return None if env.spec is None else bytes(cloudpickle.dumps(env.spec))
    except Exception:
        return None


@dataclass(frozen=True)
class GymnasiumEnvMaker:
    """An env_fn that makes a registered env. It contains the spec, so that a worker needs no registry.

    Attributes:
        spec: the spec of the env, with its keyword arguments.
        wrappers: the wrappers, which are applied to the env in this order, so that the first is the innermost.
        max_episode_steps, disable_env_checker: as for `gymnasium.make`.
    """

    spec: GymnasiumSpec
    wrappers: tuple[Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]], ...] = ()
    max_episode_steps: int | None = None
    disable_env_checker: bool | None = None

    def __call__(self) -> gymnasium.Env[Any, Any]:
        env: gymnasium.Env[Any, Any] = gymnasium.make(self.spec, self.max_episode_steps, self.disable_env_checker)
        for wrapper in self.wrappers:
            env = wrapper(env)
        return env
