"""The protocol of backends, the futures that they return, and the errors that they share."""

from __future__ import annotations

import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import (
    ClosedPoolError,
    EngineBug,
    EnvError,
    EnvTimeout,
    StepmillError,
    UsageError,
    WorkerDied,
    describe_exit,
    signal_name,
)
from stepmill.spec.notices import warn
from stepmill.spec.stats import NodeStats
from stepmill.worker.build_progress import IN_WORKER_INIT
from stepmill.worker.calls import ServingLoop, serve_request
from stepmill.worker.env_host import Fault
from stepmill.worker.error_records import env_error
from stepmill.worker.messages import Outcome, Reply, Request, RequestKind, WorkerPlan, WorkerReport
from stepmill.worker.signals import wait_event

CALL_SLICE_S = 0.1  # a wait looks for signals and for close() this often
GRACE_S = 2.0  # after the first fault at the start, how long other workers may take to report theirs


@runtime_checkable
class Backend(Protocol):
    """A way to run workers. Used by one thread at a time; `close` may be called from any thread."""

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        """Build all envs, the workers in parallel. If that fails, close whatever was started.

        Raises:
            EnvError: a constructor raised. `others` has the errors of other envs.
            EnvTimeout: building took longer than `start.timeout_s`.
            WorkerDied: a worker ended before it had built its envs.
            UsageError: an env_fn cannot be sent to its worker.
        """

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        """Let the workers serve a slab. `ring(lane)` counts a request for a lane and rings its doorbell."""

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        """Send a slow request to each of some lanes, without waiting. A worker with one thread is the lane of its number.

        Raises:
            UsageError: a payload cannot be sent to its worker. No request was sent.
        """

    def revive(self, worker: int, settings_requests: Iterable[Request] = ()) -> WorkerReport:
        """Start a new worker for the same plan, and let it serve the slab. Its commands must have been aborted before.

        Args:
            worker: its number.
            settings_requests: requests to do before it serves. They are read only after the worker accepts `call`s again,
                so that a setting that is made meanwhile is either among them or sent as a call.
        Raises:
            EnvError: a constructor or one of these requests raised.
        """

    def close(self, timeout_s: float) -> None:
        """End all workers within about this time. If a slab is attached, the pool has set its stop word. Idempotent."""


@runtime_checkable
class MonitoredBackend(Protocol):
    """A backend whose workers can die on their own."""

    @property
    def pidfds(self) -> Mapping[int, int]:
        """By worker, a descriptor that polls readable once the worker has ended. `revive` changes it."""

    def end_worker(self, worker: int) -> None:
        """Kill a worker, if it still runs, and wait for its end. Afterwards it writes nothing, and `revive` may follow.

        Raises:
            WorkerDied: the process does not end, even by SIGKILL.
            UsageError: the worker is a thread that still runs.
        """

    def exit_code(self, worker: int) -> int | None:
        """Return the exit status of a worker that has ended, or the negative number of the signal; None if not known."""


class TracedBackend(Protocol):
    """A backend whose workers write a traceback when they crash or hang."""

    def read_trace(self, worker: int) -> str:
        """Return the output of faulthandler in the worker's last process, once that has ended; empty if there is none."""


class RemoteBackend(Protocol):
    """A backend whose workers run on other machines. Time limits of envs are watched there."""

    def describe_node(self, worker: int) -> str:
        """Return the node of a worker, for messages."""

    def cause_of_death(self, worker: int) -> str | None:
        """Return why a worker is dead, if its node is the reason."""

    def node_stats(self) -> tuple[NodeStats, ...]:
        """Return the traffic of each node."""


