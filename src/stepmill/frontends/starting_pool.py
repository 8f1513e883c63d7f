"""`StartingPool`: a pool whose worker processes start before it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepmill.backends.process import ProcessBackend
from stepmill.pool.pool import Pool
from stepmill.pool.port import CLOSE_TIMEOUT_S, plan_workers, worker_settings
from stepmill.spec.errors import EngineBug, StepmillError, WorkerDied
from stepmill.spec.options import BackendName, PoolOptions


class StartingPool:
    """Starts worker processes without waiting for their envs, and makes the pool when it is first used.

    Args:
        makers: the functions that make the envs, one per env.
        options: the options of the pool. Only the process backend starts early.
        num_retries: how often all envs are built again if a process dies meanwhile.
    """

    def __init__(self, makers: Sequence[Callable[[], object]], options: PoolOptions, num_retries: int = 0) -> None:
        self._makers = makers
        self._options = options
        self._num_retries = num_retries
        self._backend: ProcessBackend | None = None
        self._failure: StepmillError | None = None
        self._finalizer: weakref.finalize[..., Any] = weakref.finalize(self, _do_nothing)
        self.made: Pool | None = None

    def launch(self) -> None:
        """Start the workers, which build their envs, and return without waiting. Idempotent."""
        if self._backend is not None or self._options.backend is not BackendName.PROCESS:
            return
        self._backend = ProcessBackend(worker_settings(self._options))
        self._backend.begin(plan_workers(self._makers, self._options))
        self._finalizer = weakref.finalize(self, self._backend.close, CLOSE_TIMEOUT_S)

    @property
    def pool(self) -> Pool:
        """The pool; the first use waits until all envs are built. A failure is raised again by each later use.

        Raises:
            EnvError, EnvTimeout, WorkerDied: an env could not be built.
        """
        if self._failure is not None:
            raise self._failure
        if self.made is None:
            try:
                self.made = self._make()
            except StepmillError as failure:
                self._failure = failure
                raise
        return self.made

    def _make(self) -> Pool:
        for num_left in range(self._num_retries, -1, -1):
            self.launch()
            self._finalizer.detach()  # from here on the pool closes the backend
            options = self._options if self._backend is None else replace(self._options, backend=self._backend)
            try:
                return Pool(self._makers, options=options)
            except WorkerDied:
                self._backend = None
                if not num_left:
                    raise
        raise EngineBug("num_retries is negative; please report this")

    def close(self) -> None:
        """Close all envs and end their processes. Idempotent."""
        if self.made is not None:
            self.made.close()
        self._finalizer()


def _do_nothing() -> None:
    """Do nothing. This is the finalizer before the start."""
