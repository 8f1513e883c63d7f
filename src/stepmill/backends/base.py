"""What every backend offers, and what it answers with."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from stepmill import _native
from stepmill.slab.memory import SharedSlab
from stepmill.spec.errors import EngineBug, EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied
from stepmill.spec.notices import warn
from stepmill.worker.calls import ServingLoop, answer
from stepmill.worker.host import Fault
from stepmill.worker.messages import Outcome, Reply, Request, RequestKind, WorkerPlan, WorkerReport
from stepmill.worker.records import env_error
from stepmill.worker.signals import wait_event

CALL_SLICE_S = 0.1  # how long a wait goes on before it looks for signals and for close()


@runtime_checkable
class Backend(Protocol):
    """A way to run workers. Used by one thread at a time; `close` may come from any."""

    def start(self, plans: Sequence[WorkerPlan]) -> list[WorkerReport]:
        """Builds all envs, the workers in parallel. If that fails nothing is left behind.

        Raises:
            EnvError: a constructor raised; the faults of other envs are in `others`.
            EnvTimeout: building took longer than `start_timeout_s`.
            WorkerDied: a worker ended before it had built its envs.
            UsageError: an env_fn cannot travel to its worker.
        """

    def attach(self, slab: SharedSlab, ring: Callable[[int], None]) -> None:
        """Lets the workers serve a slab. `ring(worker)` counts a request for a worker and rings its doorbell."""

    def call(self, requests: Mapping[int, Request]) -> list[Future]:
        """Sends a slow request to each of some workers; never waits.

        Raises:
            UsageError: a payload cannot travel to its worker. None of them was sent.
        """

    def revive(self, worker: int, orders: Iterable[Request] = ()) -> WorkerReport:
        """Starts a worker anew, for the envs of the same plan, and lets it serve the slab. Its control words are settled.

        Args:
            worker: its number.
            orders: requests that are done before it serves anything. Not looked at before the worker takes `call`s again:
                what is set meanwhile is either among them, or comes as a call.
        Raises:
            EnvError: a constructor raised, or an order.
        """

    def close(self, timeout_s: float) -> None:
        """Ends everything within about this time. The workers of an attached slab have been told to stop. Idempotent."""


@runtime_checkable
class Mortal(Protocol):
    """A backend whose workers can die on their own."""

    @property
    def pidfds(self) -> Mapping[int, int]:
        """By worker, a descriptor that polls readable once the worker is gone. Changes with `revive`."""

    def end_worker(self, worker: int) -> None:
        """Kills what is left of a worker and waits for its end: nothing of it writes any more. `revive` may follow.

        Raises:
            WorkerDied: the process does not even die of SIGKILL.
            UsageError: it is a thread that still runs.
        """

    def exit_code(self, worker: int) -> int | None:
        """Returns the exit status of a worker that is gone, minus the signal's number if one ended it; None if not known."""


@runtime_checkable
class Traced(Protocol):
    """A backend whose workers leave word of where they stood when they crashed or hung."""

    def read_trace(self, worker: int) -> str:
        """Returns faulthandler's words of the worker's last process, once that has ended; empty if there are none."""


