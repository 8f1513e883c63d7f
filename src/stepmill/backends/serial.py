"""Runs envs in the calling thread, which is the only worker. Calls run at once.

`InlineBackend` is what backends of such envs share: those of Python here, those of an external pool, and kernels.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepmill import _native, timers
from stepmill.backends.base import BackendTraits, Future, num_before, warn_of_close_faults, worker_fault_error
from stepmill.backends.start_progress import StartProgress
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, EngineBug, join_errors
from stepmill.worker.calls import serve_request
from stepmill.worker.env_host import BuiltEnvs, Fault, build_envs, close_envs, make_inline_loop
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.shared_state import Shares
from stepmill.worker.signals import defer_signals


class InlineBackend(ABC):
    """Runs all envs in the calling thread. Its worker cannot die, and is never restarted.

    An exception of an env while it is built or called is reported as with other backends. An exception of a signal handler,
    such as KeyboardInterrupt, is raised in the program.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._plan = WorkerPlan(0, (), ())
        self._built = BuiltEnvs()
        self._loop: Any = None  # a ServingLoop, from `attach` to `close`
        self._use = threading.RLock()  # held while a thread calls or closes the envs

    # ---- what differs ------------------------------------------------------------------------------------------------

    @abstractmethod
    def _build(self, on_begin: Callable[[int], None]) -> BuiltEnvs:
        """Build the envs of the plan. Call `on_begin` with each env_id before."""

    @abstractmethod
    def _make_loop(self, slab: _native.Slab) -> Any:
        """Return the loop over the envs that were built."""

    @abstractmethod
    def _end_loop(self, timeout_s: float) -> bool:
        """End what the loop runs, or return False if an env still runs after `timeout_s`."""

    def _close_envs(self, built: BuiltEnvs) -> tuple[Fault, ...]:
        """Close the envs, and return the faults of those that raised an exception."""
        return close_envs(self._plan.env_ids, built.envs)

    # ---- the backend --------------------------------------------------------------------------------------------------

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        if len(plans) != 1:
            raise EngineBug(f"the calling thread is one worker, and not {len(plans)}")
        self._plan = plans[0]
        env_ids = self._plan.env_ids
        with StartProgress(len(env_ids), is_wanted=self._settings.show_progress) as progress, defer_signals():
            built = self._build(lambda env_id: progress.show(lambda: num_before(env_ids, env_id)))
            if built.faults:
                raise join_errors([worker_fault_error(fault, 0) for fault in built.faults])
            self._built = built
        return [WorkerReport(0, self._pid, tuple(built.specs))]

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._loop = self._make_loop(slab.native)

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        futures = []
        with self._use:
            if self._loop is None:
                raise ClosedPoolError("the pool is closed and serves no calls; make a new one")
            for worker, request in requests.items():
                future = Future(request, worker, None, lambda future, deadline: None)
                future.finish(serve_request(self._loop, self._built.envs, request, should_raise=_native.is_from_signal))
                futures.append(future)
        return futures

    def close(self, timeout_s: float) -> None:
        """Close the envs, however long that takes, because code in the calling thread cannot be interrupted.

        If another thread is using an env, wait at most `timeout_s`. If it does not stop, close no env, and warn.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout_s
        if self._use.acquire(timeout=timeout_s):
            try:
                if self._loop is None or self._end_loop(deadline - time.monotonic()):
                    built, self._built, self._loop = self._built, BuiltEnvs(), None
                    warn_of_close_faults(0, self._close_envs(built))
                    return
            finally:
                self._use.release()
        warnings.warn(
            f"envs {list(self._plan.env_ids)} are not closed: another thread is still using one of them, and a thread cannot be "
            "killed; use backend='process' for envs that hang",
            RuntimeWarning,
            stacklevel=3,
        )


class SerialBackend(InlineBackend):
    """Runs envs of Python. The pool's native code runs their loop."""

    @property
    def traits(self) -> BackendTraits:
        driver = {} if self._loop is None else {"loop": self._loop}
        return BackendTraits(driver=driver, has_own_timers=False, is_inline=True)

    def _build(self, on_begin: Callable[[int], None]) -> BuiltEnvs:
        if self._settings.timers_every:
            timers.enable(self._settings.timers_every)  # in the calling thread
        limits = self._settings.limits_of_envs()
        return build_envs(self._plan, on_begin=on_begin, should_raise=_native.is_from_signal, limits=limits)

    def _make_loop(self, slab: _native.Slab) -> _native.Loop:
        shares = Shares.of(len(self._plan.env_ids), is_watched=self._settings.watches_sharing)
        return make_inline_loop(slab, self._built, self._settings, shares)

    def _end_loop(self, timeout_s: float) -> bool:
        return bool(self._loop.wait_idle(timeout_s))
