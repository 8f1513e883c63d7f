"""Adapters that a program registers, and their registry as bytes, which gives them to fresh workers.

`worker/program_state.py` finds this module by its name.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib import import_module

from stepmill._pickling import dumps
from stepmill.envs import ADAPTERS, Adapter
from stepmill.spec.errors import UsageError

_registered: dict[str, str | Adapter] = {}


def register_adapter(env_class: type | str, adapter: Adapter | str) -> None:
    """Let pools take envs of an API that stepmill does not know, even in workers that are started fresh.

    Register adapters before the pool is made. The first class in an env's method resolution order that has an adapter
    counts. Another adapter for the same class replaces the first.

    Args:
        env_class: a class of envs, or its dotted name, so that its library need not be imported.
        adapter: an object or module with two functions, or the name of such a module. `describe(env, like)` returns the
            EnvSpec of an env, or `like` if that is equal; `like` is the spec of the worker's last env, or None.
            `adapt(env)` returns the object that is stepped: `reset(seed=, options=)` returns (observation, info),
            `step(action)` returns (observation, reward, terminated, truncated, info), as the spec describes them.
    Raises:
        UsageError: the adapter lacks one of the functions, or its module cannot be imported.
    """
    name = env_class if isinstance(env_class, str) else f"{env_class.__module__}.{env_class.__qualname__}"
    try:
        functions = import_module(adapter) if isinstance(adapter, str) else adapter
    except ImportError as exc:
        raise UsageError(
            f"the adapter of {name} is {adapter!r}, which cannot be imported: {exc}; check its name"
        ) from exc
    missing = [each for each in ("describe", "adapt") if not callable(getattr(functions, each, None))]
    if missing:
        raise UsageError(
            f"the adapter of {name}, {adapter!r}, has no {' and no '.join(missing)}; give it describe and adapt"
        )
    ADAPTERS[name] = _registered[name] = adapter


def dump_registry() -> bytes:
    """Return the registered adapters of this process, for `load_registry` in another."""
    try:
        return dumps(_registered)
    except Exception as exc:  # pickling runs code of the user's classes, which may raise anything
        raise UsageError(
            f"the registered adapters ({', '.join(_registered)}) cannot be pickled: {type(exc).__name__}: {exc}; make each a module "
            "of two functions, or use context='fork'"
        ) from exc


def load_registry(data: bytes) -> Callable[[], None]:
    """Return a function that registers the adapters in this process."""
    adapters = pickle.loads(data)
    return lambda: ADAPTERS.update(adapters)
