"""Finds the env that an id names, and makes the function that builds it in a worker; loads the user's policy.

Only this file of the package imports Gymnasium and ale_py to build envs. The id is resolved in this process, and workers get
Gymnasium's resolved `EnvSpec`, so that they need not register the env again.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from os import getcwd
from typing import TYPE_CHECKING, TypeAlias, cast

from stepmill.spec.errors import MissingExtraError, UsageError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

ATARI_MODULE = "ale_py"
ATARI_EXTRA = "atari"
FRAME_SKIP = 4
SCREEN_SIZE_PX = 84
STACK_SIZE = 4
NUM_SUGGESTIONS = 3


@dataclass(frozen=True)
class EnvChoice:
    """An env that was found.

    Attributes:
        env_id: the full id of the env.
        make: the function that builds the env.
        is_atari: whether the env gets the Atari preprocessing.
        module: the module that registers the id, or has the class or function; empty if a program need not import one.
        env_kwargs: arguments of the env's constructor that the user gave.
        is_function: whether the id names a class or function, which is not registered.
    """

    env_id: str
    make: Callable[[], object]
    is_atari: bool
    module: str = ""
    env_kwargs: tuple[tuple[str, object], ...] = ()
    is_function: bool = False


def find_env(env_id: str, *, atari: bool | None = None, env_kwargs: Mapping[str, object] | None = None) -> EnvChoice:
    """Resolve a Gymnasium id, or the name of a class or function that makes envs.

    Args:
        env_id: `Id`, `namespace/Id`, `module:Id` or `module:Class`; the module is imported first, so that it can register the id.
        atari: whether the env gets the standard Atari preprocessing; None means that ids of ale_py do.
        env_kwargs: arguments of the env's constructor, and for a registered id also `max_episode_steps`.

    Raises:
        UsageError: there is no such id (the message names the nearest), its module cannot be imported, or it is not an
            Atari env.
        MissingExtraError: the id is Atari's, and ale_py or OpenCV is not installed.
    """
    module, _, name = env_id.rpartition(":")
    if module.endswith(".py"):
        raise UsageError(f"{env_id!r} names a file; drop the .py: {module.removesuffix('.py')}:{name}")
    imported = import_user_module(module, needed_by=env_id) if module else None
    given = tuple((env_kwargs or {}).items())
    own = getattr(imported, name, None)
    if callable(own) and _registered(name) is None:
        if atari:
            raise UsageError(f"{env_id!r} is not an Atari env of ale_py; leave --atari out")
        made = partial(own, **env_kwargs) if env_kwargs else own
        return EnvChoice(env_id, made, is_atari=False, module=module, env_kwargs=given, is_function=True)
    spec = _lookup(name, imported)
    if spec.entry_point is None:
        raise UsageError(f"{spec.id!r} exists only as a vector env, which stepmill cannot run; choose another id")
    kwargs = {**spec.kwargs, **(env_kwargs or {})}
    limit = cast("int | None", kwargs.pop("max_episode_steps", spec.max_episode_steps))  # as gymnasium.make takes it
    spec = replace(spec, kwargs=kwargs, max_episode_steps=limit)
    is_ale = str(spec.entry_point).startswith(f"{ATARI_MODULE}.")
    if atari and not is_ale:
        raise UsageError(f"{spec.id!r} is not an Atari env of ale_py; leave --atari out")
    module = module or (ATARI_MODULE if is_ale else "")
    if is_ale and (atari or (atari is None and spec.kwargs.get("obs_type") != "ram")):
        _require_atari("cv2")
        return EnvChoice(spec.id, partial(make_atari, spec), is_atari=True, module=module, env_kwargs=given)
    from stepmill.envs.gymnasium import GymnasiumEnvMaker

    # As Gymnasium does, but without the passive checker: stepmill checks every result.
    make = partial(make_ale, spec) if is_ale else GymnasiumEnvMaker(spec, disable_env_checker=True)
    return EnvChoice(spec.id, make, is_atari=False, module=module, env_kwargs=given)


def make_ale(spec: GymnasiumSpec) -> gymnasium.Env[object, object]:
    """Build an env of ale_py as Gymnasium does, in a worker."""
    import gymnasium

    _silence_ale()
    return cast("gymnasium.Env[object, object]", gymnasium.make(spec, disable_env_checker=True))


def make_atari(spec: GymnasiumSpec) -> gymnasium.Env[object, object]:
    """Build an Atari env with the standard preprocessing, in a worker.

    The observation is uint8 [4, 84, 84]: one frame in 4, in grayscale.
    """
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    _silence_ale()
    env = gymnasium.make(spec, disable_env_checker=True, frameskip=1)
    gray = AtariPreprocessing(env, frame_skip=FRAME_SKIP, screen_size=SCREEN_SIZE_PX, grayscale_obs=True)
    return cast("gymnasium.Env[object, object]", FrameStackObservation(gray, STACK_SIZE))


def batch_actions(space: gymnasium.Space[object], batch_size: int, seed: int | None) -> gymnasium.Space[object]:
    """Return the space of `batch_size` actions at once, seeded; None seeds it from the system's entropy."""
    from gymnasium.vector.utils import batch_space

    actions = batch_space(space, batch_size)
    actions.seed(seed)
    return cast("gymnasium.Space[object]", actions)


