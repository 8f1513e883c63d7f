"""`ProcessEnvironment`: one ALF environment in a process of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stepmill.backends.process import ProcessBackend
from stepmill.envs.alf import PROGRESS, AlfEnvMaker, NotAlfEnvError
from stepmill.frontends.alf import errors, nests
from stepmill.frontends.alf.configuration import AlfKeywords, Arguments, signature_of
from stepmill.frontends.alf.handles import Once, Promise, call_one, get_one
from stepmill.frontends.alf.nests import converter
from stepmill.frontends.alf.specs import AlfSpecs, HasSpecs
from stepmill.frontends.overrides import refuse_overrides
from stepmill.pool.pool import Pool
from stepmill.pool.start import CLOSE_TIMEOUT_S, plan_workers, worker_settings
from stepmill.spec.errors import StepmillError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_LAST = ("torch_num_threads_per_env", "start_method", "name")  # arguments of `*threads_start_and_name`


class ProcessEnvironment(HasSpecs):
    """Runs one ALF environment in a process; `step` and `reset` return its TimeSteps, as NumPy arrays.

    Args:
        env_constructor: called in the process as `constructor(env_id=env_id)`.
        env_id: its argument.
        flatten, fast, num_envs, name: without effect.
        torch_num_threads_per_env, start_method, options: as for FastParallelEnvironment. `name` is the last by position.
    Raises:
        StartMethodError: an unknown start method.

    Other attributes are read from the env in its process.
    """

    NOT_CALLED = {"_receive": "override call(), or the promise that it returns"}

    def __init__(
        self,
        env_constructor: Callable[..., object],
        env_id: int | None = None,
        flatten: bool = False,
        fast: bool = False,
        num_envs: int = 0,
        *threads_start_and_name: int | str | None,
        **keywords: Unpack[AlfKeywords],
    ) -> None:
        refuse_overrides(type(self))
        own = Arguments.read(keywords, threads_start_and_name, _LAST)
        self._options = replace(own, num_workers=1).pool_options()
        self._maker = AlfEnvMaker(env_constructor, env_id)
        self._backend: ProcessBackend | None = None
        self._pool: Pool | None = None
        self._failure: StepmillError | None = None
        self._specs: AlfSpecs | None = None
        self._pending: Promise[Any] | None = None
        self._is_closed = False
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(self, _do_nothing)

    # ---- life ---------------------------------------------------------------------------------------------------

    def start(self, wait_to_start: bool = True) -> None:
        """Start the process, which builds the env; wait until it is built if `wait_to_start`.

        Raises:
            NotStartedError: it was started before.
            EnvError: the constructor raised; also a RuntimeError.
        """
        if self._backend is not None:
            raise errors.NotStartedError("Cannot start() ProcessEnvironment multiple times; make another one")
        self._backend = ProcessBackend(worker_settings(self._options))
        self._backend.begin(plan_workers([self._maker], self._options))
        self._finalizer = weakref.finalize(self, self._backend.close, CLOSE_TIMEOUT_S)
        if wait_to_start:
            self.wait_start()

    def wait_start(self) -> None:
        """Wait until the env is built. Missing methods of the env are reported when it is used, as in ALF.

        Raises:
            NotStartedError: it was not started.
            EnvError: the constructor raised; also a RuntimeError.
        """
        try:
            self._started_pool()
        except StepmillError as error:
            if not getattr(error, "error_type", "").endswith(NotAlfEnvError.__qualname__):
                raise

    def close(self) -> None:
        """Close the env and end its process, in about two seconds at most. Idempotent."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.close()
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _started_pool(self) -> Pool:
        if self._backend is None:
            raise errors.NotStartedError("Run ProcessEnvironment.start() first")
        if self._failure is not None:
            raise self._failure
        if self._pool is None:
            self._finalizer.detach()  # the pool closes the process from here on
            try:
                self._pool = Pool([self._maker], options=replace(self._options, backend=self._backend))
            except StepmillError as error:
                self._failure = errors.as_runtime_error(error)
                raise self._failure from error
            spec = self._pool.spec
            self._specs = AlfSpecs.of(spec)
            self._is_batched = spec.is_batched
            self._first = converter(spec.observation, lambda array: array[0])
            self._fields = getattr(spec.observation, "factory")._fields  # noqa: B009  # a TimeStep's class
            self._batch = converter(spec.action, lambda value: nests.to_array(value)[None])
            self._as_arrays = converter(spec.action, nests.to_array)
        return self._pool

    # ---- the env ------------------------------------------------------------------------------------------------

    def step(self, action: Any, blocking: bool = True) -> Any:
        """Step the env; return its TimeStep, or a promise of it if not `blocking`.

        Raises:
            EnvError, WorkerDied, EnvTimeout: the env failed; also a RuntimeError.
        """
        pool = self._idle_pool()
        self._begin(lambda: pool.send(self._as_arrays(action) if self._is_batched else self._batch(action)))
        return self._promised(blocking)

    def reset(self, blocking: bool = True) -> Any:
        """Reset the env; return its TimeStep, or a promise of it if not `blocking`."""
        pool = self._idle_pool()
        self._begin(pool.reset_async)
        return self._promised(blocking)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Promise[Any]:
        """Start a call of a method of the env; return a promise of its result (A-B3)."""
        if name in ("step", "reset"):
            promise: Promise[Any] = getattr(self, name)(*args, blocking=False, **kwargs)
            return promise
        return call_one(self._started_pool(), 0, name, *args, **kwargs)

    def render(self, mode: str = "human") -> Any:
        """Render the env and wait for the frame."""
        return self.call("render", mode)()

    def sync_progress(self, progress: Mapping[str, float] | None = None) -> None:
        """Send the training progress to the env; see `FastParallelEnvironment.sync_progress`."""
        if progress is None:
            from alf.utils.schedulers import get_all_progresses  # type: ignore[import-not-found]  # ALF is not on PyPI

            progress = get_all_progresses()
        self._started_pool().set_attr(PROGRESS, dict(progress))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_backend" not in self.__dict__:
            raise AttributeError(name)
        return get_one(self._started_pool(), 0, name)

    # ---- internal -----------------------------------------------------------------------------------------------

    def _env_specs(self) -> AlfSpecs:
        self._started_pool()
        assert self._specs is not None
        return self._specs

    def _idle_pool(self) -> Pool:
        """Wait for the last step or reset to finish, and return the pool."""
        pool = self._started_pool()
        if self._pending is not None:
            try:
                self._pending()
            except StepmillError:
                pass  # the promise raises it
            self._pending = None
        return pool

    def _begin(self, command: Callable[[], object]) -> None:
        try:
            command()
        except StepmillError as error:
            raise errors.as_runtime_error(error, self._fields) from error

    def _promised(self, blocking: bool) -> Any:
        self._pending = Promise(Once(self._fetch))
        return self._pending() if blocking else self._pending

    def _fetch(self) -> Any:
        pool = self._started_pool()
        try:
            nest = pool.recv(1).obs
        except StepmillError as error:
            raise errors.as_runtime_error(error, self._fields) from error
        return nest if self._is_batched else self._first(nest)


ProcessEnvironment.__signature__ = signature_of(ProcessEnvironment, _LAST)  # type: ignore[attr-defined]


def _do_nothing() -> None:
    """The finalizer while no process was started."""
