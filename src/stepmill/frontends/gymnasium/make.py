"""`make_vec`: vector envs from ids in Gymnasium's registry."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

from gymnasium import Env, VectorizeMode, logger
from gymnasium import spec as find_spec
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

from stepmill.envs.envpool import EnvPoolTask
from stepmill.envs.gymnasium import EnvMaker
from stepmill.envs.gymnasium_registry import portable_spec
from stepmill.frontends.gymnasium.arguments import VECTOR_NAMES, VectorKeywords
from stepmill.frontends.gymnasium.errors import ArgumentTypeError, MissingModuleError
from stepmill.frontends.gymnasium.vector import VectorEnv
from stepmill.spec.errors import EnvError, UsageError
from stepmill.spec.options import BackendName, PoolOptions, nearest_option

if TYPE_CHECKING:
    from typing_extensions import Unpack

Wrappers: TypeAlias = "Sequence[Callable[[Env[Any, Any]], Env[Any, Any]]] | None"
Mode: TypeAlias = "VectorizeMode | Literal['sync', 'async'] | None"

_BACKEND_OF_MODE = {VectorizeMode.SYNC: BackendName.SERIAL, VectorizeMode.ASYNC: BackendName.PROCESS}
_MAKE_NAMES = ("max_episode_steps", "disable_env_checker")  # what gymnasium.make takes beside the env's own arguments
# Envs of Gymnasium's whose step takes 8 us or less: so few of them are faster in line, on however many cores.
_TINY_ENVS = frozenset(
    {
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv",
        "gymnasium.envs.classic_control.mountain_car:MountainCarEnv",
        "gymnasium.envs.classic_control.pendulum:PendulumEnv",
        "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv",
        "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv",
        "gymnasium.envs.toy_text.taxi:TaxiEnv",
    }
)
_MAX_TINY_ENVS = 16
# Arguments that say nothing about where envs run. Any other one may be there for the sake of processes.
_NEUTRAL_NAMES = frozenset(
    {"autoreset_mode", "copy", "daemon", "episode_stats", "observation_mode", "seeding", "shared_memory"}
)
_OWN_NAMES = (*VECTOR_NAMES, *_MAKE_NAMES, "num_envs", "vectorization_mode", "vector_kwargs", "wrappers", "env_kwargs")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


class MakeKeywords(VectorKeywords, total=False):
    """What `make_vec` takes by name beside its own arguments and those of the env."""

    observation_mode: Any
    options: PoolOptions | None
    max_episode_steps: int | None
    disable_env_checker: bool | None
    render_mode: str | None


@overload
def make_vec(
    id: str | GymnasiumSpec,
    num_envs: int = 1,
    vectorization_mode: Mode = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Wrappers = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Unpack[MakeKeywords],
) -> VectorEnv: ...
@overload
def make_vec(
    id: str | GymnasiumSpec,
    num_envs: int = 1,
    vectorization_mode: Mode = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Wrappers = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> VectorEnv: ...
def make_vec(
    id: str | GymnasiumSpec,  # noqa: A002  Gymnasium's name
    num_envs: int = 1,
    vectorization_mode: Mode = None,
    vector_kwargs: Mapping[str, Any] | None = None,
    wrappers: Wrappers = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Make a vector env of registered envs, as `gymnasium.make_vec` does.

    The id is looked up here, once. With `backend="envpool"` it is one of EnvPool's tasks, and `**kwargs` go to
    `envpool.make`.

    Args:
        id: an id, "module:id" to import a module that registers it, or Gymnasium's EnvSpec.
        num_envs: how many envs.
        vectorization_mode: "sync" is backend="serial", "async" is backend="process"; None leaves it to the options. If
            they say nothing of it either, up to 16 of Gymnasium's tiny envs, such as CartPole, run in line.
        vector_kwargs: arguments of `VectorEnv`; another way to give them than by name.
        wrappers: put around every env, the first one innermost.
        env_kwargs: arguments of the env's constructor that are called like an argument of `VectorEnv`.
        **kwargs: max_episode_steps and disable_env_checker as for `gymnasium.make`; the arguments of `VectorEnv`, which are
            all fields of PoolOptions, too; all others go to the env's constructor.

    Raises:
        UsageError: an argument makes no sense.
        gymnasium.error.Error: there is no such id; near names are suggested.
    """
    arguments = {**(vector_kwargs or {})}
    if kwargs.get("backend", arguments.get("backend")) == BackendName.ENVPOOL:
        return _make_envpool(id, _count(num_envs), wrappers, arguments, {**kwargs, **(env_kwargs or {})})
    spec = _find(id)
    if spec.entry_point is None:
        raise UsageError(f"{spec.id} has no entry point for a single env; it can only be made by gymnasium.make_vec")
    stored = dict(spec.kwargs)
    num_envs = _count(stored.pop("num_envs", num_envs))
    wrappers = tuple(stored.pop("wrappers", wrappers or ()))
    mode = stored.pop("vectorization_mode", vectorization_mode)
    arguments = _merge_once({**stored.pop("vector_kwargs", {}), **arguments}, _pop_named(kwargs))
    single_kwargs = {**stored, **_merge_once(kwargs, env_kwargs or {})}
    make_env = _env_maker(spec, wrappers, single_kwargs)
    is_tiny = num_envs <= _MAX_TINY_ENVS and _is_tiny(make_env) and arguments.keys() <= _NEUTRAL_NAMES
    chosen = (
        {**arguments, "backend": BackendName.SERIAL} if mode is None and is_tiny else _with_backend(mode, arguments)
    )
    envs = _open([make_env] * (num_envs + _count_spares(arguments)), chosen, kwargs)
    envs.spec = replace(spec, kwargs=single_kwargs | _remembered(num_envs, wrappers, arguments, mode))
    return envs


