"""One env of a parallel environment, from afar: its methods as promises, its attributes by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from stepmill.frontends.alf import nests
from stepmill.frontends.alf.errors import as_runtime_error
from stepmill.frontends.alf.nests import converter
from stepmill.frontends.alf.specs import AlfSpecs, HasSpecs
from stepmill.pool.pool import Pool
from stepmill.spec.errors import StepmillError

Value = TypeVar("Value")


class Promise(Generic[Value]):
    """A result to come. Call it to wait for it and get it; as often as you like, and in any order (A-B3)."""

    def __init__(self, fetch: Callable[[], Value]) -> None:
        """`fetch()` waits for the result, and gives the same one each time."""
        self._fetch = fetch

    def __call__(self) -> Value:
        """Wait for the result and return it.

        Raises:
            EnvError: the env raised, also a RuntimeError.
            WorkerDied: its process is gone.
        """
        try:
            return self._fetch()
        except StepmillError as error:
            raise as_runtime_error(error) from error


class EnvHandle(HasSpecs):
    """The env that serves a slot at the time of the call, be it a spare (A-B6).

    `step` and `reset` concern this env alone, and give TimeSteps of NumPy arrays without a batch dimension. The parallel
    environment's own `step` is refused (BusyEnvError) until the promise of such a step was called.
    Attributes that are not listed here are the env's own, fetched from its process.
    """

    def __init__(self, pool: Pool, env_id: int, specs: AlfSpecs) -> None:
        """Made by the parallel environment."""
        self._pool = pool
        self._env_id = env_id
        self._specs = specs

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Step this env; return its TimeStep, or a promise of it if not `blocking`.

        Raises:
            EnvError, WorkerDied, EnvTimeout: the env failed; also a RuntimeError.
            BusyEnvError: its last step was not waited for.
        """
        as_array = nests.to_array if self._specs.batched else lambda value: nests.to_array(value)[None]
        batch = converter(self._pool.spec.action, as_array)(action)
        self._begin(lambda: self._pool.send(batch, env_ids=[self._env_id]))
        return self._promised(blocking)

    def reset(self, blocking: bool = True) -> Any:
        """Reset this env; return its TimeStep, or a promise of it if not `blocking`."""
        self._begin(lambda: self._pool.reset_async(env_ids=[self._env_id]))
        return self._promised(blocking)

    def close(self) -> None:
        """Close this env. Its process lives until the parallel environment is closed."""
        Promise(self._pool.call_async(_close, env_ids=[self._env_id]).result)()

    def call(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Promise[Any]:
        """Begin to call any method of the env, or a function of the env; the promise gives its result."""
        if name in ("step", "reset"):
            promise: Promise[Any] = getattr(self, name)(*args, blocking=False, **kwargs)
            return promise
        return call_one(self._pool, self._env_id, _close if name == "close" else name, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return get_one(self._pool, self._env_id, name)

    def _known(self) -> AlfSpecs:
        return self._specs

    def render(self, mode: str = "human") -> Any:
        """Render the env and wait for the frame."""
        return self.call("render", mode)()

    def _begin(self, command: Callable[[], object]) -> None:
        try:
            command()
        except StepmillError as error:
            raise as_runtime_error(error) from error

    def _promised(self, blocking: bool) -> Any:
        promise = Promise(Once(self._fetch))
        return promise() if blocking else promise

    def _fetch(self) -> Any:
        node = self._pool.spec.observation
        time_step = self._pool.recv(env_ids=[self._env_id]).obs
        as_value = nests.to_array if self._specs.batched else lambda value: nests.to_array(value)[0]
        return converter(node, as_value)(time_step)

    def __repr__(self) -> str:
        return f"EnvHandle(env_id={self._env_id})"


class Once(Generic[Value]):
    """Calls a function once, and gives its result, or raises its error, each time it is called."""

    def __init__(self, function: Callable[[], Value]) -> None:
        self._function: Callable[[], Value] | None = function
        self._value: Value
        self._error: StepmillError | None = None

    def __call__(self) -> Value:
        """Return what the first call returned, or raise what it raised."""
        if self._function is not None:
            function, self._function = self._function, None
            try:
                self._value = function()
            except StepmillError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._value


def _close(env: Any) -> None:
    env.close()


def call_one(pool: Pool, env_id: int, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Promise[Any]:
    """Begin to call a method of one env."""
    future = pool.call_async(name, *args, env_ids=[env_id], **kwargs)
    return Promise(lambda: future.result()[0])


def get_one(pool: Pool, env_id: int, name: str) -> Any:
    """Return an attribute of one env.

    Raises:
        AttributeError: it has none of that name.
        EnvError: its getter raised, or the value does not travel.
    """
    try:
        return pool.get_attr(name, env_ids=[env_id])[0]
    except StepmillError as error:
        if getattr(error, "error_type", "").rpartition(".")[2] == "AttributeError":
            raise AttributeError(str(error)) from error
        raise as_runtime_error(error) from error
