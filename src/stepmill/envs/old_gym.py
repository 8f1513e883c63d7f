"""Envs of gym, as it was before Gymnasium: four values or five, `reset` with or without an info, `seed()` or `reset(seed=...)`.

gym itself is not imported: what an env returns is looked at. `done` is `truncated` where the info says
"TimeLimit.truncated", and else `terminated`. Reset options are the keyword arguments of an old `reset`; a new one is
given them as `options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import cloudpickle

from stepmill.envs import Steppable
from stepmill.envs.adapted import Adapted
from stepmill.envs.di_engine import tree_of_any
from stepmill.envs.plain import speaks_gymnasium
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Node, TupleNode

_TIME_LIMIT = "TimeLimit.truncated"


def describe(env: object, like: EnvSpec | None) -> EnvSpec:
    """Return what an old env says of itself; `like` itself if that says the same."""
    known: Any = env
    spec = EnvSpec(
        observation=tree_of_any(known.observation_space),
        action=tree_of_any(known.action_space),
        render_mode=getattr(known, "render_mode", None),
        metadata=dict(getattr(known, "metadata", None) or {}),
        spaces=bytes(cloudpickle.dumps((known.observation_space, known.action_space))),
    )
    return like if like is not None and spec == like else spec


def adapt(env: object) -> Steppable:
    """Return what the hot loop steps."""
    return cast("Steppable", OldGymEnv(env))


class OldGymEnv(Adapted):
    """Steps an env of gym for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._is_new = speaks_gymnasium(self.unwrapped)
        self._tree = tree_of_any(self.env.observation_space)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Begin an episode; a seed and options go where the env's API takes them."""
        if self._is_new:
            return _parted(self.env.reset(seed=seed, options=options), self._tree)
        if seed is not None:
            self.env.seed(seed)
        return _parted(self.env.reset(**(options or {})), self._tree)

    def step(self, action: object) -> tuple[object, object, bool, bool, Mapping[str, object]]:
        """Step. Hot path.

        Raises:
            TypeError: neither four values nor five came back.
        """
        result = self.env.step(action)
        if len(result) == 5:
            return cast("tuple[object, object, bool, bool, Mapping[str, object]]", result)
        if len(result) != 4:
            raise TypeError(f"step must return 4 values (old gym) or 5, and returned {len(result)}")
        obs, reward, done, info = result
        is_truncated = bool(done) and bool(info.get(_TIME_LIMIT, False))
        return obs, reward, bool(done) and not is_truncated, is_truncated, info


def _parted(result: Any, tree: Node) -> tuple[object, Mapping[str, object]]:
    """Return (observation, info) from what a reset returned, which may be the observation alone."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    if is_pair and isinstance(tree, TupleNode) and not isinstance(result[0], tuple):
        return result, {}  # a pair that is the observation itself: with an info there would be a tuple in its place
    return (result[0], result[1]) if is_pair else (result, {})
