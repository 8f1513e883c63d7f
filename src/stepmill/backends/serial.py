"""Envs in line: the caller is the one worker. The ledger runs its loop; a call is done when it is sent."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepmill import _native, timers
from stepmill.backends.base import Future, answer_here, fault_error, warn_of_close
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, EngineBug, join_errors
from stepmill.worker.host import Built, build, close_envs, make_loop, obey
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.signals import defer_signals


class SerialBackend:
    """Runs all envs in the caller's thread. What an env raises while it is built or called is reported as by a worker,
    but what a signal handler raises, KeyboardInterrupt too, passes through: here it is the user's.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._plan = WorkerPlan(0, (), ())
        self._built = Built()
        self._slab: SharedSlab | None = None
        self._loop: _native.Loop | None = None
        self._calls = threading.RLock()  # held while envs are called or rebuilt; the loop knows when it steps them

    @property
    def loop(self) -> _native.Loop:
        """The native loop, for the ledger to run. Changes with `revive`."""
        if self._loop is None:
            raise EngineBug("the serial backend has no loop before attach() and after close()")
        return self._loop

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        if len(plans) != 1:
            raise EngineBug(f"the serial backend has one worker, not {len(plans)}")
        self._plan = plans[0]
        with defer_signals():
            return [self._build()]

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab = slab
        self._loop = make_loop(slab.native, 0, self._built, self._settings, is_inline=True)

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        with self._calls:
            return answer_here(self.loop, self._built.envs, requests)

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        """Builds all envs anew; those that raise in close() are let go all the same, for they are broken already."""
        if self._slab is None:
            raise ClosedPoolError("a pool that is closed, or not started, has no worker to revive")
        with self._calls:
            close_envs(self._plan.env_ids, self._built.envs)
            report = self._build()
            loop = make_loop(self._slab.native, 0, self._built, self._settings, is_inline=True)
            faults = obey(loop, self._plan.env_ids, self._built.envs, orders)
            if faults:
                raise join_errors([fault_error(fault, 0) for fault in faults])
            loop.refresh()
            self._loop = loop
        return report

    def close(self, timeout_s: float) -> None:
        """Closes the envs, however long that takes: what runs in the caller's thread cannot be timed out.

        An env that another thread is stepping or calling is waited for, at most `timeout_s`; if it goes on, no env is closed.
        """
        if os.getpid() != self._pid:
            return
        if not self._end_use(timeout_s):
            warn_of_use(self._plan.env_ids)
            return
        built, self._built, self._loop, self._slab = self._built, Built(), None, None
        warn_of_close(0, close_envs(self._plan.env_ids, built.envs))

    def _end_use(self, timeout_s: float) -> bool:
        """Waits until no other thread is at work in an env; returns whether that is so."""
        deadline = time.monotonic() + timeout_s
        if not self._calls.acquire(timeout=timeout_s):
            return False
        self._calls.release()
        return self._loop is None or self._loop.wait_idle(deadline - time.monotonic())

    def _build(self) -> WorkerReport:
        if self._settings.timers_every:
            timers.enable(self._settings.timers_every)  # of the caller, whose thread it is
        self._built = Built()
        built = build(self._plan.env_ids, self._plan.env_fns, passes=_native.is_from_signal)
        if built.faults:
            raise join_errors([fault_error(fault, 0) for fault in built.faults])
        self._built = built
        return WorkerReport(0, self._pid, tuple(built.specs))


def warn_of_use(env_ids: Sequence[int]) -> None:
    """Warn of envs that close() leaves open, since another thread is still at work in one of them."""
    warnings.warn(
        f"envs {list(env_ids)} are not closed: another thread is still at work in one of them, and a thread cannot be "
        "killed; use backend='process' for envs that hang",
        RuntimeWarning,
        stacklevel=4,
    )
