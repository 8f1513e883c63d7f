"""Envs in processes, one per worker: they run in parallel whatever they do, and may die without harm to the learner.

    learner ──socket──► launcher ──fork or exec──► worker 0, 1, …       (worker/launcher.py, worker/work.py)
       └────────────── a socket to each worker: Build, Attach, slow requests ──────────────┘
                       the slab: everything else, natively

Each wait polls the channels, the workers' pidfds and the launcher, so that a death ends it, and has a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from stepmill.backends.base import (
    Future,
    died_error,
    too_many_workers,
    warn_of_close,
)
from stepmill.backends.launching import LauncherHandle
from stepmill.backends.link import WorkerLink
from stepmill.backends.starting import await_answers, read_report
from stepmill.slab.memory import SharedSlab
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import ClosedPoolError, EngineBug, UsageError, WorkerDied
from stepmill.spec.notices import warn
from stepmill.spec.options import Context
from stepmill.worker.channel import NO_FD
from stepmill.worker.messages import (
    Attach,
    Attached,
    Build,
    Outcome,
    Request,
    RequestKind,
    Value,
    WorkerPlan,
    WorkerReport,
    WorkerSettings,
    dump,
    load,
)
from stepmill.worker.program_state import ProgramState
from stepmill.worker.records import describe
from stepmill.worker.signals import allow_signals, defer_signals

STOP_S = 1.5  # how long close() lets workers close their envs before it kills them
HURRY_S = 0.3  # the same after Ctrl-C at the start, or in the middle of a restart
KILL_S = 0.3  # how long a killed process may take to vanish
EXIT_CODE_S = 0.2  # how long the launcher may take to say how a dead worker ended
TRACE_S = 0.25  # how long a worker that was given up may take to end, when it is asked where it stood
REVIVE_KILL_S = 2.0


class ProcessBackend:
    """Runs each worker in a process, started by a launcher of this pool's own."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        # What the user registers later is not for this pool: its restarted workers are as the first ones were.
        self._program = None if settings.context is Context.FORK else ProgramState.read()
        self._pid = os.getpid()
        self._links: list[WorkerLink] = []
        self._launcher: LauncherHandle | None = None
        self._slab: SharedSlab | None = None
        self._ring: Callable[[int], None] | None = None
        self._is_closed = False
        self._end_lock = threading.RLock()  # a worker is replaced, or the pool is closed; never both at once

    # ---- start ----------------------------------------------------------------------------------------------------

    def begin(self, plans: Sequence[WorkerPlan]) -> None:
        """Starts the workers and returns at once; `start` with the same plans then waits for them."""
        with self._whole_or_nothing(len(plans)):
            self._begin(plans)

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        with self._whole_or_nothing(len(plans)):
            if not self._links:
                self._begin(plans)
            return self._await_built(self._links)

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab, self._ring = slab, ring
        with self._whole_or_nothing(slab.num_workers):
            self._attach(self._links)

    @contextlib.contextmanager
    def _whole_or_nothing(self, num_workers: int) -> Iterator[None]:
        """Ends everything if not all of it can be started. Signals are deferred but where something is waited for."""
        with defer_signals():
            try:
                yield
            except OSError as exc:
                self._shut(STOP_S)
                raise too_many_workers(num_workers, exc) from exc
            except Exception:
                self._shut(STOP_S)
                raise
            except BaseException:  # Ctrl-C: the user has waited long enough
                self._shut(HURRY_S)
                raise

    def _begin(self, plans: Sequence[WorkerPlan]) -> None:
        self._launcher = LauncherHandle(self._settings, plans)
        # A fresh launcher takes a while to load; plans are pickled meanwhile.
        with allow_signals():  # pickling runs code of the user
            orders = [self._order(plan) for plan in plans]
        for plan in plans:
            # One by one: if descriptors run out, those that are there get closed.
            self._links.append(WorkerLink(plan, has_trace=self._settings.has_trace))
        self._launch(self._links, orders)

    def _order(self, plan: WorkerPlan) -> bytes:
        data = None if self._program is None else _pickle_plan(plan)
        return dump(Build(self._settings, plan.worker, plan.env_ids, data, self._program))

    def _launch(self, links: Sequence[WorkerLink], orders: Sequence[bytes]) -> None:
        launcher = self._live_launcher()
        for link, order in zip(links, orders, strict=True):
            launcher.launch(link)
            link.send(order, link.trace_fds)
            if self._settings.start_serially:
                await_answers([link], launcher, self._settings.start_timeout_s)

    def _await_built(self, links: Sequence[WorkerLink]) -> list[WorkerReport]:
        await_answers(
            [link for link in links if link.answer is None], self._live_launcher(), self._settings.start_timeout_s
        )
        specs: dict[bytes, EnvSpec] = {}
        return [read_report(link, specs) for link in links]

    def _attach(self, links: Sequence[WorkerLink], orders: Sequence[Request] = ()) -> None:
        launcher, slab = self._live_launcher(), self._slab
        if slab is None:
            raise EngineBug("workers cannot attach before there is a slab")
        for link in links:
            link.answer = None
            message = Attach(dict(slab.plan), slab.num_workers, link.num_posted, tuple(orders))
            link.send(dump(message), slab.fds_of(link.plan.worker))
        await_answers(links, launcher, self._settings.start_timeout_s)
        for link in links:
            if not isinstance(link.answer, Attached):
                raise EngineBug(f"worker {link.plan.worker} answered {link.answer} when it was told to attach")

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        packed = [_packed(request) for request in requests.values()]
        timeout_s = self._settings.call_timeout_s
        futures = [
            Future(request, worker, timeout_s, self._wait, unpack=_unpacked) for worker, request in requests.items()
        ]
        with defer_signals():  # to all workers or to none
            for future, request in zip(futures, packed, strict=True):
                self._post(request, future)
        return futures

    def _post(self, request: Request, future: Future) -> None:
        ring = self._ring
        while not (self._is_closed or ring is None or os.getpid() != self._pid):
            if self._links[future.worker].post(request, future, ring):
                return  # else another thread has just put a new link there
        future.fail(_closed())

    def _wait(self, future: Future, deadline: float | None) -> None:
        link = self._links[future.worker]
        while True:
            if os.getpid() == self._pid:  # a forked child would steal the learner's messages
                link.pump()
            if future.is_done:
                return
            if self._is_closed or os.getpid() != self._pid:
                future.fail(_closed())
            elif link.is_dead:
                link.pump()
                link.fail_futures(lambda: self.died(future.worker, "the call has no result"))
                future.fail(self.died(future.worker, "the call has no result"))
            elif deadline is not None and time.monotonic() >= deadline:
                return
            else:
                link.wait(deadline)

    # ---- deaths ---------------------------------------------------------------------------------------------------

    @property
    def pidfds(self) -> Mapping[int, int]:
        return {link.plan.worker: link.pidfd for link in self._links}

    def exit_code(self, worker: int) -> int | None:
        link = self._links[worker]
        if self._launcher is not None and link.exit_code is None and link.is_dead:
            self._launcher.wait_exit(link, EXIT_CODE_S)
        return link.exit_code

    def read_trace(self, worker: int) -> str:
        link = self._links[worker]
        link.wait_end(time.monotonic() + TRACE_S)
        return link.read_trace()

    def died(self, worker: int, hint: str) -> WorkerDied:
        """Returns the error for a worker that is gone; `hint` says what the user can do, or has lost."""
        return died_error(worker, self._links[worker].plan.env_ids, self.exit_code(worker), hint=hint)

    def end_worker(self, worker: int) -> None:
        old = self._links[worker]
        old.kill()
        if not old.wait_end(time.monotonic() + REVIVE_KILL_S):
            raise self.died(worker, f"its process {old.pid} does not die, not even of SIGKILL, and cannot be replaced")
        old.fail_futures(lambda: self.died(worker, "the call has no result"))

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        """Ends what is left of the worker and starts it anew.

        Raises:
            WorkerDied: the old process does not even die of SIGKILL, or the new one dies at once.
            EnvError, EnvTimeout: as for `start`.
            UsageError: the system refuses another process or descriptor.
            LauncherDied: no worker can be started any more.
        """
        with defer_signals():
            self.end_worker(worker)
            old = self._links[worker]
            if self._live_launcher().is_dead and self._settings.context is Context.FORK:
                raise self._live_launcher().death()
            try:
                fresh = WorkerLink(old.plan, has_trace=self._settings.has_trace)
            except OSError as exc:
                raise too_many_workers(1, exc) from exc
            self._replace(old, fresh)
            try:
                return self._start_again(fresh, orders)
            except OSError as exc:
                self._void(fresh)
                raise too_many_workers(1, exc) from exc
            except BaseException:
                self._void(fresh)
                raise

    def _start_again(self, fresh: WorkerLink, orders: Iterable[Request]) -> WorkerReport:
        with self._end_lock:  # workers are restarted by several threads
            if self._live_launcher().is_dead:
                self._live_launcher().close(0.0)
                self._launcher = LauncherHandle(self._settings, ())
        with allow_signals():  # pickling runs code of the user
            packed = [_packed(order) for order in orders]
        self._launch([fresh], [self._order(fresh.plan)])
        report = self._await_built([fresh])[0]
        self._attach([fresh], packed)
        if self._ring is not None:
            fresh.begin_serving(self._ring)
        return report

    def _void(self, fresh: WorkerLink) -> None:
        """Ends a worker that could not be restarted. Its link stays, for the next attempt to replace."""
        fresh.kill()
        fresh.is_void = fresh.pidfd == NO_FD
        hint = "it could not be restarted"
        fresh.fail_futures(lambda: died_error(fresh.plan.worker, fresh.plan.env_ids, None, hint=hint))

    def _replace(self, old: WorkerLink, fresh: WorkerLink) -> None:
        fresh.is_reviving = True
        with self._end_lock:
            if self._is_closed:  # close() has ended the old ones, and will not look for new ones
                fresh.close()
                raise _closed()
            self._links[old.plan.worker] = fresh
            old.close()
            # Another thread may have posted to the old one until now.
            fresh.num_posted = old.num_posted
            hint = "the call has no result"
            old.fail_futures(lambda: died_error(old.plan.worker, old.plan.env_ids, old.exit_code, hint=hint))

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        stop_s = min(timeout_s, STOP_S)
        killed, immortal = self._shut(stop_s)
        self._tell_end(killed, immortal, stop_s)

    def _shut(self, stop_s: float) -> tuple[list[WorkerLink], list[WorkerLink]]:
        """Ends all processes, frees all descriptors; returns links of those that were killed, and of those that live on."""
        with defer_signals():  # Ctrl-C while a pool closes must not leave half of it; closing takes two seconds at most
            return self._end_all(stop_s)

    def _end_all(self, stop_s: float) -> tuple[list[WorkerLink], list[WorkerLink]]:
        with self._end_lock:
            self._is_closed = True
        deadline = time.monotonic() + stop_s
        for link in self._links:
            if self._slab is None or not isinstance(link.answer, Attached):
                link.channel.shut()  # a worker that serves no slab yet takes this for the end
        # Nobody has begun to use a worker that is being restarted: it is not waited for, and not worth a warning.
        reviving = [link for link in self._links if link.is_reviving]
        for link in reviving:
            link.wait_end(min(deadline, time.monotonic() + HURRY_S))
            link.kill()
        self._wait_ends(deadline)
        killed = [link for link in self._links if link.pidfd != NO_FD and not link.is_dead and link not in reviving]
        self._kill()
        self._wait_ends(time.monotonic() + KILL_S)
        immortal = [link for link in killed if not link.is_dead]
        if self._launcher is not None:
            self._launcher.close(KILL_S)
        self._launcher = None
        for link in self._links:
            link.fail_futures(_closed)
            link.close()
        self._slab = self._ring = None
        return killed, immortal

    def _wait_ends(self, deadline: float) -> None:
        for link in self._links:
            # One after the other: the deadline is the same for all, and none waits for the learner to go on.
            link.wait_end(deadline)

    def _kill(self) -> None:
        for link in self._links:
            link.kill()

    def _tell_end(self, killed: Sequence[WorkerLink], immortal: Sequence[WorkerLink], stop_s: float) -> None:
        for link in self._links:
            warn_of_close(link.plan.worker, link.close_faults)
        for link in killed:
            fate = f"process {link.pid} does not die of SIGKILL either" if link in immortal else "it was killed"
            warn(
                f"worker {link.plan.worker} (envs {list(link.plan.env_ids)}) did not stop within {stop_s} s, and {fate}; "
                "close() of its envs may not have run",
            )

    def _live_launcher(self) -> LauncherHandle:
        if self._launcher is None:
            raise _closed()
        return self._launcher


