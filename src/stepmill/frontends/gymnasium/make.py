"""`make_vec`: vector envs from ids in Gymnasium's registry."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from gymnasium import Env, logger
from gymnasium import spec as find_spec
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

from stepmill.envs.envpool import EnvPoolTask
from stepmill.envs.gymnasium import EnvMaker
from stepmill.envs.gymnasium_registry import portable_spec
from stepmill.frontends.gymnasium.errors import ArgumentTypeError, MissingModuleError
from stepmill.frontends.gymnasium.vector import VectorEnv
from stepmill.spec.errors import UsageError
from stepmill.spec.options import BackendName, PoolOptions

_VECTOR_ARGUMENTS = ("backend", "num_workers", "autoreset_mode", "copy", "observation_mode", "options")
_ABSENT = {
    "vectorization_mode": "choose backend='serial', 'thread' or 'process'",
    "env_fns": "use stepmill.VectorEnv(env_fns)",
}


def make_vec(
    id: str | GymnasiumSpec,  # noqa: A002  Gymnasium's name
    num_envs: int = 1,
    *,
    wrappers: Sequence[Callable[[Env[Any, Any]], Env[Any, Any]]] = (),
    vector_kwargs: Mapping[str, Any] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Make a vector env of registered envs.

    The id is looked up here, once; the workers get the spec, so that they need no registry. With `backend="envpool"` it
    is one of EnvPool's tasks, and `**kwargs` go to `envpool.make`.

    Args:
        id: an id, "module:id" to import a module that registers it, or Gymnasium's EnvSpec.
        num_envs: how many envs.
        wrappers: put around every env, the first one innermost.
        vector_kwargs: arguments of `VectorEnv`; another way to give them than by name.
        env_kwargs: arguments of the env's constructor that are called like an argument of `VectorEnv`.
        **kwargs: the arguments of `VectorEnv` by name; all others go to the env's constructor.

    Raises:
        UsageError: an argument makes no sense.
        gymnasium.error.Error: there is no such id; near names are suggested.
    """
    if kwargs.get("backend", (vector_kwargs or {}).get("backend")) == BackendName.ENVPOOL:
        return _make_envpool(
            id, _count(num_envs), wrappers, {**(vector_kwargs or {})}, {**kwargs, **(env_kwargs or {})}
        )
    spec = _find(id)
    stored = dict(spec.kwargs)
    num_envs = _count(stored.pop("num_envs", num_envs))
    wrappers = tuple(stored.pop("wrappers", wrappers))
    vector_kwargs = {**stored.pop("vector_kwargs", {}), **(vector_kwargs or {})}
    stored.pop("vectorization_mode", None)
    for name in kwargs.keys() & _ABSENT.keys():
        raise UsageError(f"stepmill.make_vec takes no {name}; {_ABSENT[name]}")
    named = {name: kwargs.pop(name) for name in _VECTOR_ARGUMENTS if name in kwargs}
    twice = sorted(named.keys() & vector_kwargs.keys() | kwargs.keys() & (env_kwargs or {}).keys())
    if twice:
        raise UsageError(f"{', '.join(twice)} came both by name and in vector_kwargs or env_kwargs; give it once")
    if spec.entry_point is None:
        raise UsageError(f"{spec.id} has no entry point for a single env; it can only be made by gymnasium.make_vec")
    arguments = {**vector_kwargs, **named}
    single_kwargs = {**stored, **kwargs, **(env_kwargs or {})}
    make_env = EnvMaker(portable_spec(replace(spec, kwargs=single_kwargs)), wrappers)
    envs = VectorEnv([make_env] * (num_envs + _count_spares(arguments)), **arguments)
    envs.spec = replace(spec, kwargs=single_kwargs | _remembered(num_envs, wrappers, arguments))
    return envs


def _make_envpool(
    task_id: object,
    num_envs: int,
    wrappers: Sequence[Any],
    vector_kwargs: dict[str, Any],
    kwargs: dict[str, Any],
) -> VectorEnv:
    if not isinstance(task_id, str):
        raise ArgumentTypeError(f"id={task_id!r} is a {type(task_id).__name__}; EnvPool's tasks are named by a text")
    if wrappers:
        raise UsageError("EnvPool's envs cannot be wrapped one by one; wrap the vector env, or leave wrappers out")
    arguments = {**vector_kwargs, **{name: kwargs.pop(name) for name in _VECTOR_ARGUMENTS if name in kwargs}}
    return VectorEnv([EnvPoolTask(task_id, kwargs)] * num_envs, **arguments)


def _count_spares(arguments: Mapping[str, Any]) -> int:
    options = arguments.get("options")
    return options.spare_envs if isinstance(options, PoolOptions) else 0


def _remembered(num_envs: int, wrappers: tuple[Any, ...], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what a spec says beside the env's own arguments, where Gymnasium's make_vec says it."""
    remembered: dict[str, Any] = {"num_envs": num_envs} if num_envs != 1 else {}
    if wrappers:
        remembered["wrappers"] = wrappers
    if arguments:
        remembered["vector_kwargs"] = arguments
    return remembered


def _count(num_envs: object) -> int:
    try:
        count = 0 if isinstance(num_envs, bool) else operator.index(num_envs)  # type: ignore[arg-type]  # checked here
    except TypeError:
        count = 0
    if count < 1:
        raise UsageError(f"num_envs={num_envs!r} must be a whole number, 1 or more")
    return count


def _find(id: str | GymnasiumSpec) -> GymnasiumSpec:  # noqa: A002  Gymnasium's name
    """Return the spec behind an id, with Gymnasium's warnings about versions."""
    if isinstance(id, GymnasiumSpec):
        return id
    if not isinstance(id, str):
        raise ArgumentTypeError(f"id={id!r} is a {type(id).__name__}; give an env's id or a gymnasium EnvSpec")
    module, _, name = id.rpartition(":")
    if module:
        _import(module)
    namespace, bare_name, version = parse_env_id(name)
    latest = find_highest_version(namespace, bare_name)
    if latest is not None and version is None:
        name = get_env_id(namespace, bare_name, latest)
        logger.warn(f"{id} names no version of the env; the latest, {name}, is used")
    elif latest is not None and version is not None and latest > version:
        logger.deprecation(f"{name} is out of date; consider version v{latest}")
    return find_spec(name)


def _import(module: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as exc:
        raise MissingModuleError(
            f"module {module!r}, which should register the env, cannot be imported: {exc}; check its name, "
            "and that its package is installed"
        ) from exc
