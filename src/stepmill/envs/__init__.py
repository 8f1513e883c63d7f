"""Adapters: one module per env API, found by the dotted names of an env's classes.

An adapter is a module with two functions, `describe(env, like)` and `adapt(env)`. It may import the library of its
envs, which is already loaded if such an env exists. The only packages of stepmill that it imports are `spec` and this
one.
    gymnasium            Gymnasium envs, and objects with their `reset` and `step`. Spaces are optional.
    gymnasium_vector     Gymnasium vector envs, as batched envs
    gymnasium_registry   Gymnasium's registry of envs, as bytes for fresh workers
    known_steps          how long a step of a function's env takes, for `backend="auto"`
    mujoco_contexts      the OpenGL contexts of several MuJoCo envs in one process
    registered           adapters that a program registers, also for fresh workers
    old_gym              envs of gym, the predecessor of Gymnasium
    dm_env               dm_env environments
    pettingzoo           PettingZoo's parallel envs
    ragged               envs whose agents join and leave
    torchrl              TorchRL's single envs, with their transforms
    unity                Unity ML-Agents envs
    textarena            textarena's games
    reasoning_gym        reasoning-gym's datasets, a question per episode
    alf, alf_batch       ALF environments · several of them as one batched environment
    di_engine            DI-engine envs, and Gymnasium envs in DI-engine's API
    di_engine_managed    DI-engine envs that belong to a manager of `frontends/di_engine`
    opaque               any Python env, whose results are sent as opaque values
    envpool              pools of EnvPool, for `backends/external_pool.py`
    atari_vector         ALE's own vector env, for `backends/external_pool.py`
    env_adapter          the base class of adapters that wrap an env
    agent_stacking       values of several agents as arrays [A, ...]
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import UsageError


class Steppable(Protocol):
    """The object that the hot loop steps, with two methods of Gymnasium. A batched env's values add a dimension."""

    def step(self, action: object) -> tuple[object, object, object, object, Mapping[str, object]]:
        """Return (observation, reward, terminated, truncated, info)."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[object, Mapping[str, object]]:
        """Return (observation, info)."""


class Adapter(Protocol):
    """The functions of an adapter module."""

    def describe(self, env: object, like: EnvSpec | None) -> EnvSpec:
        """Return the spec of an env. `like` is that of another env, or None; objects that are equal may be taken from it."""

    def adapt(self, env: object) -> Steppable:
        """Return the object that the hot loop steps."""


# By dotted name of a class, the adapter of its envs, or the adapter's module. The first match in an env's method
# resolution order counts.
ADAPTERS: dict[str, str | Adapter] = {
    "gymnasium.core.Env": "stepmill.envs.gymnasium",
    "gymnasium.vector.vector_env.VectorEnv": "stepmill.envs.gymnasium_vector",
    "alf.environments.alf_environment.AlfEnvironment": "stepmill.envs.alf",
    "stepmill.envs.alf.AlfEnv": "stepmill.envs.alf",
    "stepmill.envs.opaque.OpaqueEnv": "stepmill.envs.opaque",
    "ding.envs.env.base_env.BaseEnv": "stepmill.envs.di_engine",
    "stepmill.envs.di_engine_managed.ManagedEnv": "stepmill.envs.di_engine_managed",
    "mlagents_envs.base_env.BaseEnv": "stepmill.envs.unity",
    "dm_env._environment.Environment": "stepmill.envs.dm_env",
    "gym.core.Env": "stepmill.envs.old_gym",
    "torchrl.envs.common.EnvBase": "stepmill.envs.torchrl",
    "pettingzoo.utils.env.ParallelEnv": "stepmill.envs.pettingzoo",
    "pettingzoo.utils.env.AECEnv": "stepmill.envs.pettingzoo",
    "stepmill.envs.pettingzoo.StackedAgents": "stepmill.envs.pettingzoo",
    "stepmill.envs.ragged.RaggedEnv": "stepmill.envs.ragged",
    "stepmill.envs.unity.UnityEnv": "stepmill.envs.unity",
    "textarena.core.Env": "stepmill.envs.textarena",
    "reasoning_gym.dataset.ProceduralDataset": "stepmill.envs.reasoning_gym",
    "stepmill.aio.on_demand.OnDemandEnv": "stepmill.aio.on_demand",
}
# Attributes with which wrappers of several libraries name the env that they wrap.
_INNER_ENVS = ("unwrapped", "env", "_env", "_environment", "base_env", "aec_env")
_ACCEPTED = (
    "gymnasium.Env, gymnasium.vector.VectorEnv, any object with the methods reset and step of gymnasium.Env, dm_env.Environment, pettingzoo.ParallelEnv, gym.Env, ding.envs.BaseEnv, "
    "torchrl.envs.EnvBase, mlagents_envs.BaseEnv, textarena.Env, a dataset of reasoning_gym"
)


def adapter_of(env: object) -> Adapter:
    """Return the adapter for an env.

    Raises:
        UsageError: there is no adapter for its class.
    """
    for cls in type(env).__mro__:
        home = ADAPTERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if home is not None:
            return cast("Adapter", import_module(home)) if isinstance(home, str) else home
    if not isinstance(env, type) and all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        return cast("Adapter", import_module("stepmill.envs.gymnasium"))
    raise UsageError(
        f"env_fn returned a {type(env).__module__}.{type(env).__qualname__}, which is not an env that stepmill supports; "
        f"return an instance of one of: {_ACCEPTED}; or register an adapter for it: stepmill.register_adapter"
    )


def describe(env: object, like: EnvSpec | None = None) -> EnvSpec:
    """Return the spec of an env.

    Args:
        env: the env, built and not yet reset.
        like: the spec of another env of the same worker. It is returned if this env's spec equals it, so that a thousand
            equal envs send one spec.
    Raises:
        UsageError: there is no adapter for the env, or its spaces cannot be used.
    """
    spec = adapter_of(env).describe(env, like)
    try:
        return like if like is not None and like == spec else spec
    except (ValueError, RuntimeError):  # arrays and tensors in metadata have no single truth value
        return spec


def adapt(env: object) -> Steppable:
    """Return the object that the hot loop steps for this env, which is often the env itself.

    Raises:
        UsageError: there is no adapter for the env.
    """
    return adapter_of(env).adapt(env)


def innermost(env: object) -> object:
    """Return the env inside all wrappers of an env. Envs that are not wrapped are returned.

    Gymnasium's, gym's and PettingZoo's wrappers have `unwrapped`. Others keep their env in an attribute.
    """
    seen: set[int] = set()
    while id(env) not in seen:
        seen.add(id(env))
        env = next(filter(None, (_inner(env, name) for name in _INNER_ENVS)), env)
    return env


def _inner(env: object, name: str) -> object | None:
    try:
        inner: object = getattr(env, name, None)
        return inner if callable(getattr(inner, "step", None)) else None
    except Exception:  # a property of the user's class
        return None
