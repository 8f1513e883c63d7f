"""The protocol of backends, the futures that they return, and the errors that they share."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from stepmill._native import OwnedFd
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import ClosedPoolError, EngineBug, EnvError, EnvTimeout, StepmillError, UsageError
from stepmill.spec.notices import warn
from stepmill.spec.stats import NodeStats
from stepmill.worker.build_progress import IN_WORKER_INIT
from stepmill.worker.env_host import Fault
from stepmill.worker.error_records import env_error
from stepmill.worker.messages import Outcome, Reply, Request, RequestKind, WorkerPlan, WorkerReport
from stepmill.worker.process_stat import process_state
from stepmill.worker.signals import wait_event

CALL_SLICE_S = 0.1  # how often a wait checks for signals and for close()
GRACE_S = 2.0  # after the first fault at the start, how long other workers may take to report theirs


@runtime_checkable
class Backend(Protocol):
    """A way to run workers. One thread at a time uses a backend, but any thread may call `close`."""

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        """Build all envs and return one report per plan, in the order of `plans`. The workers build in parallel.

        If an env or a worker fails, this closes everything that was started.

        Raises:
            EnvError: a constructor raised an exception. `others` has the errors of other envs.
            EnvTimeout: building took longer than `start.timeout_s`.
            WorkerDied: a worker ended before it had built its envs.
            UsageError: an env_fn cannot be sent to its worker.
        """

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        """Let the workers serve a slab. `ring(lane)` adds one to the requests of a lane and rings its doorbell."""

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        """Send slow requests and return at once, with one future per request.

        Args:
            requests: the request for each lane. A worker with one thread has one lane, which has the worker's number.
        Raises:
            UsageError: a payload cannot be sent to its worker. In this case no request is sent.
        """

    def close(self, timeout_s: float) -> None:
        """End all workers within about `timeout_s` seconds. Later calls do nothing.

        If a slab is attached, the pool has set its stop word before.
        """


@runtime_checkable
class MonitoredBackend(Protocol):
    """A backend whose workers may die at any time."""

    @property
    def pidfds(self) -> Mapping[int, int]:
        """For each worker, a descriptor that polls readable once the worker has ended. `revive` changes it."""

    def end_worker(self, worker: int) -> None:
        """Kill a worker if it still runs, and wait until it has ended. Afterwards the worker writes nothing.

        The pool may call `revive` next.

        Raises:
            WorkerDied: the process does not end, even after SIGKILL.
            UsageError: the worker is a thread that still runs.
        """

    def exit_code(self, worker: int) -> int | None:
        """Return the exit status of a worker that has ended, or the negative number of the signal that ended it.

        Return None if the status is not known.
        """

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Start a new worker for the same plan, and let it serve the slab.

        The pool must have aborted the commands of the old worker before.

        Args:
            worker: the number of the worker.
            settings_requests: requests that the worker does before it serves. They are read only after the worker accepts
                `call`s again. A setting that is made meanwhile is therefore either among them or sent as a call.
        Raises:
            EnvError: a constructor or one of these requests raised an exception.
        """


class TracedBackend(Protocol):
    """A backend whose workers write a traceback when they crash or hang."""

    def read_trace(self, worker: int) -> str:
        """Return the output of faulthandler in the last process of a worker, once that has ended.

        Return an empty string if there is no output.
        """


class RemoteBackend(Protocol):
    """A backend whose workers run on other machines, which enforce the time limits of envs."""

    def describe_node(self, worker: int) -> str:
        """Return the name of the node of a worker, for messages."""

    def cause_of_death(self, worker: int) -> str | None:
        """Return why a worker is dead if its node is the reason, else None."""

    def node_stats(self) -> tuple[NodeStats, ...]:
        """Return the traffic of each node."""


@dataclass(frozen=True)
class BackendTraits:
    """What a backend can do besides running envs. A backend has its traits in the attribute `traits`.

    A pool reads the traits, and does not check the class of its backend.

    Attributes:
        monitor: the object that reports and ends workers that may die. None if the workers live as long as the pool.
        nodes: the object that names the machines of the workers. None if all workers run on this machine.
        traces: the object that returns the tracebacks of workers that crashed or hung. None if there are no tracebacks.
        driver: how the pool's thread drives the envs, once the slab is attached. The key is "loop", "advance", "kernel"
            or "outbox_fd", and the value is the argument of `PoolState.attach` with that name. Empty if the
            workers run without the pool's thread.
        can_restart_living: whether a worker that still runs can be ended and restarted.
        has_processes: whether envs run in processes, so that the pool's thread may keep the GIL while it spins.
        has_own_timers: whether the workers have their own timers, and do not use those of the calling thread.
        is_inline: whether envs run in the calling thread. No time limit can then be enforced.
        identity: of a kernel: envs of pools with an equal identity can have each other's memory.
    """

    monitor: MonitoredBackend | None = None
    nodes: RemoteBackend | None = None
    traces: TracedBackend | None = None
    driver: Mapping[str, Any] = field(default_factory=dict)
    can_restart_living: bool = False
    has_processes: bool = False
    has_own_timers: bool = True
    is_inline: bool = False
    identity: str = ""


