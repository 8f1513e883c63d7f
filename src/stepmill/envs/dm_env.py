"""dm_env environments: TimeSteps become Gymnasium's five values, and specs become trees.

A last TimeStep is `terminated` if its discount is 0, else `truncated`. `info["discount"]` is an array [B, ...], 1 after a
reset. The engine resets an environment whose episode is over, so dm_env's own autoreset is never used.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from stepmill.envs.env_adapter import EnvAdapter
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError, needs_extra
from stepmill.spec.tree import PLAIN_DTYPE_KINDS, DictNode, Leaf, LeafKind, Node, Opaque, TupleNode, as_list

with needs_extra("dm_env", "dm-env"):
    from dm_env import specs

_SCALAR = specs.Array((), np.float64)


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a dm_env environment."""
    known: Any = env
    observation, action = known.observation_spec(), known.action_spec()
    reward, discount = _leaf_of(known, "reward_spec"), _leaf_of(known, "discount_spec")
    return EnvSpec(
        observation=tree_of(observation),
        action=tree_of(action),
        reward=Leaf(reward.dtype if reward.dtype == np.float32 else np.dtype(np.float64), reward.shape),
        info=DictNode((("discount", discount),)),
        spaces=pickle.dumps((space_of(observation), space_of(action))),
    )


class DmEnv(EnvAdapter):
    """Steps a dm_env environment for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        reward, discount = _leaf_of(self.env, "reward_spec"), _leaf_of(self.env, "discount_spec")
        self._no_reward = np.zeros(reward.shape, reward.dtype) if reward.shape else 0.0
        self._start = {"discount": np.ones(discount.shape, discount.dtype)}

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[object, dict[str, object]]:
        """Begin an episode.

        Raises:
            TypeError: a seed is given and the env takes none, or options are given, which dm_env does not have.
        """
        if options:
            raise TypeError(f"a dm_env environment takes no reset options; leave out {options!r}")
        if seed is not None:
            _seeder_of(self.env)(seed)
        return self.env.reset().observation, dict(self._start)

    def step(self, action: object) -> tuple[object, object, bool, bool, dict[str, object]]:
        """Step the env. Hot path."""
        time_step = self.env.step(action)
        is_last = time_step.last()
        discount = self._start["discount"] if time_step.discount is None else time_step.discount
        is_terminated = bool(is_last and not np.any(discount))
        reward = self._no_reward if time_step.reward is None else time_step.reward
        return time_step.observation, reward, is_terminated, bool(is_last) and not is_terminated, {"discount": discount}


adapt = DmEnv


def _seeder_of(env: Any) -> Callable[[int], object]:
    # dm_env's API has no seeds. Environments of dm_control seed `env.task.random`; others have a method `seed`.
    random = getattr(getattr(env, "task", None), "random", None)
    for owner in (env, random):
        seeder: Callable[[int], object] | None = getattr(owner, "seed", None)
        if callable(seeder):
            return seeder
    raise TypeError(f"{type(env).__qualname__} takes no seed; give it a method seed(number), or reset without a seed")


def _leaf_of(env: Any, name: str) -> Leaf:
    spec = getattr(env, name, lambda: _SCALAR)()
    tree = tree_of(spec)
    if not isinstance(tree, Leaf):
        raise UsageError(
            f"{name}() of {type(env).__qualname__} is {spec!r}; return the spec of a single array of numbers"
        )
    return tree


def tree_of(spec: Any) -> Node:
    """Return the tree of a nest of specs: dicts, lists, tuples and named tuples of arrays."""
    if isinstance(spec, Mapping):
        return DictNode(tuple((key, tree_of(child)) for key, child in spec.items()))
    if isinstance(spec, list):
        return TupleNode(tuple(tree_of(child) for child in spec), as_list)
    if isinstance(spec, tuple):
        factory = type(spec) if hasattr(spec, "_fields") else None
        return TupleNode(tuple(tree_of(child) for child in spec), factory)
    dtype = np.dtype(spec.dtype)
    if dtype.kind not in PLAIN_DTYPE_KINDS:
        return Opaque()
    kind = LeafKind.DISCRETE if isinstance(spec, specs.DiscreteArray) else LeafKind.SCALAR
    return Leaf(dtype.newbyteorder("="), tuple(spec.shape), LeafKind.ARRAY if spec.shape else kind)


def space_of(spec: Any) -> spaces.Space[Any]:
    """Return the Gymnasium space of a nest of specs, for front-ends that need spaces."""
    if isinstance(spec, Mapping):
        return spaces.Dict({str(key): space_of(child) for key, child in spec.items()})
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([space_of(child) for child in spec])
    dtype = np.dtype(spec.dtype)
    if isinstance(spec, specs.DiscreteArray):
        return spaces.Discrete(spec.num_values, dtype=cast("Any", dtype.type))
    if dtype.kind not in "iuf":
        return spaces.Space(tuple(spec.shape), dtype)
    low = getattr(spec, "minimum", -np.inf if dtype.kind == "f" else np.iinfo(dtype).min)
    high = getattr(spec, "maximum", np.inf if dtype.kind == "f" else np.iinfo(dtype).max)
    return spaces.Box(
        np.broadcast_to(low, spec.shape).astype(dtype),
        np.broadcast_to(high, spec.shape).astype(dtype),
        dtype=cast("Any", dtype.type),
    )
