"""Gives access to one env of a parallel environment: to its methods as promises, and to its attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from stepmill.frontends.alf import nests
from stepmill.frontends.alf.errors import as_runtime_error
from stepmill.frontends.alf.nests import converter
from stepmill.frontends.alf.specs import AlfSpecs, HasSpecs
from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError, raising_as

Value = TypeVar("Value")


class Promise(Generic[Value]):
    """The future result of a call. Calling the promise waits for it; repeated calls return it again, in any order."""

    def __init__(self, fetch: Callable[[], Value]) -> None:
        """`fetch()` waits for the result, and returns the same one each time."""
        self._fetch = fetch

    def __call__(self) -> Value:
        """Wait for the result and return it.

        Raises:
            EnvError: the env raised, also a RuntimeError.
            WorkerDied: its process ended.
        """
        with raising_as(as_runtime_error):
            return self._fetch()


class Once(Generic[Value]):
    """Calls a function on its first call, and returns its result, or raises its error, on every call."""

    def __init__(self, function: Callable[[], Value]) -> None:
        self._function: Callable[[], Value] | None = function
        self._value: Value
        self._error: StepmillError | None = None

    def __call__(self) -> Value:
        """Return the result of the first call, or raise its error."""
        if self._function is not None:
            function, self._function = self._function, None
            try:
                self._value = function()
            except StepmillError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._value


class EnvMethods(HasSpecs):
    """The methods of ALF's ProcessEnvironment for one env of a pool. Other attributes are read from the env in its process."""

    _env_id = 0
    _fields: Sequence[str] = ()  # the fields of a TimeStep, for errors

    def _running_pool(self) -> Pool:
        """Return the pool if the env may be used."""
        raise NotImplementedError

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Step this env; return its TimeStep, or a promise of it if not `blocking`.

        Raises:
            EnvError, WorkerDied, EnvTimeout: the env failed; also a RuntimeError.
            BusyEnvError: the result of its last step was not received.
        """
        promise = self.call("step", action)
        return promise() if blocking else promise

    def reset(self, blocking: bool = True) -> Any:
        """Reset this env; return its TimeStep, or a promise of it if not `blocking`."""
        promise = self.call("reset")
        return promise() if blocking else promise

    def call(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Promise[Any]:
        """Start a call of a method of the env, or of a function that takes the env; return a promise of its result."""
        if name == "step":
            return self._begin_step(*args, **kwargs)
        if name == "reset":
            return self._begin_reset(*args, **kwargs)
        return call_one(self._running_pool(), self._env_id, _close if name == "close" else name, *args, **kwargs)

    def render(self, mode: str = "human") -> Any:
        """Render the env and wait for the frame."""
        return self.call("render", mode)()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        pool = self._running_pool()
        try:
            return pool.get_attr(name, env_ids=[self._env_id])[0]
        except StepmillError as error:
            if getattr(error, "error_type", "").rpartition(".")[2] == "AttributeError":
                raise AttributeError(str(error)) from error
            raise as_runtime_error(error) from error

    def _idle_pool(self) -> Pool:
        """Return the pool if a step may begin."""
        return self._running_pool()

    def _begin_step(self, action: Any) -> Promise[Any]:
        pool = self._idle_pool()
        to_batch = self._converters[0]
        return self._promised(lambda: pool.send(to_batch(action), env_ids=[self._env_id]))

    def _begin_reset(self) -> Promise[Any]:
        pool = self._idle_pool()
        return self._promised(lambda: pool.reset_async(env_ids=[self._env_id]))

    def _promised(self, command: Callable[[], object]) -> Promise[Any]:
        with raising_as(as_runtime_error, self._fields):
            command()
        return Promise(Once(self._fetch))

    def _fetch(self) -> Any:
        pool = self._running_pool()
        with raising_as(as_runtime_error, self._fields):
            time_step = pool.recv(env_ids=[self._env_id]).obs
        return self._converters[1](time_step)

    @cached_property
    def _converters(self) -> tuple[nests.Convert, nests.Convert]:
        """The functions that make a batch of an action, and a TimeStep of a batch."""
        spec, is_batched = self._running_pool().spec, self._env_specs().batched
        to_batch = nests.to_array if is_batched else lambda value: np.asarray(nests.to_array(value))[None]
        to_one = nests.to_array if is_batched else lambda value: nests.to_array(value)[0]
        return converter(spec.action, to_batch), converter(spec.observation, to_one)


class EnvHandle(EnvMethods):
    """The env in a slot of a parallel environment. With spares, it is the env in the slot at the time of the call.

    `step` and `reset` run this env alone, and return TimeSteps of NumPy arrays without a batch dimension. The parallel
    environment's own `step` is refused (BusyEnvError) until the promise of such a step is called.
    """

    def __init__(self, pool: Pool, env_id: int, specs: AlfSpecs) -> None:
        """Created by the parallel environment."""
        self._pool = pool
        self._env_id = env_id
        self._specs = specs

    def close(self) -> None:
        """Close this env. Its process lives until the parallel environment is closed."""
        self.call("close")()

    def _running_pool(self) -> Pool:
        return self._pool

    def _env_specs(self) -> AlfSpecs:
        return self._specs

    def __repr__(self) -> str:
        return f"EnvHandle(env_id={self._env_id})"


def _close(env: Any) -> None:
    env.close()


def call_one(pool: Pool, env_id: int, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Promise[Any]:
    """Start a call of a method of one env."""
    future = pool.call_async(name, *args, env_ids=[env_id], **kwargs)
    return Promise(lambda: future.result()[0])
