"""Runs envs in threads of this process, one thread per worker. They run in parallel while their code releases the GIL.

A thread cannot be killed. If it hangs in an env, close() warns and leaves it running. Its commands are then aborted, so
its results are ignored, and the memory stays mapped until its loop is freed.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepmill import _native, timers
from stepmill._native import OwnedFd
from stepmill.backends.base import (
    CALL_SLICE_S,
    GRACE_S,
    BackendTraits,
    Future,
    closed_error,
    name_refusals,
    num_before,
    start_timeout_error,
    warn_of_close_faults,
    worker_fault_error,
)
from stepmill.backends.start_progress import StartProgress
from stepmill.slab.memory import SharedSlab
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import EngineBug, StepmillError, UsageError, join_errors, worker_died_error
from stepmill.spec.notices import warn
from stepmill.worker import process_setup
from stepmill.worker.channel import NO_FD, deadline_after
from stepmill.worker.env_host import (
    BuiltEnvs,
    Fault,
    Owners,
    WorkerLoop,
    apply_requests,
    build_envs,
    close_envs,
    make_loop,
    serve,
    worker_fault,
)
from stepmill.worker.messages import Reply, Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.shared_state import Shares
from stepmill.worker.signals import allow_signals, defer_signals, wait_event

CANCEL_S = 0.3  # after a failed start, how long threads may take to close their envs


class ThreadBackend:
    """Runs each worker in a thread."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._workers: list[ThreadWorker] = []
        self._slab: SharedSlab | None = None
        self._ring: Callable[[int], None] | None = None
        self._is_closed = False

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(monitor=self)

    @property
    def pidfds(self) -> Mapping[int, int]:
        return {worker.plan.worker: worker.end_fd.fileno() for worker in self._workers}

    def exit_code(self, worker: int) -> int | None:
        return None

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        refusals = (OSError, RuntimeError)  # the system has no descriptor or thread left
        with defer_signals(), name_refusals(len(plans), refusals), close_on_error(lambda: self._shut_down(CANCEL_S)):
            for plan in plans:
                self._workers.append(self._make_worker(plan, 0))
            return self._build_all()

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab, self._ring = slab, ring
        num_envs = sum(len(worker.plan.env_ids) for worker in self._workers)
        self._workers[0].shares = Shares.of(num_envs, is_watched=self._settings.watches_sharing, has_threads=True)
        with defer_signals():
            self._attach(self._workers)

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        return [self._call(worker, request) for worker, request in requests.items()]

    def _call(self, worker: int, request: Request) -> Future:
        future = Future(request, worker, self._settings.call_timeout_s, Future.wait_done)
        if self._is_closed or self._ring is None:
            future.fail(closed_error())
        elif self._workers[worker].post(request, future):
            self._ring(worker)
        return future

    def end_worker(self, worker: int) -> None:
        old = self._workers[worker]
        if not old.has_ended.is_set():
            raise UsageError(
                f"worker {worker} (envs {list(old.plan.env_ids)}) is a thread that still runs, and a thread cannot be "
                "killed; use backend='process' for envs that hang"
            )

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Start a new thread in place of one that has ended.

        Raises:
            UsageError: the old thread still runs, and cannot be killed.
        """
        self.end_worker(worker)
        with defer_signals():
            old = self._workers[worker]
            fresh = self._make_worker(old.plan, old.num_posted)
            self._workers[worker] = fresh
            old.close_end_fd()
            with close_on_error(fresh.cancel):
                with allow_signals():
                    fresh.settings_requests = tuple(settings_requests)
                report = self._build([fresh])[0]
                self._attach([fresh])
            return report

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        self._shut_down(timeout_s)
        self._warn_of_end()

    def _shut_down(self, timeout_s: float) -> None:
        with defer_signals():
            self._is_closed = True
            deadline = time.monotonic() + timeout_s
            for worker in self._workers:
                worker.cancel()
            for worker in self._workers:
                worker.join(deadline)
                worker.fail_futures(closed_error())
                worker.close_end_fd()
            self._slab = self._ring = None

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _make_worker(self, plan: WorkerPlan, num_requests: int) -> ThreadWorker:
        """Return a worker whose thread has not started. `num_requests` requests were posted to its predecessors."""
        return ThreadWorker(plan, self._settings, num_requests=num_requests)

    def _build_all(self) -> list[WorkerReport]:
        workers = self._workers
        num_envs = sum(len(each.plan.env_ids) for each in workers)
        with StartProgress(num_envs, is_wanted=self._settings.show_progress) as progress:
            return self._build(workers, lambda: progress.show(lambda: sum(each.num_built for each in workers)))

    def _build(self, workers: Sequence[ThreadWorker], on_wait: Callable[[], None] = lambda: None) -> list[WorkerReport]:
        deadline = deadline_after(self._settings.start_timeout_s)
        owners: Owners = {}
        for worker in workers:
            worker.owners = owners
            worker.thread.start()
        errors: list[StepmillError] = []
        for worker in workers:
            on_wait()
            if worker.wait_set_up(deadline, on_wait):
                errors.extend(worker_fault_error(fault, worker.plan.worker) for fault in worker.built.faults)
            elif not errors:
                errors.append(start_timeout_error(worker.plan, worker.building, self._settings.start_timeout_s or 0.0))
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            raise join_errors(errors)
        return [WorkerReport(worker.plan.worker, self._pid, tuple(worker.built.specs)) for worker in workers]

    def _attach(self, workers: Sequence[ThreadWorker]) -> None:
        deadline = deadline_after(self._settings.start_timeout_s)
        if self._slab is None:
            raise EngineBug("workers cannot attach before there is a slab")
        for worker in workers:
            worker.is_set_up.clear()
            worker.slabs.put(self._slab.native)
        for worker in workers:
            if not worker.wait_set_up(deadline):
                raise EngineBug(f"worker {worker.plan.worker} did not attach within {self._settings.start_timeout_s} s")
            if worker.crash:
                raise worker_fault_error(worker.crash[0], worker.plan.worker)
        for worker in workers:
            worker.slabs.put(self._slab.native)  # all workers have attached, and may serve now

    def _warn_of_end(self) -> None:
        for worker in self._workers:
            if worker.has_ended.is_set() or worker.thread.ident is None:
                warn_of_close_faults(worker.plan.worker, worker.close_faults)
            else:
                warn(
                    f"worker {worker.plan.worker} (envs {list(worker.plan.env_ids)}) hangs in an env, and its thread goes on "
                    "until this process ends, since a thread cannot be killed; use backend='process' for envs that hang"
                )


class _Cancelled(Exception):
    """The start of the pool was cancelled, so the remaining envs must not be built."""


class ThreadWorker:
    """One worker thread, which is also the mailbox of its loop."""

    def __init__(self, plan: WorkerPlan, settings: WorkerSettings, *, num_requests: int = 0) -> None:
        self.plan = plan
        self.num_posted = num_requests
        self.settings_requests: tuple[Request, ...] = ()  # the thread does these before it serves
        self.building: int | None = None
        self.owners: Owners = {}  # shared by the workers that are built together
        self.built = BuiltEnvs()
        self.crash: tuple[Fault, ...] = ()
        self.close_faults: tuple[Fault, ...] = ()
        # The queue gets the slab twice: first to attach to it, then to serve it. None in place of either ends the thread.
        self.slabs: queue.SimpleQueue[_native.Slab | None] = queue.SimpleQueue()
        self.is_set_up = threading.Event()  # set once the envs are built or the slab is attached, or this has failed
        self.has_ended = threading.Event()
        self.end_fd = OwnedFd.eventfd()  # readable once the thread has ended unexpectedly
        self.settings = settings
        self.shares = Shares.NOTHING
        self.num_before = num_requests
        self._lock = threading.Lock()  # guards _requests, and the change of has_ended
        self._is_cancelled = False
        self._requests: deque[tuple[Request, Future]] = deque()
        self._current: Future | None = None
        self.thread = threading.Thread(target=self._run, name=f"stepmill-worker-{plan.worker}", daemon=True)

    def post(self, request: Request, future: Future) -> bool:
        """Queue a request, and return True. If the thread has ended, fail the future and return False."""
        with self._lock:
            if self.has_ended.is_set():
                future.fail(self._worker_died())
                return False
            self._requests.append((request, future))
            self.num_posted += 1
        return True

    def next(self) -> Request | None:
        request, self._current = self._requests.popleft()
        return request

    def reply(self, reply: Reply) -> None:
        if self._current is not None:
            self._current.finish(reply)
            self._current = None

    @property
    def num_built(self) -> int:
        """How many of its envs the thread has built."""
        if self.is_set_up.is_set():
            return len(self.plan.env_ids)
        return num_before(self.plan.env_ids, self.building)

    def wait_set_up(self, deadline: float, on_wait: Callable[[], None] = lambda: None) -> bool:
        """Wait until the thread has built its envs or attached to the slab, or has failed. Return False at the deadline.

        `on_wait` is called in each slice of the wait.
        """
        while not wait_event(self.is_set_up, min(CALL_SLICE_S, max(0.0, deadline - time.monotonic()))):
            on_wait()
            if time.monotonic() >= deadline:
                return False
        return True

    def join(self, deadline: float) -> None:
        """Wait until the thread has ended or the deadline has passed. The thread itself returns at once."""
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(max(0.0, deadline - time.monotonic()))

    def fail_futures(self, error: StepmillError) -> None:
        """Fail every request that has no reply yet."""
        with self._lock:
            waiting = [future for _, future in self._requests]
            self._requests.clear()
        for future in (*waiting, self._current):
            if future is not None:
                future.fail(error)

    def cancel(self) -> None:
        """End a thread that does not serve yet. It closes its envs first."""
        self._is_cancelled = True
        self.slabs.put(None)

    def close_end_fd(self) -> None:
        """Close the descriptor. A thread that still runs can no longer signal its end."""
        with self._lock:
            self.end_fd.close()

    # ---- in the thread: overridden by other kinds of workers ---------------------------------------------------------

    def build(self) -> BuiltEnvs:
        """Build the envs."""
        return build_envs(
            self.plan,
            on_begin=self._begin_env,
            should_raise=lambda exc: isinstance(exc, _Cancelled),
            limits=self.settings.limits_of_envs(),
            owners=self.owners,
        )

    def make_loop(self, slab: _native.Slab) -> WorkerLoop:
        """Return the loop over the envs."""
        return make_loop(slab, self.plan.worker, self.built, self.settings, self.shares)

    def close_envs(self) -> tuple[Fault, ...]:
        """Close the envs, and return the faults of those that raised an exception."""
        return close_envs(self.plan.env_ids, self.built.envs)

    # ---- in the thread: main program ----------------------------------------------------------------------------------

    def _run(self) -> None:
        is_reported = False
        try:
            process_setup.pin_cores(self.plan.affinity)
            timers.enable(self.settings.timers_every)
            self.built = self.build()
            self.is_set_up.set()
            if not self.built.faults:
                slab = self.slabs.get()
                if slab is not None:
                    # The mapping owns its descriptors, so a thread that outlives close() cannot write into other files.
                    self._serve(slab)
                self.close_faults = self.close_envs()
            is_reported = True
        except _Cancelled:
            is_reported = True
        except BaseException as exc:  # an error in stepmill itself is reported, so that the learner does not wait
            self.crash = worker_fault(exc, "serve")
        finally:
            self._end(is_reported=is_reported)

    def _serve(self, slab: _native.Slab) -> None:
        """Attach to the slab, wait until all workers have attached, and serve until the stop word is set."""
        loop = self.make_loop(slab)
        self.crash = apply_requests(loop, self.plan.env_ids, self.built.envs, self.settings_requests)
        if self.crash:
            return
        self.is_set_up.set()
        if self.slabs.get() is not None:
            serve(loop, self.built.envs, self, num_requests=self.num_before)

    def _end(self, *, is_reported: bool) -> None:
        timers.disable()
        with self._lock:
            self.has_ended.set()
            if not is_reported and self.end_fd.fileno() != NO_FD:
                os.eventfd_write(self.end_fd.fileno(), 1)
        self.fail_futures(self._worker_died())
        self.is_set_up.set()
        self.built.envs.clear()

    def _begin_env(self, env_id: int) -> None:
        if self._is_cancelled:
            raise _Cancelled
        self.building = env_id

    def _worker_died(self) -> StepmillError:
        hint = worker_fault_error(self.crash[0], self.plan.worker).message if self.crash else "its thread has ended"
        return worker_died_error(self.plan.worker, self.plan.env_ids, None, hint=hint)