def traits_of(backend: Backend) -> BackendTraits:
    """Return the traits of a backend, or the defaults if the backend declares none."""
    found = getattr(backend, "traits", None)
    return found if isinstance(found, BackendTraits) else BackendTraits()


class Future:
    """The reply to a request, which may not have arrived yet. Any thread may call `result`, any number of times."""

    def __init__(
        self,
        request: Request,
        worker: int,
        timeout_s: float | None,
        wait: Callable[[Future, float | None], None],
        *,
        unpack: Callable[[Outcome], Outcome] = lambda outcome: outcome,
        lane: int | None = None,
        duplicate: Callable[[Future], OwnedFd] = lambda future: OwnedFd(),
    ) -> None:
        """Only backends make futures.

        Args:
            request: the request that was sent.
            worker: the number of the worker that serves it.
            timeout_s: how many seconds `result` waits by default. None for no limit.
            wait: `wait(future, deadline)` returns when the future is done, or at the deadline.
            unpack: converts a received outcome. It may run code of the user, in the thread that calls `result`.
            lane: the lane that serves the request. None if each worker has one lane, which has the number of the worker.
            duplicate: `duplicate(future)` returns a new descriptor that polls readable when `wait` has something to read.
                It returns an empty `OwnedFd` if another thread finishes the future.
        """
        self.request = request
        self.worker = worker
        self.lane = worker if lane is None else lane
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._wait = wait
        self._unpack = unpack
        self._duplicate = duplicate
        self._callback: Callable[[], object] = lambda: None
        self._done = threading.Event()
        self._answers: deque[Reply | StepmillError] = deque()  # only the first counts; appending needs no lock
        self._outcomes: tuple[Outcome, ...] | None = None

    @property
    def is_done(self) -> bool:
        """Whether a reply or an error has arrived, so that `result` does not wait."""
        return bool(self._answers)

    @property
    def has_failed(self) -> bool:
        """Whether an error has arrived, so that there will be no reply."""
        return self.is_done and isinstance(self._answers[0], StepmillError)

    def peek(self) -> tuple[Outcome, ...] | None:
        """Return one outcome per env of the request if they have arrived, else None. This does not wait."""
        answer = self._answers[0] if self.is_done else None
        if not isinstance(answer, Reply):
            return None
        if self._outcomes is None:
            self._outcomes = tuple(self._unpack(outcome) for outcome in answer.outcomes)
        return self._outcomes

    def result(self, timeout_s: float | None = None) -> tuple[Outcome, ...]:
        """Wait for the reply, and return one outcome per env of the request.

        Args:
            timeout_s: seconds from now. None waits until `workers.call_timeout_s` after the request was sent.
        Raises:
            EnvTimeout: the reply has not arrived in time. Nothing is lost, and `result` may be called again. The error's
                `timeout_s` is `workers.call_timeout_s` once that has passed, whatever `timeout_s` is here.
            WorkerDied: the worker died before it replied.
            ClosedPoolError: the pool was closed before the reply came.
        """
        if not self.is_done:
            self._wait(self, self._deadline if timeout_s is None else time.monotonic() + timeout_s)
        answer = self._answers[0] if self.is_done else None
        if isinstance(answer, StepmillError):
            raise answer.with_traceback(None)
        outcomes = self.peek()
        if outcomes is None:
            is_late = self._deadline is not None and time.monotonic() >= self._deadline
            raise self._timeout_error(self._timeout_s if timeout_s is None or is_late else timeout_s)
        return outcomes

    def wait_done(self, deadline: float | None, is_closed: Callable[[], bool] = lambda: False) -> None:
        """Wait until another thread has finished this future, the deadline has passed, or `is_closed` returns True."""
        while not self.is_done and not is_closed():
            left_s = CALL_SLICE_S if deadline is None else min(CALL_SLICE_S, deadline - time.monotonic())
            if left_s <= 0:
                return
            wait_event(self._done, left_s)

    def watch(self, callback: Callable[[], object]) -> None:
        """Call `callback` from any thread once this future is done, or now if it is done already. A later call replaces it."""
        self._callback = callback
        if self.is_done:
            callback()

    def descriptor(self) -> OwnedFd:
        """Return a new descriptor: when it polls readable, `receive` may find the reply, or that of another request to the worker.

        If the `OwnedFd` is empty, this is not needed, because another thread finishes the future.
        """
        return self._duplicate(self)

    def receive(self) -> None:
        """Receive the replies of the worker that have arrived, without waiting. The futures that they finish call their callbacks."""
        self._wait(self, 0.0)

    def finish(self, reply: Reply) -> None:
        """Set the reply. Only backends call this, from any thread. Only the first call of `finish` or `fail` counts."""
        self._set_answer(reply)

    def fail(self, error: StepmillError) -> None:
        """Set the reason why there is no reply. Only backends call this, like `finish`."""
        self._set_answer(error)

    def _set_answer(self, answer: Reply | StepmillError) -> None:
        self._answers.append(answer)
        self._done.set()
        self._callback()

    def _timeout_error(self, timeout_s: float | None) -> EnvTimeout:
        phase = "render" if self.request.kind is RequestKind.RENDER else "call"
        limit_s = timeout_s or 0.0
        return EnvTimeout(
            f"the {phase} of {len(self.request.servers)} envs on worker {self.worker} was not done within {limit_s:g} s; "
            "ask for the result again, or close() the pool",
            phase=phase,
            timeout_s=limit_s,
        )


