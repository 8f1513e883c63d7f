"""One env of a parallel environment, from afar: its methods as promises, its attributes by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from stepmill.frontends.alf.errors import as_runtime_error
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

    Attributes that are not listed here are the env's own, fetched from its process.
    """

    def __init__(self, pool: Pool, env_id: int, specs: AlfSpecs) -> None:
        """Made by the parallel environment."""
        self._pool = pool
        self._env_id = env_id
        self._specs = specs

    def call(self, name: str, *args: Any, **kwargs: Any) -> Promise[Any]:
        """Begin to call any method of the env but reset, step and close; the promise gives its result.

        Raises:
            UsageError: the method would step the env behind the engine's back.
        """
        return call_one(self._pool, self._env_id, name, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return get_one(self._pool, self._env_id, name)

    def _known(self) -> AlfSpecs:
        return self._specs

    def render(self, mode: str = "human") -> Any:
        """Render the env and wait for the frame."""
        return self.call("render", mode)()

    def __repr__(self) -> str:
        return f"EnvHandle(env_id={self._env_id})"


def call_one(pool: Pool, env_id: int, name: str, *args: Any, **kwargs: Any) -> Promise[Any]:
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
