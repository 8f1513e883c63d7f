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
from stepmill.backends.base import (
    CALL_SLICE_S,
    Future,
    deadline_after,
    died_error,
    fault_error,
    late_start,
    num_workers,
    own_fds,
    too_many_workers,
    warn_of_close,
)
from stepmill.backends.hurry import hurried
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, EngineBug, StepmillError, UsageError, join_errors
from stepmill.spec.notices import warn
from stepmill.worker import settle
from stepmill.worker.channel import close_fds
from stepmill.worker.host import Built, Fault, attach_own, build, close_envs, make_loop, no_env, obey, serve
from stepmill.worker.messages import Reply, Request, WorkerPlan, WorkerReport, WorkerSettings

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
        return {worker.plan.worker: worker.end_fd for worker in self._workers}

    def exit_code(self, worker: int) -> int | None:
        return None

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        try:
            for plan in plans:
                self._workers.append(self._make_worker(plan, 0))
            return self._build(self._workers)
        except (OSError, RuntimeError) as exc:  # no descriptor, or no thread, is left
            self._shut(0.0)
            raise too_many_workers(len(plans), exc) from exc
        except BaseException:
            self._shut(0.0)
            raise

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab, self._ring = slab, ring
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
        old = self._workers[worker]
        old.let_go()
        fresh = self._make_worker(old.plan, old.num_posted)
        self._workers[worker] = fresh
        fresh.orders = tuple(orders)
        report = self._build([fresh])[0]
        self._attach([fresh])
        return report

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        self._shut(hurried(timeout_s))
        self._tell_end()

    def _shut(self, timeout_s: float) -> None:
        self._is_closed = True
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.slabs.put(None)
        for worker in self._workers:
            worker.join(deadline)
            worker.fail_futures(_closed())
            worker.let_go()
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
        for worker in workers:
            worker.has_answered.clear()
            worker.slabs.put(self._slab)
        for worker in workers:
            if not worker.wait_answer(deadline):
                raise EngineBug(f"worker {worker.plan.worker} did not attach within {self._settings.start_timeout_s} s")
            if worker.crash:
                raise fault_error(worker.crash[0], worker.plan.worker)

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
        self.slabs: queue.SimpleQueue[SharedSlab | None] = queue.SimpleQueue()
        self.has_answered = threading.Event()  # it has built its envs, or attached, or cannot
        self.has_ended = threading.Event()
        self.end_fd = os.eventfd(0)  # readable once the thread has ended without being told to
        self.settings = settings
        self.num_before = num_requests
        self._lock = threading.Lock()  # guards _requests, _is_let_go, and has_ended being set
        self._is_let_go = False
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
        while not self.has_answered.wait(min(CALL_SLICE_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def join(self, deadline: float) -> None:
        """Waits until the thread has ended, at most until the deadline. A thread does not wait for itself."""
        if self.thread.ident is not None and self.thread is not threading.current_thread():
            self.thread.join(max(0.0, deadline - time.monotonic()))

    def let_go(self) -> None:
        """Frees the descriptor, or leaves that to a thread that still runs."""
        with self._lock:
            if self.has_ended.is_set() or self.thread.ident is None:
                close_fds([self.end_fd])
            self._is_let_go = True

    def fail_futures(self, error: StepmillError) -> None:
        """Fails every request that has no reply yet."""
        with self._lock:
            waiting = [future for _, future in self._requests]
            self._requests.clear()
        for future in (*waiting, self._current):
            if future is not None:
                future.fail(error)

    # ---- in the thread: what a backend with another kind of worker does differently ---------------------------------

    def build(self) -> Built:
        """Builds the envs."""
        return build(self.plan.env_ids, self.plan.env_fns, on_begin=self._note_env)

    def serve_slab(self, slab: _native.Slab) -> None:
        """Serves the slab until the pool says stop; sets `has_answered` when it begins."""
        loop = make_loop(slab, self.plan.worker, self.built, self.settings, is_inline=False)
        self.crash = obey(loop, self.plan.env_ids, self.built.envs, self.orders)
        if self.crash:
            return
        loop.refresh()
        self.has_answered.set()
        serve(loop, self.built.envs, self, num_requests=self.num_before)

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
        except BaseException as exc:  # a bug of ours: the learner must hear of it, and not wait for this thread
            self.crash = no_env(exc, "serve")
        finally:
            self._end(is_told=is_told)

    def _serve(self) -> bool:
        slab = self.slabs.get()
        if slab is not None:
            # Our own descriptors: a thread that close() had to leave behind must not write into a file that got their numbers.
            fds = [os.dup(fd) for fd in own_fds(slab, self.plan.worker)]
            try:
                self.serve_slab(attach_own(slab.plan, num_workers(slab), self.plan.worker, fds))
            finally:
                close_fds(fds)
        self.close_faults = self.close_envs()
        return True

    def _end(self, *, is_told: bool) -> None:
        timers.disable()
        with self._lock:
            self.has_ended.set()
            if self._is_let_go:
                close_fds([self.end_fd])
            elif not is_told:
                os.eventfd_write(self.end_fd, 1)
        self.fail_futures(self._ended())
        self.has_answered.set()
        self.built.envs.clear()

    def _note_env(self, env_id: int) -> None:
        self.building = env_id

    def _ended(self) -> StepmillError:
        hint = fault_error(self.crash[0], self.plan.worker).message if self.crash else "its thread has ended"
        return died_error(self.plan.worker, self.plan.env_ids, None, hint=hint)


def _closed() -> ClosedPoolError:
    return ClosedPoolError("the pool was closed before the reply came; take results before close()")