@dataclass(frozen=True)
class BackendTraits:
    """What a backend can do beside running envs, in its attribute `traits`. A pool asks for these, not for the backend's class.

    Attributes:
        monitor: reports and ends workers that can die on their own; None: they live as long as the pool.
        nodes: names the machines of the workers; None: all run on this one.
        traces: returns the tracebacks of workers that crashed or hung; None: there are none.
        driver: how the pool's thread drives the envs, once the slab is attached: "loop", "advance", "kernel" or "outbox_fd" with
            what `PoolState.attach` takes for it. Empty: the workers run on their own.
        can_restart_living: whether a worker that runs can be ended and restarted.
        has_processes: whether envs run in processes, so that the pool's thread may keep the GIL while it spins.
        has_own_timers: whether workers have timers of their own, and do not count with those of the calling thread.
        is_inline: whether envs run in the calling thread, so that no time limit can be enforced.
    """

    monitor: MonitoredBackend | None = None
    nodes: RemoteBackend | None = None
    traces: TracedBackend | None = None
    driver: Mapping[str, Any] = field(default_factory=dict)
    can_restart_living: bool = False
    has_processes: bool = False
    has_own_timers: bool = True
    is_inline: bool = False


def traits_of(backend: Backend) -> BackendTraits:
    """Return the traits of a backend; of one that declares none, the defaults."""
    found = getattr(backend, "traits", None)
    return found if isinstance(found, BackendTraits) else BackendTraits()


class Future:
    """The reply to a request. `result` may be called in any order of futures, repeatedly, and from any thread."""

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
        """Made by a backend.

        Args:
            request: the request.
            worker: the worker that serves it.
            timeout_s: how long `result` waits by default.
            wait: `wait(future, deadline)` returns when the future is done, or at the deadline.
            unpack: converts a received outcome. It may run code of the user, in the thread that asks for the result.
            lane: the thread that serves it; None if workers have one thread, which has the worker's number.
            duplicate: `duplicate(future)` returns a new descriptor that polls readable when `wait` has something to read; none
                if another thread finishes the future.
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
        self._answers: deque[Reply | StepmillError] = deque()  # the first counts: a deque is appended to without a lock
        self._outcomes: tuple[Outcome, ...] | None = None

    @property
    def is_done(self) -> bool:
        """Whether a reply or an error has arrived, so that `result` does not wait."""
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether there will be no reply."""
        return self.is_done and isinstance(self._answers[0], StepmillError)

    def peek(self) -> tuple[Outcome, ...] | None:
        """Return the outcomes if they have arrived, else None. Never waits."""
        answer = self._answers[0] if self.is_done else None
        if not isinstance(answer, Reply):
            return None
        if self._outcomes is None:
            self._outcomes = tuple(self._unpack(outcome) for outcome in answer.outcomes)
        return self._outcomes

    def result(self, timeout_s: float | None = None) -> tuple[Outcome, ...]:
        """Wait for the reply; return one outcome per env of the request.

        Args:
            timeout_s: seconds from now; None is `workers.call_timeout_s` after the request was sent.
        Raises:
            EnvTimeout: the reply has not arrived in time. Nothing is lost: call `result` again.
            WorkerDied: the worker died before it replied.
            ClosedPoolError: the pool was closed before the reply came.
        """
        self._wait(self, self._deadline if timeout_s is None else time.monotonic() + timeout_s)
        answer = self._answers[0] if self.is_done else None
        if isinstance(answer, StepmillError):
            raise answer.with_traceback(None)
        outcomes = self.peek()
        if outcomes is None:
            raise self._timeout_error(self._timeout_s if timeout_s is None else timeout_s)
        return outcomes

    def wait_done(self, seconds: float) -> bool:
        """Wait at most `seconds` for another thread to finish this future; return whether it is done."""
        return wait_event(self._done, seconds)

    def watch(self, callback: Callable[[], object]) -> OwnedFd:
        """Call `callback`, from any thread, once this is done, or now if it is. A later call replaces the callback.

        Return a new descriptor: when it polls readable, `result(0)` may find the reply. If there is none, it need not be asked.
        """
        self._callback = callback
        if self.is_done:
            callback()
        return self._duplicate(self)

    def finish(self, reply: Reply) -> None:
        """Set the reply. For backends; may be called from any thread. The first call of `finish` or `fail` counts."""
        self._set_answer(reply)

    def fail(self, error: StepmillError) -> None:
        """Set the reason why there is no reply. For backends, like `finish`."""
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


