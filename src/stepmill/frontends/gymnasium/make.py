"""`make_vec`: makes vector envs from ids in Gymnasium's registry, EnvPool's task ids, and the names of kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec as find_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gymnasium import Env, VectorizeMode, logger
from gymnasium import spec as find_spec
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id, registry

from stepmill.envs.gymnasium import GymnasiumEnvMaker
from stepmill.envs.gymnasium_registry import portable_spec
from stepmill.frontends.gymnasium.arguments import VECTOR_NAMES, VectorKeywords
from stepmill.frontends.gymnasium.errors import MissingModuleError
from stepmill.frontends.gymnasium.vector import VectorEnv
from stepmill.pool.arguments import checked_count
from stepmill.spec.errors import ArgumentTypeError, EnvError, MissingExtraError, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.options import BackendName, PoolOptions, merge_options, nearest_option

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

Wrappers: TypeAlias = "Sequence[Callable[[Env[Any, Any]], Env[Any, Any]]] | None"
Mode: TypeAlias = "VectorizeMode | Literal['sync', 'async'] | None"

_BACKEND_OF_MODE = {VectorizeMode.SYNC: BackendName.SERIAL, VectorizeMode.ASYNC: BackendName.PROCESS}
_MAKE_NAMES = ("max_episode_steps", "disable_env_checker")  # arguments of gymnasium.make itself
_OWN_NAMES = (*VECTOR_NAMES, *_MAKE_NAMES, "num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "env_kwargs")
_MIN_SIMILARITY = 0.85  # of 1, as difflib measures it: names that differ in a letter or two
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class MakeKeywords(VectorKeywords, total=False):
    """The keywords of `make_vec` that type checkers know: those of `VectorEnv` and of `gymnasium.make`."""

    max_episode_steps: int | None
    disable_env_checker: bool | None
    render_mode: str | None
    observation_mode: Any
    options: PoolOptions | None


def make_vec(
    id: str | GymnasiumSpec,  # noqa: A002  Gymnasium's name
    num_envs: int = 1,
    vectorization_mode: Mode = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Wrappers = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[MakeKeywords],
) -> VectorEnv:
    """Make a vector env of registered envs, as `gymnasium.make_vec` does.

    With `backend="envpool"`, the id is one of EnvPool's tasks, and `**keywords` are passed to `envpool.make`. With
    `backend="kernel"`, the id is one of `stepmill.kernels.names()`, and they are passed to `stepmill.kernels.find`.

    Args:
        id: an id; "module:id", which first imports the module that registers the id; or Gymnasium's EnvSpec.
        num_envs: the number of envs.
        vectorization_mode: "sync" means backend="serial", and "async" means backend="process". None uses the options.
        vector_kwargs: arguments of `VectorEnv`, as a mapping instead of keywords.
        wrappers: functions that are applied to each env in this order, so that the first wrapper is the innermost.
        env_kwargs: arguments of the env's constructor. Use this mapping for names that are also arguments of
            `VectorEnv`, or with a type checker, which does not know the arguments of envs.
        **keywords: max_episode_steps and disable_env_checker as for `gymnasium.make`; the arguments of `VectorEnv`, which
            include all fields of PoolOptions. All other keywords are passed to the env's constructor.

    Raises:
        UsageError: an argument is invalid.
        gymnasium.error.Error: the id is not registered. The message suggests similar ids.
    """
    kwargs: dict[str, Any] = {**keywords}
    arguments = {**(vector_kwargs or {})}
    if (backend := kwargs.get("backend", arguments.get("backend"))) in _NOT_REGISTERED:
        arguments |= _pop_named(kwargs)
        other = _make_other(backend, id, wrappers, {**kwargs, **(env_kwargs or {})})
        return VectorEnv([other] * checked_count(num_envs), **arguments)
    spec = registered_spec(id)
    if spec.entry_point is None:
        raise UsageError(f"{spec.id} has no entry point for a single env; it can only be made by gymnasium.make_vec")
    stored = dict(spec.kwargs)
    num_envs = checked_count(stored.pop("num_envs", num_envs))
    wrappers = tuple(stored.pop("wrappers", wrappers or ()))
    mode = stored.pop("vectorization_mode", vectorization_mode)
    arguments = _merge_once({**stored.pop("vector_kwargs", {}), **arguments}, _pop_named(kwargs))
    single_kwargs = {**stored, **_merge_once(kwargs, env_kwargs or {})}
    make_env = _env_maker(spec, wrappers, single_kwargs)
    chosen = _with_backend(mode, arguments)
    envs = _open([make_env] * (num_envs + _count_spares(arguments)), chosen, kwargs)
    envs.spec = replace(spec, kwargs=single_kwargs | _remembered(num_envs, wrappers, arguments, mode))
    return envs


def _pop_named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of `VectorEnv` from keyword arguments, and return them."""
    return {name: kwargs.pop(name) for name in VECTOR_NAMES if name in kwargs}


