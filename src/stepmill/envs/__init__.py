"""The door: one adapter per env API, found by the dotted names of an env's classes.

An adapter is a module with two functions, `describe(env, like)` and `adapt(env)`. It imports its foreign library, which
is there already if such an env is, and of stepmill only `spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError


class Steppable(Protocol):
    """What the hot loop steps: Gymnasium's two functions. A batched env's have a leading dimension everywhere."""

    def step(self, action: object) -> tuple[object, object, object, object, Mapping[str, object]]:
        """Return observation, reward, terminated, truncated, info."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Return observation, info."""


class Adapter(Protocol):
    """What a module of this package offers."""

    def describe(self, env: object, like: EnvSpec | None) -> EnvSpec:
        """Return what the env says of itself; `like` itself if that says the same."""

    def adapt(self, env: object) -> Steppable:
        """Return what the hot loop steps."""


# Dotted name of a class → the module that knows its envs. The first hit in an env's method resolution order counts.
ADAPTERS = {
    "gymnasium.core.Env": "stepmill.envs.gymnasium",
    "gymnasium.vector.vector_env.VectorEnv": "stepmill.envs.batched",
    "alf.environments.alf_environment.AlfEnvironment": "stepmill.envs.alf",
    "stepmill.envs.alf.AlfEnv": "stepmill.envs.alf",
    "stepmill.envs.plain.PlainEnv": "stepmill.envs.plain",
    "ding.envs.env.base_env.BaseEnv": "stepmill.envs.di_engine",
    "stepmill.envs.di_managed.ManagedEnv": "stepmill.envs.di_managed",
    "mlagents_envs.base_env.BaseEnv": "stepmill.envs.unity",
    "dm_env._environment.Environment": "stepmill.envs.dm_env",
    "gym.core.Env": "stepmill.envs.old_gym",
    "pettingzoo.utils.env.ParallelEnv": "stepmill.envs.pettingzoo",
    "pettingzoo.utils.env.AECEnv": "stepmill.envs.pettingzoo",
    "stepmill.envs.pettingzoo.StackedAgents": "stepmill.envs.pettingzoo",
    "stepmill.envs.ragged.RaggedEnv": "stepmill.envs.ragged",
    "stepmill.envs.unity.UnityEnv": "stepmill.envs.unity",
}
_ACCEPTED = (
    "gymnasium.Env, gymnasium.vector.VectorEnv, dm_env.Environment, pettingzoo.ParallelEnv, gym.Env, ding.envs.BaseEnv, "
    "mlagents_envs.BaseEnv"
)


def adapter_of(env: object) -> Adapter:
    """Return the adapter for an env.

    Raises:
        UsageError: no adapter knows its class.
    """
    for cls in type(env).__mro__:
        home = ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if home is not None:
            return cast("Adapter", import_module(home))
    raise UsageError(
        f"env_fn returned a {type(env).__module__}.{type(env).__qualname__}, which is no env that stepmill knows; "
        f"return an instance of one of: {_ACCEPTED}"
    )


def describe(env: object, like: EnvSpec | None = None) -> EnvSpec:
    """Return what an env says of itself.

    Args:
        env: the env, built and not yet reset.
        like: the spec of another env of the same worker. If this env says the same, it is returned, so that a
            thousand equal envs ship one spec.
    Raises:
        UsageError: no adapter knows the env, or its spaces cannot be used.
    """
    return adapter_of(env).describe(env, like)


def adapt(env: object) -> Steppable:
    """Return what the hot loop steps for this env: mostly the env itself.

    Raises:
        UsageError: no adapter knows the env.
    """
    return adapter_of(env).adapt(env)