def _closed() -> ClosedPoolError:
    return ClosedPoolError("the pool was closed before the reply came; take results before close()")


def _pickle_plan(plan: WorkerPlan) -> bytes:
    try:
        return dump(plan)
    except Exception as exc:
        culprit = next(
            (env_id for env_id, env_fn in zip(plan.env_ids, plan.env_fns, strict=True) if not _can_travel(env_fn)), None
        )
        which = f"the env_fn of env {culprit}" if culprit is not None else f"the env_fns of worker {plan.worker}"
        raise UsageError(
            f"{which} cannot be pickled: {type(exc).__name__}: {exc}; make what it needs inside of it, or use context='fork'"
        ) from exc


def _can_travel(value: object) -> bool:
    try:
        dump(value)
    except Exception:
        return False
    return True


def _packed(request: Request) -> Request:
    try:
        return dataclasses.replace(request, payload=dump(request.payload))
    except Exception as exc:
        what = "value" if request.kind is RequestKind.SET_ATTR else "arguments"
        raise UsageError(
            f"the {what} of this {request.kind.name.lower()} cannot be pickled: {type(exc).__name__}: {exc}; "
            "send something that can, or use backend='thread'"
        ) from exc


def _unpacked(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Value) or not isinstance(outcome.value, bytes):
        return outcome
    try:
        return dataclasses.replace(outcome, value=load(outcome.value))
    except BaseException as exc:  # loading runs code of the user's classes
        return describe(exc, "call")