# ---- shared by backends ----------------------------------------------------------------------------------------------


def serve_requests_here(loop: ServingLoop, envs: Sequence[object], requests: Mapping[int, Request]) -> list[Future]:
    """Serve requests in the calling thread; return their futures, which are done. Exceptions of signal handlers are raised."""
    futures = []
    for worker, request in requests.items():
        future = Future(request, worker, None, lambda future, deadline: None)
        future.finish(serve_request(loop, envs, request, should_raise=_native.is_from_signal))
        futures.append(future)
    return futures


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


def is_refusal(exc: BaseException, kinds: type[Exception] | tuple[type[Exception], ...] = OSError) -> bool:
    """Whether the system refused something, in contrast to an env that raised an exception of these kinds."""
    return isinstance(exc, kinds) and not isinstance(exc, StepmillError)


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
        plan: of the worker.
        building: the env_id that it is constructing, or IN_WORKER_INIT, or None if not known.
        timeout_s: the limit.
        pid: of its process; 0 if it has none.
    """
    at = (
        f"constructing env {building}"
        if building is not None
        else f"constructing the first of envs {list(plan.env_ids)}"
    )
    hint = "make the constructor faster, or raise start.timeout_s"
    if building == IN_WORKER_INIT:
        building, at, hint = None, "in workers.init", "make workers.init faster, or raise start.timeout_s"
    if is_stopped(pid):
        hint = f"process {pid} is stopped, by SIGSTOP or a debugger; continue it with kill -CONT {pid}"
    return EnvTimeout(
        f"worker {plan.worker} was still {at} after {timeout_s:g} s; {hint}",
        env_id=building,
        phase="construct",
        timeout_s=timeout_s,
        env_ids=plan.env_ids,
    )


def num_before(env_ids: Sequence[int], building: int | None) -> int:
    """Return how many of these envs a thread has built before the one that it constructs; see `start_timeout_error`."""
    return env_ids.index(building) if building in env_ids else 0


def is_stopped(pid: int) -> bool:
    """Return whether a process exists and is stopped until it gets SIGCONT."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def worker_died_error(
    worker: int,
    env_ids: Sequence[int],
    exit_code: int | None,
    *,
    hint: str,
    node: str | None = None,
    cause: str | None = None,
) -> WorkerDied:
    """Return the error for a worker that has ended.

    Args:
        worker: its number.
        env_ids: of its envs.
        exit_code: see `MonitoredBackend.exit_code`.
        hint: what the user can do, or what the worker was doing.
        node: where it ran, if not on this machine.
        cause: why it ended, if its exit status does not say it.
    """
    name = signal_name(exit_code)
    place = f" on {node}" if node else ""
    return WorkerDied(
        f"worker {worker}{place} {cause or describe_exit(exit_code)}; {_lost(env_ids)}; {hint}",
        worker=worker,
        env_ids=env_ids,
        exit_code=exit_code if name is None else None,
        signal_name=name,
        node=node,
    )


def name_envs(error: WorkerDied, env_ids: Sequence[int]) -> None:
    """Name other envs in the error. With spares a worker serves other envs than those of its plan."""
    error.message = error.message.replace(_lost(error.env_ids), _lost(env_ids), 1)
    error.env_ids, error.args = tuple(env_ids), (error.message,)


def _lost(env_ids: Sequence[int]) -> str:
    return f"its envs {list(env_ids)} are lost" if env_ids else "it served no env"


def warn_of_close_faults(worker: int, faults: Sequence[Fault]) -> None:
    """Warn of envs that raised in close(). They count as closed, but may not have released all resources."""
    for fault in faults:
        warn(f"worker {worker}: {worker_fault_error(fault, worker)}")