# ---- errors that several backends raise ------------------------------------------------------------------------------


def closed_error() -> ClosedPoolError:
    """Return the error for a request whose pool was closed before the reply."""
    return ClosedPoolError("the pool was closed before the reply came; take results before close()")


def worker_fault_error(fault: Fault, worker: int) -> StepmillError:
    """Return the error for a fault that a worker reported while it built, attached or closed."""
    env_id, record = fault
    if env_id is not None:
        return env_error(record, env_id)
    what = f"{record['type']}: {record['message']}"
    if record["phase"] == "launch":
        return too_many_workers_error(1, what)
    importable = "importable in a fresh process, or use context='fork'"
    of_the_user = {
        "worker_init": f"workers.init raised {what} in worker {worker}, which has built no env; repair it, or leave it out",
        "load_init": f"worker {worker} could not load workers.init: {what}; make it and everything that it uses {importable}",
        "unpickle": f"worker {worker} could not load its env_fns: {what}; make everything that they use {importable}",
    }
    if record["phase"] in of_the_user:
        return EnvError(
            of_the_user[record["phase"]],
            phase="construct" if record["phase"] == "unpickle" else "worker_init",
            error_type=record["type"],
            remote_traceback=record["traceback"],
        )
    return EngineBug(f"worker {worker} failed to {record['phase']}: {what}\n{record['traceback']}")


@contextlib.contextmanager
def name_refusals(num_workers: int, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise an error that names the limits if the block raises one of these exceptions, which is not that of an env."""
    try:
        yield
    except kinds as exc:
        if isinstance(exc, StepmillError):
            raise
        raise too_many_workers_error(num_workers, exc) from exc


def too_many_workers_error(num_workers: int, reason: object) -> UsageError:
    """Return the error for workers that the system refuses to start."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UsageError(
        f"{num_workers} worker{'s' if num_workers > 1 else ''} could not be started: {reason}; use fewer with num_workers, "
        f"close open files, or raise the limits of open files (ulimit -n, now {max_files}) and processes (ulimit -u)"
    )


def start_timeout_error(plan: WorkerPlan, building: int | None, timeout_s: float, *, pid: int = 0) -> EnvTimeout:
    """Return the error for a worker that has not built its envs in time.

    Args:
        plan: the plan of the worker.
        building: the env_id that the worker is constructing, or IN_WORKER_INIT, or None if not known.
        timeout_s: the limit, in seconds.
        pid: the pid of the worker's process, or 0 if there is none.
    """
    at = (
        f"constructing env {building}"
        if building is not None
        else f"constructing the first of envs {list(plan.env_ids)}"
    )
    hint = "make the constructor faster, or raise start.timeout_s"
    if building == IN_WORKER_INIT:
        building, at, hint = None, "in workers.init", "make workers.init faster, or raise start.timeout_s"
    if process_state(pid) in ("T", "t"):
        hint = f"process {pid} is stopped, by SIGSTOP or a debugger; continue it with kill -CONT {pid}"
    return EnvTimeout(
        f"worker {plan.worker} was still {at} after {timeout_s:g} s; {hint}",
        env_id=building,
        phase="construct",
        timeout_s=timeout_s,
        env_ids=plan.env_ids,
    )


def num_before(env_ids: Sequence[int], building: int | None) -> int:
    """Return how many of these envs a thread has built before it constructs `building` (see `start_timeout_error`)."""
    return env_ids.index(building) if building in env_ids else 0


def warn_of_close_faults(worker: int, faults: Sequence[Fault]) -> None:
    """Warn of envs that raised an exception in close(). They count as closed, but may still hold resources."""
    for fault in faults:
        warn(f"worker {worker}: {worker_fault_error(fault, worker)}")
