"""Records the states of a pool's workers, their deaths and their restarts.

    SERVING ──death is noticed──► DEAD_UNREPORTED ──error is raised──► DEAD_REPORTED
       ▲                             │    ▲                               │
       │       the policy restarts it  ▼    │ that failed                   ▼ reset() or revive()
       └────────its envs are built── RESTARTING ◄─────────────────────────┘

`WorkerSupervisor` has one record per worker. Only it changes the records, in the pool's thread. A restart runs in its
own thread (`RestartTask`), which accesses no record. It stores its outcome in the task, and ends the pool's wait. The
number of restarts that build envs at the same time is at most the number of usable cores, or one less beside an event
loop. No method calls `apply`. The methods return decisions, which the caller carries out.
"""

from __future__ import annotations

import contextlib
import enum
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

from stepmill import _native
from stepmill.backends.base import Backend, MonitoredBackend, too_many_workers_error, traits_of
from stepmill.pool.call_log import AppliedSettings, CallLog
from stepmill.pool.events import BeginRestart, CancelRestart, Death, Decision, Event, Remedy, ServerView, ServeWorker
from stepmill.pool.faults import DEATH_HINTS
from stepmill.spec.errors import ClosedPoolError, EngineBug, StepmillError, UsageError, WorkerDied, worker_died_error
from stepmill.spec.options import PoolOptions
from stepmill.worker.channel import wait_ready
from stepmill.worker.messages import Request, RequestKind, WorkerPlan, WorkerReport

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
JOIN_S = 1.0  # how long close() waits for a restart that it has just interrupted
END_S = 1.5  # how long a worker that is recycled may take to close its envs
END_ID = -(1 << 60)  # the id of the request that ends a worker


class WorkerState(enum.Enum):
    """The state of a worker, as far as the pool knows.

    SERVING: The worker runs.
    DEAD_UNREPORTED: The worker has ended, was given up or could not be restarted, and no error has been raised for it
        yet.
    DEAD_REPORTED: An error was raised for the worker. Its envs wait for reset() or revive().
    RESTARTING: A RestartTask starts its successor.
    """

    SERVING = enum.auto()
    DEAD_UNREPORTED = enum.auto()
    DEAD_REPORTED = enum.auto()
    RESTARTING = enum.auto()


TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.SERVING: frozenset({WorkerState.DEAD_UNREPORTED, WorkerState.RESTARTING}),
    WorkerState.DEAD_UNREPORTED: frozenset({WorkerState.DEAD_REPORTED, WorkerState.RESTARTING}),
    WorkerState.DEAD_REPORTED: frozenset({WorkerState.RESTARTING}),
    WorkerState.RESTARTING: frozenset({WorkerState.SERVING, WorkerState.DEAD_UNREPORTED}),
}
DEAD = (WorkerState.DEAD_UNREPORTED, WorkerState.DEAD_REPORTED)


class FailureLimit:
    """Allows a limited number of failures in a window of time."""

    def __init__(self, max_failures: int, window_s: float) -> None:
        self._max_failures = max_failures
        self._window_s = window_s
        self._times: deque[float] = deque()

    def count(self) -> int | None:
        """Count a failure. Return its number in the window, from 1 on, or None if the limit is reached."""
        now = time.monotonic()
        while self._times and now - self._times[0] > self._window_s:
            self._times.popleft()
        if len(self._times) >= self._max_failures:
            return None
        self._times.append(now)
        return len(self._times)


class RestartTask(threading.Thread):
    """Restarts one worker once. `result` is the report of the successor, or the error, or None until then."""

    def __init__(
        self, worker: int, restart: Callable[[threading.Event], WorkerReport], notify: Callable[[], object]
    ) -> None:
        """Plan a restart.

        Args:
            worker: the number of the worker.
            restart: a function that restarts the worker, and returns the report of the successor. Its argument is an
                event that is set when the restart is cancelled.
            notify: a function that is called at the end.
        """
        super().__init__(name=f"stepmill-restart-{worker}", daemon=True)
        self.result: WorkerReport | StepmillError | None = None
        self.start_s = 0.0  # how many seconds it took to build the envs
        self.cancelled = threading.Event()
        self._worker, self._restart, self._notify = worker, restart, notify

    def start(self) -> None:
        """Start the thread. If that fails, the failure is the result."""
        try:
            super().start()
        except RuntimeError as exc:
            self.result = too_many_workers_error(1, exc)
            self._notify()

    def run(self) -> None:
        """Store the result, and notify the pool."""
        try:
            self.result = self._restart(self.cancelled)
        except StepmillError as error:
            self.result = error
        except Exception as exc:  # for example, no descriptors or no memory
            self.result = EngineBug(f"worker {self._worker} could not be restarted: {type(exc).__name__}: {exc}")
        self._notify()