def _merge_once(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    twice = sorted(arguments.keys() & others.keys())
    if twice:
        raise UsageError(f"got {', '.join(twice)} both as a keyword and in vector_kwargs or env_kwargs; give it once")
    return {**arguments, **others}


def _env_maker(spec: GymnasiumSpec, wrappers: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GymnasiumEnvMaker:
    """Return the env function. Its `kwargs` are for `gymnasium.make` and for the env's constructor."""
    for_env = {name: value for name, value in kwargs.items() if name not in _MAKE_NAMES}
    for_make = {name: kwargs[name] for name in _MAKE_NAMES if name in kwargs}
    return GymnasiumEnvMaker(portable_spec(replace(spec, kwargs=for_env)), wrappers, **for_make)


def _open(env_fns: Sequence[GymnasiumEnvMaker], arguments: Mapping[str, Any], unknown: Mapping[str, Any]) -> VectorEnv:
    """Return the vector env. Name the option that an unknown argument resembles, in the env's error or in a warning."""
    try:
        envs = VectorEnv(env_fns, **arguments)
    except EnvError as exc:
        for fault in (exc, *exc.others):
            found = _UNEXPECTED.search(fault.message)
            near = nearest_option(found[1], _OWN_NAMES) if found and found[1] in unknown else None
            if near is not None:
                fault.message += f"; did you mean {near}?"
                fault.args = (fault.message,)
        raise
    for name in unknown.keys() - set(_OWN_NAMES):
        # Short names of options in records, such as `host`, may be those of any env.
        near = nearest_option(name, _OWN_NAMES, cutoff=_MIN_SIMILARITY) if "_" in name else None
        if near:
            warn(
                f"{name} is passed to the constructor of the envs; if you meant stepmill's {near}, correct the name; if "
                f"not, use env_kwargs={{{name!r}: ...}}",
                UserWarning,
            )
    return envs


def _with_backend(mode: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the backend that corresponds to Gymnasium's vectorization mode."""
    if mode is None:
        return arguments
    try:
        known = VectorizeMode(mode)
    except ValueError:
        raise UsageError(f"vectorization_mode={mode!r} is invalid; give 'sync', 'async' or None") from None
    if known not in _BACKEND_OF_MODE:
        raise UsageError(
            f"vectorization_mode={known.value!r} is for envs that are vector envs already; use gymnasium.make_vec, or "
            "stepmill.VectorEnv([make_vector_env]) with a function that makes one"
        )
    backend = arguments.get("backend", _BACKEND_OF_MODE[known])
    if backend != _BACKEND_OF_MODE[known]:
        raise UsageError(
            f"vectorization_mode={known.value!r} means backend={_BACKEND_OF_MODE[known].value!r}, which contradicts "
            f"backend={backend!r}; give one of the two"
        )
    return {**arguments, "backend": backend}


# Backends whose ids are not in Gymnasium's registry: what the id is, and whose single envs cannot be wrapped.
_NOT_REGISTERED = {
    BackendName.ENVPOOL: ("the id of an EnvPool task", "EnvPool"),
    BackendName.KERNEL: ("the name of a kernel", "a kernel"),
}


def _make_other(backend: str, id_: object, wrappers: Wrappers, kwargs: dict[str, Any]) -> Callable[[], object]:
    """Return the env function of EnvPool's task, or of a kernel that is part of stepmill."""
    wanted, owner = _NOT_REGISTERED[BackendName(backend)]
    if not isinstance(id_, str):
        raise ArgumentTypeError(f"id={id_!r} is a {type(id_).__name__}; give {wanted}, a str")
    if wrappers:
        raise UsageError(f"single envs of {owner} cannot be wrapped; wrap the vector env, or leave wrappers out")
    if backend == BackendName.ENVPOOL:
        from stepmill.envs.envpool import EnvPoolTask

        return EnvPoolTask(id_, kwargs)
    kwargs.pop("disable_env_checker", None)  # nothing checks kernels
    if kwargs.get("render_mode", "") is None:
        del kwargs["render_mode"]
    # Imported here: programs without kernels do not wait for the import.
    kernel: Callable[[], object] = import_module("stepmill.kernels").find(id_, **kwargs)
    return kernel


def _count_spares(arguments: Mapping[str, Any]) -> int:
    resets = {name: arguments[name] for name in ("resets",) if name in arguments}
    return merge_options(arguments.get("options"), resets).resets.spare_envs


def _remembered(num_envs: int, wrappers: tuple[Any, ...], arguments: dict[str, Any], mode: object) -> dict[str, Any]:
    """Return the arguments of `make_vec` that `VectorEnv.spec` stores, as Gymnasium's make_vec stores them."""
    remembered: dict[str, Any] = {"num_envs": num_envs} if num_envs != 1 else {}
    if wrappers:
        remembered["wrappers"] = wrappers
    if arguments:
        remembered["vector_kwargs"] = arguments
    if mode is not None:
        remembered["vectorization_mode"] = VectorizeMode(mode).value
    return remembered


def registered_spec(id: str | GymnasiumSpec) -> GymnasiumSpec:  # noqa: A002  Gymnasium's name
    """Return the spec of an id, with Gymnasium's warnings about versions."""
    if isinstance(id, GymnasiumSpec):
        return id
    if not isinstance(id, str):
        raise ArgumentTypeError(f"id={id!r} is a {type(id).__name__}; give the id of an env or a gymnasium EnvSpec")
    module, _, name = id.rpartition(":")
    if module:
        _import(module)
    namespace, bare_name, version = parse_env_id(name)
    if namespace == "ALE" and name not in registry:  # as `stepmill run` does
        if find_module("ale_py") is None:
            raise MissingExtraError(module="ale_py", extra="atari")
        _import("ale_py")
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
            f"cannot import module {module!r}, which should register the env: {exc}; check its name, and that its package "
            "is installed"
        ) from exc


@dataclass(frozen=True)
class _EntryPoint:
    """The function that `gymnasium.make_vec` calls with its own keywords and those of the env's registration."""

    spec: GymnasiumSpec
    options: Mapping[str, Any] = field(repr=False)

    def __call__(self, **kwargs: Any) -> VectorEnv:
        return make_vec(self.spec, **{**self.options, **kwargs})


class VectorEntryPoints:
    """The entry points that `install_vector_entry_points` has set. As a context manager, it uninstalls them at its end."""

    def __init__(self, specs: Iterable[GymnasiumSpec], options: Mapping[str, Any]) -> None:
        self._installed: list[tuple[GymnasiumSpec, object, Any]] = []
        for spec in specs:
            # The keywords of the registration are left out, because Gymnasium adds them to each call.
            ours = _EntryPoint(replace(spec, kwargs={}, vector_entry_point=None), options)
            self._installed.append((spec, ours, spec.vector_entry_point))
            spec.vector_entry_point = ours

    def uninstall(self) -> None:
        """Restore the entry points that the envs had before, except those that were replaced meanwhile."""
        for spec, ours, previous in reversed(self._installed):
            if spec.vector_entry_point is ours:
                spec.vector_entry_point = previous

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install_vector_entry_points(
    ids: Iterable[str], *, replace_others: bool = False, **options: Unpack[VectorKeywords]
) -> VectorEntryPoints:
    """Let `gymnasium.make_vec(id, num_envs, vectorization_mode="vector_entry_point")` make a `VectorEnv` of stepmill.

    This is for libraries that call `gymnasium.make_vec`, such as RLlib and skrl. It sets the entry points of this
    process only. If a library makes its envs in other processes, call it in these processes.

    Args:
        ids: ids of registered envs. "module:id" imports the module first.
        replace_others: whether to replace the vector entry points that envs have already, as CartPole-v1 does.
        **options: keywords of `VectorEnv`, for all of them. Keywords of `gymnasium.make_vec` override them.

    Returns:
        An object whose `uninstall()` restores the entry points that were there before. It is also a context manager.

    Raises:
        UsageError: an env already has a vector entry point, or `VectorEnv` has no such keyword. Nothing is installed.
        gymnasium.error.Error: an id is not registered.
    """
    if unknown := sorted(options.keys() - set(VECTOR_NAMES)):
        raise UsageError(f"{', '.join(unknown)}: VectorEnv has no such keyword")
    specs = [registered_spec(id_) for id_ in ([ids] if isinstance(ids, str) else ids)]
    taken = [spec.id for spec in specs if spec.vector_entry_point is not None]
    if taken and not replace_others:
        raise UsageError(
            f"{', '.join(taken)} have a vector entry point already; give replace_others=True to use stepmill's in its place "
            "until it is uninstalled"
        )
    return VectorEntryPoints(specs, options)
