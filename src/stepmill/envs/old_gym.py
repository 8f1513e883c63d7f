"""Envs of gym, the predecessor of Gymnasium. `step` returns four values or five, `reset` may return an info, and the
seed is passed to `seed()` or to `reset(seed=...)`.

gym itself is not imported: the adapter looks at what an env returns. `done` is `truncated` if the info has
"TimeLimit.truncated", else `terminated`. Reset options are keyword arguments of a `reset` before gym 0.26, and the argument
`options` of a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import cloudpickle

from stepmill.envs.di_engine import tree_of_any
from stepmill.envs.env_adapter import EnvAdapter
from stepmill.envs.opaque import has_gymnasium_api
from stepmill.spec.env import EnvSpec
from stepmill.spec.tree import Node, TupleNode

_TIME_LIMIT = "TimeLimit.truncated"


def describe(env: object, _like: EnvSpec | None) -> EnvSpec:
    """Return the spec of a gym env."""
    known: Any = env
    return EnvSpec(
        observation=tree_of_any(known.observation_space),
        action=tree_of_any(known.action_space),
        render_mode=getattr(known, "render_mode", None),
        metadata=dict(getattr(known, "metadata", None) or {}),
        spaces=bytes(cloudpickle.dumps((known.observation_space, known.action_space))),
    )


class OldGymEnv(EnvAdapter):
    """Steps an env of gym for the hot loop."""

    def __init__(self, env: object) -> None:
        super().__init__(env)
        self._is_new = has_gymnasium_api(self.unwrapped)
        self._tree = tree_of_any(self.env.observation_space)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Begin an episode, and pass the seed and options in the way of the env's API."""
        if self._is_new:
            return _split_reset(self.env.reset(seed=seed, options=options), self._tree)
        if seed is not None:
            self.env.seed(seed)
        return _split_reset(self.env.reset(**(options or {})), self._tree)

    def step(self, action: object) -> tuple[object, object, bool, bool, Mapping[str, object]]:
        """Step the env. Hot path.

        Raises:
            TypeError: the env returned neither four values nor five.
        """
        result = self.env.step(action)
        if len(result) == 5:
            return cast("tuple[object, object, bool, bool, Mapping[str, object]]", result)
        if len(result) != 4:
            raise TypeError(f"step must return 4 values (old gym) or 5, and returned {len(result)}")
        obs, reward, done, info = result
        is_truncated = bool(done) and bool(info.get(_TIME_LIMIT, False))
        return obs, reward, bool(done) and not is_truncated, is_truncated, info


adapt = OldGymEnv


def _split_reset(result: Any, tree: Node) -> tuple[object, Mapping[str, object]]:
    """Return (observation, info) of the result of a reset, which may be the observation alone."""
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    if is_pair and isinstance(tree, TupleNode) and not isinstance(result[0], tuple):
        return result, {}  # the pair is the observation; with an info, result[0] would be the observed tuple
    return (result[0], result[1]) if is_pair else (result, {})