def _pop_named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of `VectorEnv` out of keyword arguments, and return them."""
    return {name: kwargs.pop(name) for name in VECTOR_NAMES if name in kwargs}


def _merge_once(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    twice = sorted(arguments.keys() & others.keys())
    if twice:
        raise UsageError(f"{', '.join(twice)} came both by name and in vector_kwargs or env_kwargs; give it once")
    return {**arguments, **others}


def _env_maker(spec: GymnasiumSpec, wrappers: tuple[Any, ...], kwargs: Mapping[str, Any]) -> EnvMaker:
    """Return the env function; of `kwargs` some are for `gymnasium.make`, the others for the env's constructor."""
    for_env = {name: value for name, value in kwargs.items() if name not in _MAKE_NAMES}
    for_make = {name: kwargs[name] for name in _MAKE_NAMES if name in kwargs}
    return EnvMaker(portable_spec(replace(spec, kwargs=for_env)), wrappers, **for_make)


def _open(env_fns: Sequence[EnvMaker], arguments: Mapping[str, Any], unknown: Mapping[str, Any]) -> VectorEnv:
    """Return the vector env. If the envs refuse an argument that is nearly the name of an option, the error says so."""
    try:
        return VectorEnv(env_fns, **arguments)
    except EnvError as exc:
        for fault in (exc, *exc.others):
            refused = _UNEXPECTED.search(fault.message)
            near = nearest_option(refused[1], _OWN_NAMES) if refused and refused[1] in unknown else None
            if near is not None:
                fault.message += f"; did you mean {near}?"
                fault.args = (fault.message,)
        raise


def _is_tiny(make_env: EnvMaker) -> bool:
    """Whether it is known that the env's step costs less than waking a worker. Decision 18."""
    spec = make_env.spec
    has_wrappers = make_env.wrappers or spec.additional_wrappers
    return spec.entry_point in _TINY_ENVS and not has_wrappers and "render_mode" not in spec.kwargs


def _with_backend(mode: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the backend that Gymnasium's vectorization mode stands for."""
    if mode is None:
        return arguments
    try:
        known = VectorizeMode(mode)
    except ValueError:
        raise UsageError(f"vectorization_mode={mode!r} is neither 'sync' nor 'async'") from None
    if known not in _BACKEND_OF_MODE:
        raise UsageError(
            f"vectorization_mode={known.value!r} is for vector envs that make themselves; use gymnasium.make_vec, or "
            "stepmill.VectorEnv([make_vector_env]) with a function that makes one"
        )
    backend = arguments.get("backend", _BACKEND_OF_MODE[known])
    if backend != _BACKEND_OF_MODE[known]:
        raise UsageError(
            f"vectorization_mode={known.value!r} is backend={_BACKEND_OF_MODE[known].value!r}, and backend={backend!r} is "
            "given, too; give one of them"
        )
    return {**arguments, "backend": backend}


def _make_envpool(
    task_id: object, num_envs: int, wrappers: Wrappers, arguments: dict[str, Any], kwargs: dict[str, Any]
) -> VectorEnv:
    if not isinstance(task_id, str):
        raise ArgumentTypeError(f"id={task_id!r} is a {type(task_id).__name__}; EnvPool's tasks are named by a text")
    if wrappers:
        raise UsageError("EnvPool's envs cannot be wrapped one by one; wrap the vector env, or leave wrappers out")
    arguments |= _pop_named(kwargs)
    return VectorEnv([EnvPoolTask(task_id, kwargs)] * num_envs, **arguments)


def _count_spares(arguments: Mapping[str, Any]) -> int:
    options = arguments.get("options")
    spares = options.spare_envs if isinstance(options, PoolOptions) else 0
    return cast("int", arguments.get("spare_envs", spares))


def _remembered(num_envs: int, wrappers: tuple[Any, ...], arguments: dict[str, Any], mode: object) -> dict[str, Any]:
    """Return what a spec says beside the env's own arguments, where Gymnasium's make_vec says it."""
    remembered: dict[str, Any] = {"num_envs": num_envs} if num_envs != 1 else {}
    if wrappers:
        remembered["wrappers"] = wrappers
    if arguments:
        remembered["vector_kwargs"] = arguments
    if mode is not None:
        remembered["vectorization_mode"] = VectorizeMode(mode).value
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