class Future:
    """The reply to a request. Resolve futures in any order, as often as you like, from any thread."""

    def __init__(
        self,
        request: Request,
        worker: int,
        timeout_s: float | None,
        wait: Callable[[Future, float | None], None],
        *,
        unpack: Callable[[Outcome], Outcome] = lambda outcome: outcome,
    ) -> None:
        """Made by a backend.

        Args:
            request: what was asked.
            worker: who answers.
            timeout_s: how long `result` waits, if it is not told.
            wait: `wait(future, deadline)` returns when the future is done, or at the deadline.
            unpack: makes an outcome of what has arrived. It may run code of the user, in the thread that asks for the result.
        """
        self.request = request
        self.worker = worker
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._wait = wait
        self._unpack = unpack
        self._done = threading.Event()
        self._answers: deque[Reply | StepmillError] = deque()  # the first counts: a deque is appended to without a lock
        self._outcomes: tuple[Outcome, ...] | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` returns or raises at once, as far as is known now."""
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether it is known that there will be no reply."""
        return self.is_done and isinstance(self._answers[0], StepmillError)

    def peek(self) -> tuple[Outcome, ...] | None:
        """Returns what `result` would, if that is here; never waits."""
        answer = self._answers[0] if self.is_done else None
        if not isinstance(answer, Reply):
            return None
        if self._outcomes is None:
            self._outcomes = tuple(self._unpack(outcome) for outcome in answer.outcomes)
        return self._outcomes

    def result(self, timeout_s: float | None = None) -> tuple[Outcome, ...]:
        """Returns one outcome per env of the request; waits for it.

        Args:
            timeout_s: seconds from now; None is `call_timeout_s` from when the request was sent.
        Raises:
            EnvTimeout: the reply is not here yet. Nothing is lost: ask again.
            WorkerDied: the worker is gone, and with it the reply.
            ClosedPoolError: the pool was closed meanwhile.
        """
        self._wait(self, self._deadline if timeout_s is None else time.monotonic() + timeout_s)
        answer = self._answers[0] if self.is_done else None
        if isinstance(answer, StepmillError):
            raise answer.with_traceback(None)
        outcomes = self.peek()
        if outcomes is None:
            raise self._late(self._timeout_s if timeout_s is None else timeout_s)
        return outcomes

    def wait_done(self, seconds: float) -> bool:
        """Waits at most so long for another thread to finish this future; returns whether it is done."""
        return wait_event(self._done, seconds)

    def finish(self, reply: Reply) -> None:
        """Gives it its reply. For backends; the first of `finish` and `fail` counts, from whatever thread."""
        self._answers.append(reply)
        self._done.set()

    def fail(self, error: StepmillError) -> None:
        """Gives it the reason why there is no reply. For backends."""
        self._answers.append(error)
        self._done.set()

    def _late(self, timeout_s: float | None) -> EnvTimeout:
        phase = "render" if self.request.kind is RequestKind.RENDER else "call"
        limit_s = timeout_s or 0.0
        return EnvTimeout(
            f"the {phase} of {len(self.request.servers)} envs on worker {self.worker} was not done within {limit_s:g} s; "
            "it may still come: ask for the result again, or close() the pool",
            phase=phase,
            timeout_s=limit_s,
        )


# ---- what several backends need --------------------------------------------------------------------------------------


def answer_here(loop: ServingLoop, envs: Sequence[object], requests: Mapping[int, Request]) -> list[Future]:
    """Does requests in the caller's thread; returns their futures, which are done. What signal handlers raise passes through."""
    futures = []
    for worker, request in requests.items():
        future = Future(request, worker, None, lambda future, deadline: None)
        future.finish(answer(loop, envs, request, passes=_native.is_from_signal))
        futures.append(future)
    return futures


def deadline_after(timeout_s: float | None) -> float:
    """Returns when a timeout that begins now is over, on the clock of time.monotonic; infinity for None."""
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


# ---- errors that several backends raise ------------------------------------------------------------------------------


def fault_error(fault: Fault, worker: int) -> StepmillError:
    """Returns the error for what a worker reported while it was built or attached."""
    env_id, record = fault
    if env_id is not None:
        return env_error(record, env_id)
    what = f"{record['type']}: {record['message']}"
    if record["phase"] == "launch":
        return too_many_workers(1, what)
    if record["phase"] == "unpickle":
        return EnvError(
            f"the env_fns of worker {worker} could not be loaded there: {what}; "
            "everything they use must be importable in a fresh process, or use context='fork'",
            phase="construct",
            error_type=record["type"],
            remote_traceback=record["traceback"],
        )
    return EngineBug(f"worker {worker} failed to {record['phase']}: {what}\n{record['traceback']}")


def too_many_workers(num_workers: int, reason: object) -> UsageError:
    """Returns the error for workers that the system refuses to start."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UsageError(
        f"{num_workers} worker{'s' if num_workers > 1 else ''} could not be started: {reason}; use fewer with num_workers, "
        f"close what is open, or raise the limits of open files (ulimit -n, now {max_files}) and processes (ulimit -u)"
    )


def late_start(plan: WorkerPlan, building: int | None, timeout_s: float, *, pid: int = 0) -> EnvTimeout:
    """Returns the error for a worker that has not built its envs in time.

    Args:
        plan: of the worker.
        building: the env that it is at, as far as is known.
        timeout_s: how long it had.
        pid: of its process; 0 if it has none.
    """
    at = f"env {building}" if building is not None else f"the first of envs {list(plan.env_ids)}"
    hint = "make the constructor faster, or raise start_timeout_s"
    if is_stopped(pid):
        hint = f"process {pid} is stopped, by SIGSTOP or a debugger: let it go on with kill -CONT {pid}, or find what stops it"
    return EnvTimeout(
        f"worker {plan.worker} was still constructing {at} after {timeout_s:g} s; {hint}",
        env_id=building,
        phase="construct",
        timeout_s=timeout_s,
    )


def is_stopped(pid: int) -> bool:
    """Returns whether a process is stopped: it exists, and runs no further until it gets SIGCONT."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def died_error(worker: int, env_ids: Sequence[int], exit_code: int | None, *, hint: str) -> WorkerDied:
    """Returns the error for a worker that is gone.

    Args:
        worker: its number.
        env_ids: the envs it owned.
        exit_code: as of `Mortal.exit_code`.
        hint: what the user can do now, or what the worker was doing.
    """
    name = signal_name(exit_code)
    return WorkerDied(
        f"worker {worker} {describe_exit(exit_code)}; {_lost(env_ids)}; {hint}",
        worker=worker,
        env_ids=env_ids,
        exit_code=exit_code if name is None else None,
        signal_name=name,
    )


def name_envs(error: WorkerDied, env_ids: Sequence[int]) -> None:
    """Lets the error name the envs that the worker served, in place of the env objects that it owned: spares serve, too."""
    error.message = error.message.replace(_lost(error.env_ids), _lost(env_ids), 1)
    error.env_ids, error.args = tuple(env_ids), (error.message,)


def _lost(env_ids: Sequence[int]) -> str:
    return f"its envs {list(env_ids)} are lost" if env_ids else "it served no env"


def describe_exit(exit_code: int | None) -> str:
    """Returns how a process ended, for the text of an error."""
    name = signal_name(exit_code)
    return f"was ended by {name}" if name else "ended" if exit_code is None else f"ended with exit code {exit_code}"


def signal_name(exit_code: int | None) -> str | None:
    """Returns the name of the signal that an exit code tells of, or None if it tells of none."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"  # a real-time signal has no name


def warn_of_close(worker: int, faults: Sequence[Fault]) -> None:
    """Warns of envs that raised in close(). The pool counts them as closed; they may have left something behind."""
    for fault in faults:
        warn(f"worker {worker}: {fault_error(fault, worker)}")
