"""Runs envs in processes, one per worker. They run in parallel, and the death of a worker does not affect the learner.

    learner ──socket──► launcher ──fork or exec──► worker 0, 1, …       (worker/launcher.py, worker/main.py)
       └────────────── a socket to each worker: Build, Attach, slow requests ──────────────┘
                       the slab: everything else, by native code

Every wait has a deadline. A wait polls the channels, the workers' pidfds and the launcher, so it ends if a process dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from stepmill._native import OwnedFd
from stepmill.backends.base import BackendTraits, Future, closed_error, name_refusals, warn_of_close_faults
from stepmill.backends.launcher_client import LauncherClient, read_report, wait_setup
from stepmill.backends.process_link import EXIT_CODE_S, NO_RESULT, WorkerLink, wait_links
from stepmill.backends.start_progress import StartProgress
from stepmill.backends.starter_client import prepare_starter
from stepmill.slab.memory import SharedSlab
from stepmill.spec.closing import close_on_error
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import EngineBug, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.options import Context
from stepmill.worker.build_progress import BuildProgress
from stepmill.worker.by_value import dump_by_value
from stepmill.worker.channel import NO_FD
from stepmill.worker.error_records import describe_error
from stepmill.worker.messages import (
    Attach,
    Attached,
    Build,
    Outcome,
    PackedPlan,
    Request,
    RequestKind,
    Value,
    WorkerPlan,
    WorkerReport,
    WorkerSettings,
    dump,
    dump_plain,
    load,
)
from stepmill.worker.module_contents import warn_of_changed_modules
from stepmill.worker.program_state import ProgramState
from stepmill.worker.signals import allow_signals, defer_signals

STOP_S = 1.5  # how long close() lets workers close their envs before it kills them
INTERRUPTED_STOP_S = 0.3  # the same limit after Ctrl-C at the start, or during a restart
KILL_S = 0.3  # how long a killed process may take to end
END_LAUNCHER_S = 1.5  # how long the launcher may take to end; if it is killed, its dead children become orphans
TRACE_S = 0.25  # how long a worker may take to end before its trace is read
REVIVE_KILL_S = 20.0  # the same before a restart, whose thread may wait: the kernel may have much memory to free
KEPT_BYTES = 1 << 20  # the pickled plan of a worker is kept for restarts if it is at most this large


class ProcessBackend:
    """Runs each worker in a process. Each pool has its own launcher, which starts the processes."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        # This is read once, so that restarted workers get the same state as the first ones.
        self._program = None if settings.context is Context.FORK else ProgramState.read()
        self._pid = os.getpid()
        self._build_messages: dict[int, bytes] = {}  # by worker
        self._links: list[WorkerLink] = []
        self._worker_of: dict[int, int] = {}  # by lane
        self._launcher: LauncherClient | None = None
        self._slab: SharedSlab | None = None
        self._ring: Callable[[int], None] | None = None
        self._progress: StartProgress | None = None
        self._build_progress: BuildProgress | None = None
        self._is_closed = False
        self._end_lock = threading.RLock()  # held while a worker is restarted, and while the pool is closed

    # ---- start ----------------------------------------------------------------------------------------------------

    def begin(self, plans: Sequence[WorkerPlan]) -> None:
        """Start the workers and return at once. Afterwards, `start` with the same plans waits for them."""
        with self._all_or_nothing(len(plans)):
            self._start_workers(plans)

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        num_envs = sum(len(plan.env_ids) for plan in plans)
        self._progress = StartProgress(num_envs, is_wanted=self._settings.show_progress)
        with self._progress, self._all_or_nothing(len(plans)):
            if not self._links:
                self._start_workers(plans)
            self._wait_setup(self._links)
            specs: dict[bytes, EnvSpec] = {}
            reports = [read_report(link, specs) for link in self._links]
            warn_of_changed_modules([link.ready.modules for link in self._links if link.ready is not None])
        self._progress = None
        return reports

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        self._slab, self._ring = slab, ring
        with self._all_or_nothing(len(self._links)):
            largest = max(self._links, key=lambda link: len(link.plan.env_ids))
            self._attach(self._links, watched=largest if self._settings.watches_sharing else None)

    @contextlib.contextmanager
    def _all_or_nothing(self, num_workers: int) -> Iterator[None]:
        """Close the backend if the block raises. Signals are deferred in the block, except while it waits."""
        with defer_signals(), name_refusals(num_workers):
            try:
                yield
            except BaseException as exc:
                self._end_workers(STOP_S if isinstance(exc, Exception) else INTERRUPTED_STOP_S)  # quickly after Ctrl-C
                raise

    def _start_workers(self, plans: Sequence[WorkerPlan]) -> None:
        prepare_starter(self._settings.context, self._settings.worker_env, self._settings.worker_threads)
        with allow_signals():  # pickling runs code of the user
            build_messages = [self._dump_build(plan) for plan in plans]
        self._launcher = LauncherClient(self._settings, plans)
        self._worker_of = {lane: plan.worker for plan in plans for lane in plan.lanes}
        self._build_progress = BuildProgress.make(1 + max(self._worker_of))
        for plan in plans:
            # The links are appended one by one, so that all are closed if this process runs out of descriptors.
            self._links.append(WorkerLink(plan, self._build_progress, has_trace=self._settings.has_trace))
        self._launch(self._links, build_messages)

    def _dump_build(self, plan: WorkerPlan) -> bytes:
        """Return the Build message of a worker. A small one is kept, because pickling blocks the learner's threads."""
        message = self._build_messages.get(plan.worker)
        if message is None:
            data = None if self._program is None else dump_plan(plan)
            message = dump(Build(self._settings, plan.worker, plan.lanes, data, self._program))
            if len(message) <= KEPT_BYTES:
                self._build_messages[plan.worker] = message
        return message

    def _launch(self, links: Sequence[WorkerLink], build_messages: Sequence[bytes]) -> None:
        for link, message in zip(links, build_messages, strict=True):
            self._require_launcher().launch(link)
            link.send(message, link.build_fds)
            if self._settings.start_serially:
                self._wait_setup([link])

    def _wait_setup(self, links: Sequence[WorkerLink]) -> None:
        show = None if self._progress is None else partial(self._progress.show, self._count_built)
        wait_setup(links, self._require_launcher(), self._settings.start_timeout_s, show)

    def _count_built(self) -> int:
        return sum(link.num_built for link in self._links)

    def _attach(
        self, links: Sequence[WorkerLink], settings_requests: Sequence[Request] = (), watched: WorkerLink | None = None
    ) -> None:
        slab = self._slab
        if slab is None:
            raise EngineBug("workers cannot attach before there is a slab")
        for link in links:
            link.awaited = Attached
            lanes, posted = link.plan.lanes, tuple(link.num_posted.values())
            message = Attach(slab.plan_for(lanes), slab.num_lanes, posted, tuple(settings_requests), link is watched)
            link.send(dump_plain(message), slab.fds_of(lanes))
        self._wait_setup(links)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        packed = list(map(pack_request, requests.values()))
        timeout_s = self._settings.call_timeout_s
        make = partial(Future, timeout_s=timeout_s, wait=self._wait, unpack=self._unpack, duplicate=self._duplicate)
        futures = [make(request, self._worker_of[lane], lane=lane) for lane, request in requests.items()]
        with defer_signals():  # the requests are sent to all workers or to none
            for future, request in zip(futures, packed, strict=True):
                self._post(request, future)
        return futures

    def _unpack(self, outcome: Outcome) -> Outcome:
        """Return an outcome whose value is loaded."""
        return unpack_outcome(outcome)

    def _post(self, request: Request, future: Future) -> None:
        ring = self._ring
        while not (self._is_closed or ring is None or os.getpid() != self._pid):
            if self._links[future.worker].post(request, future, ring):
                return  # if not, another thread has just replaced the link, and the loop tries the new one
        future.fail(closed_error())

    def _duplicate(self, future: Future) -> OwnedFd:
        return self._links[future.worker].duplicate()

    def _wait(self, future: Future, deadline: float | None) -> None:
        link = self._links[future.worker]
        while True:
            if os.getpid() == self._pid:  # a forked child must not receive the learner's messages
                link.handle_messages()
            if future.is_done:
                return
            if self._is_closed or os.getpid() != self._pid:
                future.fail(closed_error())
            elif link.is_dead:
                link.handle_messages()
                link.fail_futures()
                future.fail(link.died_error(NO_RESULT))
            else:
                if link.has_hung_up:  # an env has closed the descriptors of its process, which can answer nothing more
                    link.kill()
                if deadline is not None and time.monotonic() >= deadline:
                    return
                wait_links([link], deadline)

    # ---- deaths ---------------------------------------------------------------------------------------------------

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(monitor=self, traces=self, can_restart_living=True, has_processes=True)

    @property
    def pidfds(self) -> Mapping[int, int]:
        return {link.plan.worker: link.pidfd for link in self._links}

    def exit_code(self, worker: int) -> int | None:
        link = self._links[worker]
        return link.find_exit_code(EXIT_CODE_S) if link.is_dead else link.exit_code

    def read_trace(self, worker: int) -> str:
        link = self._links[worker]
        link.wait_end(time.monotonic() + TRACE_S)
        return link.read_trace()

    def end_worker(self, worker: int) -> None:
        old = self._links[worker]
        old.kill()
        if not old.wait_end(time.monotonic() + REVIVE_KILL_S):
            raise old.died_error(f"its process {old.pid} does not end, even by SIGKILL, and cannot be restarted")
        old.fail_futures()

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Kill the worker's process if it still runs, and start a new one.

        Raises:
            WorkerDied: the old process does not end, even after SIGKILL, or the new one dies at the start.
            EnvError, EnvTimeout: as for `start`.
            UsageError: the system refuses another process or descriptor.
            LauncherDied: the launcher has ended, so no worker can be started.
        """
        with defer_signals(), name_refusals(1):
            old = self._links[worker]
            if not old.is_dead:
                self.end_worker(worker)
            self._renew_launcher(old.plan)
            fresh = self._replace_link(old)
            with close_on_error(lambda: self._discard(fresh)):
                with allow_signals():  # pickling runs code of the user
                    packed = list(map(pack_request, settings_requests))
                self._launch([fresh], [self._dump_build(fresh.plan)])
                self._attach([fresh], packed)  # the worker reads this when it has built its envs
                if self._ring is not None:
                    fresh.begin_serving(self._ring)
                return read_report(fresh, {})

    def _renew_launcher(self, plan: WorkerPlan) -> None:
        """Replace the launcher if it has ended."""
        with self._end_lock:  # several threads restart workers
            launcher = self._require_launcher()
            if launcher.is_dead:
                if self._settings.context is Context.FORK:
                    raise launcher.died()
                launcher.end(0.0)
                self._launcher = LauncherClient(self._settings, [plan])

    def _discard(self, fresh: WorkerLink) -> None:
        """Kill a worker that could not be restarted. Its link stays until the next attempt replaces it."""
        hint = "it could not be restarted"
        if fresh.pidfd == NO_FD:
            fresh.mark_launch_failed(hint)
        fresh.fail_futures(lambda: fresh.died_error(hint))
        fresh.kill()

    def _replace_link(self, old: WorkerLink) -> WorkerLink:
        fresh = WorkerLink(old.plan, old.progress, has_trace=self._settings.has_trace)
        fresh.is_reviving = True
        with self._end_lock:
            if self._is_closed:  # close() has ended the workers, and would miss this one
                fresh.close()
                raise closed_error()
            self._links[old.plan.worker] = fresh
            old.close()
            # This is read here, because another thread may have posted to the old link until now.
            fresh.num_posted = old.num_posted
            old.fail_futures()
        return fresh

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        if os.getpid() != self._pid or self._is_closed:
            return
        deadline = time.monotonic() + timeout_s
        try:
            if timeout_s > STOP_S:
                self._wait_for_envs(deadline)
        finally:
            with defer_signals():  # Ctrl-C must not interrupt this part, which takes two seconds at most
                killed = self._end_workers(max(0.0, min(deadline - time.monotonic(), STOP_S)))
        for link in self._links:
            warn_of_close_faults(link.plan.worker, link.close_faults)
        for link, has_ended in killed:
            fate = "it was killed" if has_ended else f"process {link.pid} had not ended {KILL_S} s after SIGKILL"
            warn(
                f"worker {link.plan.worker} (envs {list(link.plan.env_ids)}) did not stop within {timeout_s} s, and {fate}; "
                "close() of its envs may not have run; VectorEnv.close(timeout=...) and Pool.close(timeout_s=...) give them more time"
            )

    def _end_workers(self, stop_s: float) -> list[tuple[WorkerLink, bool]]:
        """End all processes and close all descriptors. The caller defers signals.

        Return the link of each process that was killed, and whether it has ended.
        """
        with self._end_lock:
            self._is_closed = True
        deadline = time.monotonic() + stop_s
        for link in self._links:
            if self._slab is None or not isinstance(link.setup_result, Attached):
                link.channel.shut()  # ends a worker that does not serve a slab yet
        # A worker that is being restarted is not in use yet, so it is killed soon and without a warning.
        reviving = [link for link in self._links if link.is_reviving]
        for link in reviving:
            link.wait_end(min(deadline, time.monotonic() + INTERRUPTED_STOP_S))
            link.kill()
        self._wait_ends(deadline)
        killed = [link for link in self._links if link.pidfd != NO_FD and not link.is_dead and link not in reviving]
        for link in self._links:
            link.kill()
        self._wait_ends(time.monotonic() + KILL_S)
        fates = [(link, link.is_dead) for link in killed]
        if self._launcher is not None:
            self._launcher.end(END_LAUNCHER_S)
        self._launcher = None
        for link in self._links:
            link.fail_futures(closed_error)
            link.close()
        if self._build_progress is not None:
            self._build_progress.close()
        self._slab = self._ring = None
        return fates

    def _wait_for_envs(self, deadline: float) -> None:
        """Wait for the workers whose envs close, for as long as the caller of `close` wants. Ctrl-C ends the wait."""
        with allow_signals():
            for link in self._links:
                if not link.is_reviving:
                    link.wait_end(deadline)

    def _wait_ends(self, deadline: float) -> None:
        for link in self._links:
            # The waits may follow each other: the deadline is the same for all, and the workers end in parallel.
            link.wait_end(deadline)

    def _require_launcher(self) -> LauncherClient:
        if self._launcher is None:
            raise closed_error()
        return self._launcher


def dump_plan(plan: WorkerPlan) -> bytes:
    """Return the plan of a worker as the bytes of a PackedPlan.

    Raises:
        UsageError: `workers.init` or an env_fn cannot be pickled.
    """
    env_fns = _dump_env_fns(plan)
    try:
        return dump(PackedPlan(dataclasses.replace(plan, env_fns=()), env_fns))
    except Exception as exc:
        raise UsageError(
            f"workers.init cannot be pickled: {type(exc).__name__}: {exc}; create what it needs inside of it, or use "
            "context='fork'"
        ) from exc


def _dump_env_fns(plan: WorkerPlan) -> bytes:
    try:
        return dump_by_value(plan.env_fns)
    except Exception as exc:
        culprit = next(
            (env_id for env_id, env_fn in zip(plan.env_ids, plan.env_fns, strict=True) if not _can_travel(env_fn)), None
        )
        which = f"the env_fn of env {culprit}" if culprit is not None else f"the env_fns of worker {plan.worker}"
        raise UsageError(
            f"{which} cannot be pickled: {type(exc).__name__}: {exc}; create what it needs inside of it, or use context='fork'"
        ) from exc


def _can_travel(value: object) -> bool:
    try:
        dump(value)
    except Exception:
        return False
    return True


def pack_request(request: Request) -> Request:
    """Return a request whose payload is bytes, made by `dump`. On a node of another machine they are bytes already."""
    if isinstance(request.payload, bytes):
        return request
    try:
        return request._replace(payload=dump_by_value(request.payload))
    except Exception as exc:
        what = "value" if request.kind is RequestKind.SET_ATTR else "arguments"
        raise UsageError(
            f"the {what} of this {request.kind.name.lower()} cannot be pickled: {type(exc).__name__}: {exc}; "
            "send something that can be pickled, or use backend='thread'"
        ) from exc


def unpack_outcome(outcome: Outcome) -> Outcome:
    """Return an outcome whose value is loaded from bytes."""
    if not isinstance(outcome, Value) or not isinstance(outcome.value, bytes):
        return outcome
    try:
        return Value(load(outcome.value))
    except BaseException as exc:  # loading runs code of the user's classes
        return describe_error(exc, "call")
