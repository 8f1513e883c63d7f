"""`ProcessEnvironment`: one ALF environment in its own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from stepmill.envs.alf import PROGRESS, AlfEnvMaker, NotAlfEnvError
from stepmill.frontends.alf import errors
from stepmill.frontends.alf.configuration import AlfKeywords, Arguments, signature_of
from stepmill.frontends.alf.handles import AlfSpecs, EnvMethods, Promise
from stepmill.frontends.overrides import refuse_overrides
from stepmill.frontends.starting_pool import StartingPool
from stepmill.pool.pool import Pool
from stepmill.spec.closing import CloseAtEnd
from stepmill.spec.errors import StepmillError, raising_as

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LAST = ("torch_num_threads_per_env", "start_method", "name")  # arguments of `*threads_start_and_name`


class ProcessEnvironment(CloseAtEnd, EnvMethods):
    """Runs one ALF environment in a process. `step` and `reset` return its TimeSteps as NumPy arrays.

    Args:
        env_constructor: a function that is called in the process as `constructor(env_id=env_id)`.
        env_id: the argument of the constructor.
        flatten, fast, num_envs, name: without effect.
        torch_num_threads_per_env, start_method, options: as for FastParallelEnvironment. `name` is the last by position.
    Raises:
        StartMethodError: the start method is unknown.

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
        options = replace(own, num_workers=1).pool_options()
        self._starting = StartingPool([AlfEnvMaker(env_constructor, env_id)], options)
        self._is_started = False
        self._pending: Promise[Any] | None = None

    # ---- life ---------------------------------------------------------------------------------------------------

    def start(self, wait_to_start: bool = True) -> None:
        """Start the process, which builds the env; wait until it is built if `wait_to_start`.

        Raises:
            NotStartedError: the process was started before.
            EnvError: the constructor raised; also a RuntimeError.
        """
        if self._is_started:
            raise errors.NotStartedError("Cannot start() ProcessEnvironment multiple times; make another one")
        self._is_started = True
        self._starting.launch()
        if wait_to_start:
            self.wait_start()

    def wait_start(self) -> None:
        """Wait until the env is built. Missing methods of the env are reported when it is used, as in ALF.

        Raises:
            NotStartedError: the process was not started.
            EnvError: the constructor raised; also a RuntimeError.
        """
        try:
            self._running_pool()
        except StepmillError as error:
            if not getattr(error, "error_type", "").endswith(NotAlfEnvError.__qualname__):
                raise

    def close(self) -> None:
        """Close the env and end its process, in about two seconds at most. Idempotent."""
        self._starting.close()

    def _running_pool(self) -> Pool:
        if not self._is_started:
            raise errors.NotStartedError("Run ProcessEnvironment.start() first")
        with raising_as(errors.as_runtime_error):
            return self._starting.pool

    # ---- the env ------------------------------------------------------------------------------------------------

    def sync_progress(self, progress: Mapping[str, float] | None = None) -> None:
        """Send the training progress to the env; see `FastParallelEnvironment.sync_progress`."""
        if progress is None:
            from alf.utils.schedulers import get_all_progresses  # type: ignore[import-not-found]  # ALF is not on PyPI

            progress = get_all_progresses()
        self._running_pool().set_attr(PROGRESS, dict(progress))

    def __getattr__(self, name: str) -> Any:
        if "_pending" not in self.__dict__:
            raise AttributeError(name)
        return super().__getattr__(name)

    # ---- internal -----------------------------------------------------------------------------------------------

    @cached_property
    def _specs(self) -> AlfSpecs:
        return AlfSpecs.of(self._running_pool().spec)

    @cached_property
    def _fields(self) -> Sequence[str]:
        factory: Any = getattr(self._running_pool().spec.observation, "factory")  # noqa: B009  # a TimeStep's class
        fields: Sequence[str] = factory._fields
        return fields

    def _idle_pool(self) -> Pool:
        """Wait for the last step or reset to finish, and return the pool."""
        pool = self._running_pool()
        if self._pending is not None:
            try:
                self._pending()
            except StepmillError:
                pass  # the promise raises it
            self._pending = None
        return pool

    def _promise(self) -> Promise[Any]:
        self._pending = super()._promise()
        return self._pending


ProcessEnvironment.__signature__ = signature_of(ProcessEnvironment, _LAST)  # type: ignore[attr-defined]
