"""Runs envs in the calling thread, which is the only worker. The pool's native code runs the loop. Calls run at once."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepmill import _native, timers
from stepmill.backends.base import (
    BackendTraits,
    Future,
    num_before,
    serve_requests_here,
    warn_of_close_faults,
    worker_fault_error,
)
from stepmill.backends.start_progress import StartProgress
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, EngineBug, join_errors
from stepmill.worker.env_host import BuiltEnvs, apply_requests, build_envs, close_envs, make_inline_loop
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.shared_state import Shares
from stepmill.worker.signals import defer_signals


class SerialBackend:
    """Runs all envs in the calling thread.

    An exception of an env while it is built or called is reported as with other backends. An exception of a signal handler,
    such as KeyboardInterrupt, is raised in the program.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._plan = WorkerPlan(0, (), ())
        self._built = BuiltEnvs()
        self._slab: SharedSlab | None = None
        self._loop: _native.Loop | None = None
        self._calls = threading.RLock()  # held while envs are called or rebuilt; `Loop.wait_idle` waits for steps

    @property
    def traits(self) -> BackendTraits:
        driver = {} if self._loop is None else {"loop": self._loop}
        return BackendTraits(driver=driver, has_own_timers=False, is_inline=True)

    @property
    def loop(self) -> _native.Loop:
        """The native loop, which the pool's native code runs. `revive` changes it."""
        if self._loop is None:
            raise EngineBug("the serial backend has no loop before attach() and after close()")
        return self._loop

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        if len(plans) != 1:
            raise EngineBug(f"the serial backend has one worker, not {len(plans)}")
        self._plan = plans[0]
        with (
            StartProgress(len(self._plan.env_ids), is_wanted=self._settings.show_progress) as progress,
            defer_signals(),
        ):
            return [self._build(lambda env_id: progress.show(num_before(self._plan.env_ids, env_id)))]

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab = slab
        shares = Shares.of(len(self._plan.env_ids), is_watched=self._settings.watches_sharing)
        self._loop = make_inline_loop(slab.native, self._built, self._settings, shares)

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        with self._calls:
            return serve_requests_here(self.loop, self._built.envs, requests)

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Close all envs, ignore their exceptions, and build new envs."""
        if self._slab is None:
            raise ClosedPoolError("a pool that is closed, or not started, has no worker to revive")
        with self._calls:
            close_envs(self._plan.env_ids, self._built.envs)
            report = self._build()
            loop = make_inline_loop(self._slab.native, self._built, self._settings)
            faults = apply_requests(loop, self._plan.env_ids, self._built.envs, settings_requests)
            if faults:
                raise join_errors([worker_fault_error(fault, 0) for fault in faults])
            loop.refresh()
            self._loop = loop
        return report

    def close(self, timeout_s: float) -> None:
        """Close the envs, however long that takes, because code in the calling thread cannot be interrupted.

        If another thread is stepping or calling an env, wait at most `timeout_s`. If it does not stop, close no env.
        """
        if os.getpid() != self._pid:
            return
        if not self._end_use(timeout_s):
            warn_of_use(self._plan.env_ids)
            return
        built, self._built, self._loop, self._slab = self._built, BuiltEnvs(), None, None
        warn_of_close_faults(0, close_envs(self._plan.env_ids, built.envs))

    def _end_use(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until no other thread is stepping or calling an env; return whether this is so."""
        deadline = time.monotonic() + timeout_s
        if not self._calls.acquire(timeout=timeout_s):
            return False
        self._calls.release()
        return self._loop is None or self._loop.wait_idle(deadline - time.monotonic())

    def _build(self, on_begin: Callable[[int], None] = lambda _env_id: None) -> WorkerReport:
        if self._settings.timers_every:
            timers.enable(self._settings.timers_every)  # in the calling thread
        self._built = BuiltEnvs()
        limits = self._settings.limits_of_envs()
        built = build_envs(self._plan, on_begin=on_begin, should_raise=_native.is_from_signal, limits=limits)
        if built.faults:
            raise join_errors([worker_fault_error(fault, 0) for fault in built.faults])
        self._built = built
        return WorkerReport(0, self._pid, tuple(built.specs))


def warn_of_use(env_ids: Sequence[int]) -> None:
    """Warn of envs that close() leaves open, because another thread is still using one of them."""
    warnings.warn(
        f"envs {list(env_ids)} are not closed: another thread is still using one of them, and a thread cannot be "
        "killed; use backend='process' for envs that hang",
        RuntimeWarning,
        stacklevel=4,
    )
