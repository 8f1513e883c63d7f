"""Envs in threads of this process, one thread per worker. They run in parallel as far as their code lets go of the GIL.

A thread cannot be killed: one that hangs in an env is left behind by close(), with a warning. It can write nothing any more:
its rows are condemned, and the memory stays mapped as long as its loop lives.
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
    Future,
    deadline_after,
    died_error,
    fault_error,
    late_start,
    too_many_workers,
    warn_of_close,
)
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, EngineBug, StepmillError, UsageError, join_errors
from stepmill.spec.notices import warn
from stepmill.worker import settle
from stepmill.worker.channel import NO_FD
from stepmill.worker.host import Built, Fault, build, close_envs, make_loop, no_env, obey, serve
from stepmill.worker.messages import Reply, Request, WorkerPlan, WorkerReport, WorkerSettings
from stepmill.worker.signals import allow_signals, defer_signals, wait_event

CANCEL_S = 0.3  # how long a start that failed waits for threads to close what they have built
GRACE_S = 2.0  # after the first fault at the start, how long the other workers may go on to tell theirs


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
    def pidfds(self) -> Mapping[int, int]:
        return {worker.plan.worker: worker.end_fd.fileno() for worker in self._workers}

    def exit_code(self, worker: int) -> int | None:
        return None

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        with defer_signals():
            try:
                for plan in plans:
                    self._workers.append(self._make_worker(plan, 0))
                return self._build(self._workers)
            except (OSError, RuntimeError) as exc:  # no descriptor, or no thread, is left
                self._shut(CANCEL_S)
                raise too_many_workers(len(plans), exc) from exc
            except BaseException:
                self._shut(CANCEL_S)
                raise

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab, self._ring = slab, ring
        with defer_signals():
            self._attach(self._workers)

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        return [self._call(worker, request) for worker, request in requests.items()]

    def _call(self, worker: int, request: Request) -> Future:
        future = Future(request, worker, self._settings.call_timeout_s, self._wait)
        if self._is_closed or self._ring is None:
            future.fail(_closed())
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

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        """Starts a new thread in place of one that has ended.

        Raises:
            UsageError: the old thread still runs; it cannot be killed.
        """
        self.end_worker(worker)
        with defer_signals():
            old = self._workers[worker]
            fresh = self._make_worker(old.plan, old.num_posted)
            self._workers[worker] = fresh
            old.close_end_fd()
            try:
                with allow_signals():
                    fresh.orders = tuple(orders)
                report = self._build([fresh])[0]
                self._attach([fresh])
            except BaseException:
                fresh.cancel()
                raise
            return report

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        self._shut(timeout_s)
        self._tell_end()

    def _shut(self, timeout_s: float) -> None:
        with defer_signals():
            self._is_closed = True
            deadline = time.monotonic() + timeout_s
            for worker in self._workers:
                worker.cancel()
            for worker in self._workers:
                worker.join(deadline)
                worker.fail_futures(_closed())
                worker.close_end_fd()
            self._slab = self._ring = None

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _make_worker(self, plan: WorkerPlan, num_requests: int) -> ThreadWorker:
        """Return a worker that has not begun; so many requests went to those before it."""
        return ThreadWorker(plan, self._settings, num_requests=num_requests)

    def _build(self, workers: Sequence[ThreadWorker]) -> list[WorkerReport]:
        deadline = deadline_after(self._settings.start_timeout_s)
        for worker in workers:
            worker.thread.start()
        errors: list[StepmillError] = []
        for worker in workers:
            if worker.wait_answer(deadline):
                errors.extend(fault_error(fault, worker.plan.worker) for fault in worker.built.faults)
            elif not errors:
                errors.append(late_start(worker.plan, worker.building, self._settings.start_timeout_s or 0.0))
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
            worker.has_answered.clear()
            worker.slabs.put(self._slab.native)
        for worker in workers:
            if not worker.wait_answer(deadline):
                raise EngineBug(f"worker {worker.plan.worker} did not attach within {self._settings.start_timeout_s} s")
            if worker.crash:
                raise fault_error(worker.crash[0], worker.plan.worker)
        for worker in workers:
            worker.slabs.put(self._slab.native)  # from here on nothing fails: they begin to serve

    def _wait(self, future: Future, deadline: float | None) -> None:
        while not future.is_done:
            left_s = CALL_SLICE_S if deadline is None else min(CALL_SLICE_S, deadline - time.monotonic())
            if left_s <= 0:
                return
            future.wait_done(left_s)

    def _tell_end(self) -> None:
        for worker in self._workers:
            if worker.has_ended.is_set() or worker.thread.ident is None:
                warn_of_close(worker.plan.worker, worker.close_faults)
            else:
                warn(
                    f"worker {worker.plan.worker} (envs {list(worker.plan.env_ids)}) hangs in an env, and a thread cannot be "
                    "killed: it stays until this process ends; use backend='process' for envs that hang",
                )


class _Cancelled(Exception):
    """The start of a pool was broken off; envs that are not built yet are not wanted."""


class ThreadWorker:
    """One worker thread. It is its own mailbox."""

    def __init__(self, plan: WorkerPlan, settings: WorkerSettings, *, num_requests: int = 0) -> None:
        self.plan = plan
        self.num_posted = num_requests
        self.orders: tuple[Request, ...] = ()  # to be done before it serves
        self.building: int | None = None
        self.built = Built()
        self.crash: tuple[Fault, ...] = ()
        self.close_faults: tuple[Fault, ...] = ()
        # The slab to make ready for, the slab again to begin to serve it; None, whichever of the two is due, to end.
        self.slabs: queue.SimpleQueue[_native.Slab | None] = queue.SimpleQueue()
        self.has_answered = threading.Event()  # it has built its envs, or attached, or cannot
        self.has_ended = threading.Event()
        self.end_fd = OwnedFd.eventfd()  # readable once the thread has ended without being told to
        self.settings = settings
        self.num_before = num_requests
        self._lock = threading.Lock()  # guards _requests, and has_ended being set
        self._is_cancelled = False
        self._requests: deque[tuple[Request, Future]] = deque()
        self._current: Future | None = None
        self.thread = threading.Thread(target=self._run, name=f"stepmill-worker-{plan.worker}", daemon=True)

    def post(self, request: Request, future: Future) -> bool:
        """Queues a request. Returns False, with the future failed, if nobody is left to serve it."""
        with self._lock:
            if self.has_ended.is_set():
                future.fail(self._ended())
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

    def wait_answer(self, deadline: float) -> bool:
        """Waits until the thread has done what it was last told; returns False at the deadline."""
        while not wait_event(self.has_answered, min(CALL_SLICE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def join(self, deadline: float) -> None:
        """Waits until the thread has ended, at most until the deadline. A thread does not wait for itself."""
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(max(0.0, deadline - time.monotonic()))

    def fail_futures(self, error: StepmillError) -> None:
        """Fails every request that has no reply yet."""
        with self._lock:
            waiting = [future for _, future in self._requests]
            self._requests.clear()
        for future in (*waiting, self._current):
            if future is not None:
                future.fail(error)

    def cancel(self) -> None:
        """Tells a thread that does not serve yet to close what it has built, and to end."""
        self._is_cancelled = True
        self.slabs.put(None)

    def close_end_fd(self) -> None:
        """Closes the descriptor. A thread that still runs does not signal its end any more."""
        with self._lock:
            self.end_fd.close()

    # ---- in the thread: what a backend with another kind of worker does differently ---------------------------------

    def build(self) -> Built:
        """Builds the envs."""
        return build(
            self.plan.env_ids,
            self.plan.env_fns,
            on_begin=self._note_env,
            passes=lambda exc: isinstance(exc, _Cancelled),
        )

    def serve_slab(self, slab: _native.Slab) -> None:
        """Serves the slab, if it `may_serve`, until the pool says stop."""
        loop = make_loop(slab, self.plan.worker, self.built, self.settings, is_inline=False)
        self.crash = obey(loop, self.plan.env_ids, self.built.envs, self.orders)
        if self.crash:
            return
        loop.refresh()
        if self.may_serve():
            serve(loop, self.built.envs, self, num_requests=self.num_before)

    def may_serve(self) -> bool:
        """Answers that the thread is ready to serve; waits until it is told to begin, or to end."""
        self.has_answered.set()
        return self.slabs.get() is not None

    def close_envs(self) -> tuple[Fault, ...]:
        """Closes the envs, and returns the records of those that raised."""
        return close_envs(self.plan.env_ids, self.built.envs)

    # ---- in the thread: its life --------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_told = False
        try:
            settle.pin_cores(self.settings.affinity)
            timers.enable(self.settings.timers_every)
            self.built = self.build()
            self.has_answered.set()
            is_told = bool(self.built.faults) or self._serve()
        except _Cancelled:
            is_told = True
        except BaseException as exc:  # a bug of ours: the learner must hear of it, and not wait for this thread
            self.crash = no_env(exc, "serve")
        finally:
            self._end(is_told=is_told)

    def _serve(self) -> bool:
        slab = self.slabs.get()
        if slab is not None:
            # The mapping owns its descriptors: a thread that close() had to leave behind does not write into another file.
            self.serve_slab(slab)
        self.close_faults = self.close_envs()
        return True

    def _end(self, *, is_told: bool) -> None:
        timers.disable()
        with self._lock:
            self.has_ended.set()
            if not is_told and self.end_fd.fileno() != NO_FD:
                os.eventfd_write(self.end_fd.fileno(), 1)
        self.fail_futures(self._ended())
        self.has_answered.set()
        self.built.envs.clear()

    def _note_env(self, env_id: int) -> None:
        if self._is_cancelled:
            raise _Cancelled
        self.building = env_id

    def _ended(self) -> StepmillError:
        hint = fault_error(self.crash[0], self.plan.worker).message if self.crash else "its thread has ended"
        return died_error(self.plan.worker, self.plan.env_ids, None, hint=hint)


def _closed() -> ClosedPoolError:
    return ClosedPoolError("the pool was closed before the reply came; take results before close()")
