"""`OnDemandEnv`: an env in a worker that its first reset builds and a certain reset closes. This module is its adapter."""

from __future__ import annotations

import ctypes
import gc
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmill.spec.env import EnvSpec

CLOSE = {"stepmill.close": True}
"""The options of a reset that closes the env and begins no episode. So deadlines, faults and replays treat it as a reset."""


class OnDemandEnv:
    """An env, or the place for one. The first env of each worker thread is built at once; its spec is that of all."""

    def __init__(self, make_env: Callable[[], object]) -> None:
        self._make_env = make_env
        self._spec: EnvSpec | None = None
        self._env: Any = None  # None while it is not built

    def __getattr__(self, name: str) -> Any:
        if self._env is None:
            raise AttributeError(f"the env is not built, so it has no {name!r}; its reset builds it")
        return getattr(self._env, name)

    def describe(self, like: EnvSpec | None) -> EnvSpec:
        """Return `like` as the spec of the env. If it is None, build the env and return its own spec."""
        self._spec = like
        return self._build() if like is None else like

    def reset(self, **arguments: Any) -> Any:
        """Build the env if necessary, and reset it; or close it if the options say so."""
        if arguments.get("options") == CLOSE:
            closing = self.close()
            return self._await_close(closing) if inspect.isawaitable(closing) else self._end_close()
        if self._env is None:
            self._build()
        return self._env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """Step the env. Hot path."""
        return self._env.step(action)

    def close(self) -> Any:
        """Close the env if it is built, and return the result to await. Its memory is freed even if `close` raises."""
        env, self._env = self._env, None
        vars(self).pop("step", None)
        close = getattr(env, "close", None)
        return None if close is None else close()

    async def _await_close(self, closing: Awaitable[Any]) -> Any:
        await closing
        return self._end_close()

    def _end_close(self) -> Any:
        _free_memory()
        assert self._spec is not None  # of the env that was closed, or of the first one
        return import_module("stepmill.envs.agent_stacking").zeros(self._spec.observation), {}

    def _build(self) -> EnvSpec:
        adapters: Any = import_module("stepmill.envs")  # by name, because it imports other libraries
        env = self._make_env()
        spec: EnvSpec = adapters.describe(env, self._spec)
        self._env = adapters.adapt(env)
        if self._spec is not None and not spec.is_compatible(self._spec):
            name = next(name for name, value in vars(spec).items() if value != getattr(self._spec, name))
            self.close()
            raise ValueError(
                f"the env that was built on demand has the {name} {getattr(spec, name)}, and the first env of its worker "
                f"{getattr(self._spec, name)}; give all envs of a pool the same"
            )
        self._spec = self._spec or spec
        if inspect.iscoroutinefunction(self._env.step):
            vars(self)["step"] = self._env.step  # the worker looks at it
        return spec


describe = OnDemandEnv.describe


def adapt(env: OnDemandEnv) -> OnDemandEnv:
    """Return the env itself."""
    return env


def _free_memory() -> None:
    """Return the memory of a closed env to the system, including that of reference cycles."""
    gc.collect()
    with suppress(AttributeError):  # a libc without it returns memory by itself
        ctypes.CDLL(None).malloc_trim(0)