@dataclass
class WorkerRecord:
    """Everything that the pool knows about one worker.

    Attributes:
        plan: the envs of the worker, which are the same for all generations.
        pid: the pid of the newest successor, or of the learner if the worker is a thread.
        limit: the limit of its restarts.
        state: see WorkerState.
        generation: how often it was restarted.
        error: why it died or could not be restarted; None if this is not known.
        task: its current or last restart.
        settings: the settings to re-apply to its envs.
        remedy: what happens to the episodes that its newest restart ends.
        is_recycling: whether the restart is one between episodes.
        is_retried: whether another restart follows one that fails.
        num_in_row: how many restarts were counted since a worker last did some work; see `_has_worked`.
        served_s, start_s: when its newest successor began to serve, and how many seconds it took to start.
    """

    plan: WorkerPlan
    limit: FailureLimit
    settings: AppliedSettings
    pid: int = 0
    state: WorkerState = WorkerState.SERVING
    generation: int = 0
    error: StepmillError | None = None
    task: RestartTask | None = None
    remedy: Remedy = Remedy.RAISE
    is_recycling: bool = False
    is_retried: bool = False
    num_in_row: int = 0
    served_s: float = 0.0
    start_s: float = 0.0


class _NoState:
    """Takes the place of the pool state before the pool runs and after its end."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ClosedPoolError("the pool is closed; make a new one")


_NO_STATE: Any = _NoState()


class _SupervisedBackend(Backend, MonitoredBackend, Protocol):
    """A backend whose workers die and are restarted."""


class WorkerSupervisor:
    """Owns the records of a pool's workers, which other code only reads. Only the pool's thread uses it."""

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.death_hint = DEATH_HINTS[options.on_fault]
        self.log = CallLog(sum(len(plan.env_ids) for plan in plans), options.restarts.replay_log_bytes // 2)
        self._backend = cast("_SupervisedBackend", backend)  # it is one if workers can die or be restarted
        self._traits = traits_of(backend)
        is_remote = self._traits.nodes is not None  # a restart may then wait for a machine, and needs no core here
        self._turns = threading.Semaphore(len(plans) + 1 if is_remote else _native.usable_cores())
        self.state: _native.PoolState = _NO_STATE  # of the pool whose workers these are
        self._reaper: _native.Reaper | None = None
        self.records = [
            WorkerRecord(
                plan,
                limit=FailureLimit(options.restarts.max_restarts, options.restarts.restart_window_s),
                settings=AppliedSettings(plan.lanes.values()),
            )
            for plan in plans
        ]
        self._has_spares = options.resets.spare_envs > 0
        self.worker_of_server = {server: plan.worker for plan in plans for server in plan.env_ids}

    def attach(self, state: _native.PoolState, reaper: _native.Reaper | None = None) -> None:
        """Store the pool state, and the reaper if workers can die."""
        self.state, self._reaper = state, reaper

    # ---- queries --------------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether the pool runs. If not, every use of `state` raises ClosedPoolError."""
        return self.state is not _NO_STATE

    @property
    def can_restart_living(self) -> bool:
        """Whether a worker that still runs can be ended. This is so for processes, and not for threads."""
        return self._traits.can_restart_living

    def view_of(self, env_id: int) -> ServerView:
        """Return the view of the server of an env."""
        view: ServerView = self.state.view(env_ids=[env_id])[0]
        return view

    def views_of(self, worker: int) -> list[ServerView]:
        """Return the views of a worker's servers."""
        return self.state.view(self.records[worker].plan.env_ids)

    def death_of(self, worker: int) -> Death:
        """Return a worker's death that `drain` does not return, such as that of a successor, without the lost commands."""
        views = {view.env_id: view for view in self.views_of(worker) if view.env_id is not None}
        running = [env_id for env_id, view in views.items() if view.has_run_last]
        return Death(worker, self.records[worker].generation, sorted(views), running)

    def envs_of(self, worker: int) -> list[int]:
        """Return the envs that a worker serves. With spares, these may differ from those of its plan."""
        if not self._has_spares:
            return list(self.records[worker].plan.env_ids)
        return sorted([view.env_id for view in self.views_of(worker) if view.env_id is not None])

    def worker_of(self, env_id: int) -> int:
        """Return the worker that serves an env."""
        return self.workers_of([env_id])[env_id]

    def workers_of(self, env_ids: Sequence[int]) -> dict[int, int]:
        """Return the workers that serve envs, by env."""
        view = self.state.view  # raises an error if the pool is closed
        if not self._has_spares:  # the server of an env has its number
            return {env_id: self.worker_of_server[env_id] for env_id in env_ids}
        return {env_id: own.worker for env_id, own in zip(env_ids, view(env_ids=env_ids), strict=True)}

    def record_deaths(self, events: Iterable[Event] | None = None) -> Mapping[int, Death]:
        """Record the deaths among these events, or among those that the pool state has now. Return them by worker."""
        deaths = {}
        for event in self.state.drain(acknowledge=False) if events is None else events:
            if isinstance(event, Death):
                deaths[event.worker] = event
                record = self.records[event.worker]
                if record.state is WorkerState.SERVING and record.generation == event.generation:
                    self._move(record, WorkerState.DEAD_UNREPORTED)
                    record.error = None
        return deaths

    def check_process(self, worker: int) -> WorkerRecord:
        """Check the process of a worker, whose death the reaper may not have noticed yet, and return its record."""
        if self.records[worker].state is WorkerState.SERVING and self._traits.monitor is not None:
            pidfd = self._backend.pidfds.get(worker)
            if self._reaper is not None and pidfd is not None and wait_ready({pidfd: select.POLLIN}, 0.0):
                self._reaper.declare_dead(worker)
            self.record_deaths()
        return self.records[worker]

    def _move(self, record: WorkerRecord, state: WorkerState) -> None:
        if state not in TRANSITIONS[record.state]:
            raise EngineBug(
                f"worker {record.plan.worker} cannot go from {record.state.name} to {state.name}; please report this"
            )
        record.state = state

    # ---- deaths -----------------------------------------------------------------------------------------------------

    def worker_died_error(self, death: Death) -> WorkerDied:
        """Return an error that describes the death of a worker."""
        nodes, worker = self._traits.nodes, death.worker
        code = None if self._traits.monitor is None else self._backend.exit_code(worker)
        node, cause = (None, None) if nodes is None else (nodes.describe_node(worker), nodes.cause_of_death(worker))
        error = worker_died_error(worker, death.env_ids, code, hint=self.death_hint, node=node, cause=cause)
        error.running_env_id = death.running[0] if len(death.running) == 1 else None
        return error

    def mark_reported(self, worker: int, error: StepmillError) -> None:
        """Record that the error of a dead worker is about to be raised, unless one was raised before."""
        record = self.records[worker]
        if record.state is WorkerState.DEAD_UNREPORTED:
            record.error = error
            self._move(record, WorkerState.DEAD_REPORTED)

    def record_replies(self, lane: int, num_requests: int) -> None:
        """Report to the reaper that a lane has replied to its first `num_requests` requests."""
        if self._reaper is not None:
            self._reaper.record_answered(lane, num_requests)

    # ---- restarts ---------------------------------------------------------------------------------------------------

    def count_restart(self, worker: int, error: StepmillError) -> float | None:
        """Count a restart of a worker because of `error`, and return the delay before it in seconds.

        Return None if no restart is allowed, or none would succeed.
        """
        record = self.records[worker]
        if error.is_final or record.limit.count() is None:
            return None
        record.num_in_row = 1 if self._has_worked(record) else record.num_in_row + 1
        exponent = min(record.num_in_row - 2, 64)  # 2.0 ** 1024 is an OverflowError
        return 0.0 if exponent < 0 else min(FIRST_BACKOFF_S * 2.0**exponent, MAX_BACKOFF_S)

    def _has_worked(self, record: WorkerRecord) -> bool:
        """Return whether a worker served for as long as it took to start, or completed an episode."""
        if record.state is WorkerState.RESTARTING:  # the restart has failed
            return False
        has_served = time.monotonic() - record.served_s >= record.start_s
        return has_served or self.state.num_ended(record.plan.worker) > 0

    def leave_core_free(self) -> None:
        """Let restarts build envs on one core less, if there are several, because the learner runs meanwhile."""
        if _native.usable_cores() > 1:
            self._turns.acquire()

    def check_restartable(self, worker: int) -> None:
        """Refuse a restart that cannot succeed.

        Raises:
            UsageError: the worker is not a process of its own, and still runs.
        """
        if not self.can_restart_living:
            if self.records[worker].state not in DEAD:
                raise UsageError(f"worker {worker} cannot be restarted while it runs; use backend='process'")
            self._backend.end_worker(worker)  # raises if its thread still runs

    def plan_restart(
        self,
        decision: BeginRestart,
        error: StepmillError | None = None,
        delay_s: float = 0.0,
        *,
        is_retried: bool = True,
        before: Callable[[], object] | None = None,
    ) -> None:
        """Plan to restart a worker, dead or alive. `start_restart` must follow, once the decision is applied.

        Args:
            decision: which worker, and whether its envs are replayed.
            error: why the worker is restarted; None means the error in its record.
            delay_s: how many seconds to wait before its envs are built.
            is_retried: whether another restart follows one that fails, while `count_restart` allows it.
            before: a function that is called first, in the thread of the restart.
        """
        record = self.records[decision.worker]
        record.error = error or (record.error if record.state in DEAD else None)
        self._move(record, WorkerState.RESTARTING)
        record.remedy, record.is_retried = decision.remedy, is_retried
        record.is_recycling = decision.is_recycling
        record.task = self._make_task(record, delay_s, before)

    def end_gently(self, worker: int) -> Callable[[], object]:
        """Return a function that lets a living worker reply to its requests, close its envs and end, within time limits."""

        def end() -> None:
            lanes = self.records[worker].plan.lanes
            requests = {lane: Request(END_ID - lane, RequestKind.END, (0,), (0,), None) for lane in lanes}
            with contextlib.suppress(StepmillError):  # the worker has died or hangs, or the pool was closed
                for future in self._backend.call(requests):
                    future.result()
            deadline = time.monotonic() + END_S
            while time.monotonic() < deadline:
                if wait_ready({self._backend.pidfds[worker]: select.POLLIN}, deadline):
                    return

        return end

    def start_restart(self, worker: int) -> None:
        """Start the thread of a planned restart."""
        task = self.records[worker].task
        if task is not None:
            task.start()

    def _make_task(
        self, record: WorkerRecord, delay_s: float, before: Callable[[], object] | None = None
    ) -> RestartTask:
        worker, state, backend = record.plan.worker, self.state, self._backend

        def settings() -> Iterator[Request]:
            is_kept = record.remedy is Remedy.KEEP
            servers = [each for each in record.plan.env_ids if not (is_kept and self.log.is_whole(each))]
            yield from record.settings.requests(servers)

        def restart(cancelled: threading.Event) -> WorkerReport:
            if not cancelled.wait(delay_s) and before is not None:
                before()
            with self._turns:
                if cancelled.is_set():
                    raise ClosedPoolError("the pool was closed before its worker was restarted; make a new one")
                backend.end_worker(worker)
                state.clear_dead_worker(worker)
                began_s = time.monotonic()
                report = backend.revive(worker, settings())
                task.start_s = time.monotonic() - began_s
                return report

        task = RestartTask(worker, restart, state.notify)
        return task

    def finish_restarts(self) -> tuple[list[WorkerRecord], list[Decision]]:
        """Process the outcomes of restarts that are done.

        Return the records of workers whose envs are built, and the decisions that they serve or that others stay dead.
        """
        built, decisions = [], list[Decision]()
        for record in self.records:
            task, result = record.task, None if record.task is None else record.task.result
            if record.state is not WorkerState.RESTARTING or task is None or result is None:
                continue
            record.task = None
            if isinstance(result, StepmillError):
                decisions += self._retry(record, result)
            else:
                record.pid, record.start_s, record.served_s = result.pid, task.start_s, time.monotonic()
                decisions.append(self.serve(record))
                built.append(record)
        return built, decisions

    def serve(self, record: WorkerRecord) -> Decision:
        """Let a restarted worker carry out the commands that wait for it."""
        worker = record.plan.worker
        self._move(record, WorkerState.SERVING)
        record.generation += 1
        return ServeWorker(worker, record.generation - 1, self._backend.pidfds[worker], record.pid)

    def _retry(self, record: WorkerRecord, error: StepmillError) -> list[Decision]:
        worker, record.error = record.plan.worker, error
        delay_s = self.count_restart(worker, error) if record.is_retried else None
        if delay_s is not None:
            record.task = self._make_task(record, delay_s)
            record.task.start()
            return []
        self._move(record, WorkerState.DEAD_UNREPORTED)
        return [CancelRestart(worker, record.generation)]

    def reapply_settings(self, worker: int, servers: Sequence[int]) -> None:
        """Re-apply settings to servers of a worker that serves, without waiting."""
        record = self.records[worker]
        for request in record.settings.requests(servers):
            self._backend.call({list(record.plan.lanes)[request.lane]: request})

    @property
    def num_restarts(self) -> int:
        """How many restarts have succeeded since the pool was made."""
        return sum(record.generation for record in self.records)

    # ---- settings ---------------------------------------------------------------------------------------------------

    def settings_of(self, server: int) -> AppliedSettings:
        """Return the settings to re-apply to the worker that owns an env object."""
        return self.records[self.worker_of_server[server]].settings

    # ---- the end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel restarts that have not begun."""
        for record in self.records:
            if record.task is not None:
                record.task.cancelled.set()

    def join(self) -> None:
        """Wait for the threads of restarts, and release the pool state and the reaper."""
        for record in self.records:
            if record.task is not None and record.task.ident is not None:
                record.task.join(JOIN_S)
        self.state, self._reaper = _NO_STATE, None
