"""Gymnasium's registry of envs as bytes, which give a fresh worker the registrations of the learner's program.

All registrations are sent, including Gymnasium's own, because a program may have replaced some. They take only 8 kB.
`worker/program_state.py` finds this module by its name.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, registry

from stepmill._pickling import dumps
from stepmill.spec.errors import UsageError

_PLAIN_TYPES = (str, int, float, bool, type(None))
_Creator: TypeAlias = "Callable[..., Any] | str | None"


@dataclass(frozen=True)
class _Unsendable:
    """The entry point of an env whose registration could not be sent to this worker. Calling it raises the reason."""

    env_id: str
    reason: str

    def __call__(self, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"the registration of {self.env_id} cannot be sent to a worker process: {self.reason}; call gymnasium.register "
            "for it inside the env function, or use context='fork', or backend='serial' or 'thread'"
        )


def dump_registry() -> bytes:
    """Return the registrations of this process, for `load_registry` in another."""
    # Specs of strings and numbers only share one pickle. Every other spec has its own pickle, so that one that cannot be
    # pickled or loaded does not affect the others.
    plain: dict[str, EnvSpec] = {}
    special: dict[str, bytes] = {}
    for env_id, spec in list(registry.items()):
        if _is_plain(spec):
            plain[env_id] = spec
        else:
            special[env_id] = _dump_spec(env_id, spec)
    return pickle.dumps((plain, special), pickle.HIGHEST_PROTOCOL)


def load_registry(data: bytes) -> Callable[[], None]:
    """Return a function that puts the registrations into this process's registry. Call it before each env is built:
    a package that an env imports may register its envs again, and must not replace what the program registered.
    """
    plain, special = pickle.loads(data)
    specs = {**plain, **{env_id: _load_spec(env_id, spec) for env_id, spec in special.items()}}
    # A package that is imported from here on registers envs a second time, and Gymnasium warns of each.
    warnings.filterwarnings("ignore", ".*Overriding environment .* already in registry")
    return lambda: registry.update(specs)


def portable_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec with entry points in `__main__` replaced by their classes: a worker has another `__main__`."""
    return replace(spec, entry_point=_portable(spec.entry_point), vector_entry_point=_portable(spec.vector_entry_point))


def _portable(entry_point: _Creator) -> Any:
    if not isinstance(entry_point, str) or not entry_point.startswith("__main__:"):
        return entry_point
    try:
        return load_env_creator(entry_point)
    except AttributeError:  # the program does not define it, which making the env reports
        return entry_point


def _dump_spec(env_id: str, spec: EnvSpec) -> bytes:
    try:
        return dumps(portable_spec(spec))
    except Exception as exc:  # pickling runs code of the user's classes, which may raise anything
        return bytes(cloudpickle.dumps(_unsendable(env_id, exc)))


def _load_spec(env_id: str, data: bytes) -> EnvSpec:
    try:
        spec = cloudpickle.loads(data)
    except Exception as exc:  # so may loading
        return _unsendable(env_id, exc)
    return spec if isinstance(spec, EnvSpec) else _unsendable(env_id, TypeError(f"it is a {type(spec).__name__}"))


def _unsendable(env_id: str, exc: Exception) -> EnvSpec:
    return EnvSpec(env_id, entry_point=_Unsendable(env_id, f"{type(exc).__name__}: {exc}"))


def _is_plain(spec: EnvSpec) -> bool:
    is_found = _is_import_path(spec.entry_point) and _is_import_path(spec.vector_entry_point)
    return type(spec) is EnvSpec and is_found and not spec.additional_wrappers and _is_plain_value(spec.kwargs)


def _is_import_path(entry_point: _Creator) -> bool:
    """Return whether a worker finds an entry point by its name. Those of MuJoCo's old envs are functions of `gymnasium.envs`."""
    if isinstance(entry_point, str):
        return not entry_point.startswith("__main__:")
    return entry_point is None or entry_point is vars(gymnasium.envs).get(str(getattr(entry_point, "__name__", "")))


def _is_plain_value(value: Any) -> bool:
    if type(value) is dict:
        value = (*value, *value.values())
    return all(map(_is_plain_value, value)) if type(value) in (list, tuple) else type(value) in _PLAIN_TYPES