def import_user_module(module: str, *, needed_by: str) -> object:
    """Import a module that the user named.

    Raises:
        UsageError: the import raised.
    """
    try:
        return import_module(module)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"cannot import module {module!r} of {needed_by!r} ({cause}); check that it is on the path or in the current "
            "directory"
        ) from error


def near_ids(env_id: str, known: Iterable[str]) -> list[str]:
    """Return up to three ids that the user may have meant, the most likely first."""
    by_lower = {name.lower(): name for name in known}
    wanted = env_id.lower()
    if wanted in by_lower:
        return [by_lower[wanted]]
    namespace, bare = _split(wanted)
    same_name = [name for name in by_lower if _split(name)[1] == bare]
    # Ids of the same name first (the wanted namespace, then the newest version), then ids of a similar spelling.
    same_name.sort(reverse=True)
    same_name.sort(key=lambda name: _split(name)[0] != namespace)
    alike = difflib.get_close_matches(wanted, by_lower, n=2 * NUM_SUGGESTIONS, cutoff=0.6)
    return [by_lower[name] for name in dict.fromkeys([*same_name, *alike])][:NUM_SUGGESTIONS]


def _split(env_id: str) -> tuple[str, str]:
    """`ale/pong-v5` -> `("ale", "pong")`."""
    namespace, _, rest = env_id.rpartition("/")
    return namespace, rest.rpartition("-v")[0] or rest


def _lookup(name: str, module: object = None) -> GymnasiumSpec:
    import gymnasium

    spec = _registered(name)
    if spec is None and _register_ale(name):
        spec = _registered(name)
    if spec is None:
        own = (key for key, value in vars(module).items() if isinstance(value, type)) if module is not None else ()
        names = near_ids(name, (*gymnasium.registry, *own))
        hint = (
            f"did you mean {' or '.join(names)}?"
            if names
            else "use `module:Id` to import the module that registers it, or `module:Class`"
        )
        raise UsageError(f"unknown env id {name!r}; {hint}")
    return spec


def _registered(name: str) -> GymnasiumSpec | None:
    """Return the spec of an id, or None; an id without a version means the newest."""
    import gymnasium
    from gymnasium.envs.registration import find_highest_version, get_env_id, parse_env_id

    if name in gymnasium.registry:
        return gymnasium.registry[name]
    try:
        namespace, bare, version = parse_env_id(name)
    except gymnasium.error.Error:
        return None
    if version is not None:
        return None
    newest = find_highest_version(namespace, bare)
    return gymnasium.registry.get(get_env_id(namespace, bare, newest))


def _register_ale(name: str) -> bool:
    """Register the Atari ids if ale_py is installed, and return whether it did.

    Raises:
        MissingExtraError: ale_py is not installed, and the id is certainly Atari's.
    """
    if find_spec(ATARI_MODULE) is None:
        if name.startswith("ALE/"):
            _require_atari(ATARI_MODULE)
        return False
    import gymnasium

    gymnasium.register_envs(import_module(ATARI_MODULE))
    return True


def _require_atari(module: str) -> None:
    if find_spec(module) is None:
        raise MissingExtraError(module=module, extra=ATARI_EXTRA)


def _silence_ale() -> None:
    """Suppress ALE's banner, which would disturb the live view."""
    ale = import_module(ATARI_MODULE)
    ale.ALEInterface.setLoggerMode(ale.LoggerMode.Error)


# A function of (obs, action_space) that returns the actions of one batch. `obs` has arrays of shape [B, ...], in dicts and tuples
# where the env has them. `action_space` is Gymnasium's space of B actions at once, seeded with --seed.
Policy: TypeAlias = "Callable[[object, gymnasium.Space[object]], object]"


def act_randomly(_obs: object, action_space: gymnasium.Space[object]) -> object:
    """Return one sample of the action space."""
    return action_space.sample()


def load_policy(path: str) -> Policy:
    """Return the policy that `module:function` names.

    Raises:
        UsageError: there is no such function.
    """
    return cast("Policy", load_function("--policy", path, takes="(obs, action_space)"))


def load_function(option: str, path: str, *, takes: str = "()") -> Callable[..., object]:
    """Return the function that `module:function` names, for an option of the command line.

    Raises:
        UsageError: there is no such function.
    """
    found = load_object(option, path)
    if not callable(found):
        raise UsageError(f"{option} {path!r} is a {type(found).__name__}, not a function of {takes}")
    return found


def load_object(option: str, path: str) -> object:
    """Return what `module:name` names, for an option of the command line.

    The current directory is searched first, as `python` does for a script there.

    Raises:
        UsageError: there is no such object.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{option} {path!r} is not of the form module:function")
    if module.endswith(".py"):
        raise UsageError(f"{option} {path!r} names a file; drop the .py: {module.removesuffix('.py')}:{name}")
    search_current_directory()
    found: object = import_user_module(module, needed_by=f"{option} {path}")
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{option} {path!r}: module {module!r} has no {name!r}; give the name of a function in it")
        found = getattr(found, part)
    return found


def search_current_directory() -> None:
    """Add the current directory to `sys.path`: the installed command, unlike `python -m`, does not search it."""
    here = getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
