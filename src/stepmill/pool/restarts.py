"""Dead workers come back: budgets, the threads that restart them, and what is told of a death."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from stepmill import _native
from stepmill.backends.base import Backend, Mortal, died_error, name_envs
from stepmill.backends.process import ProcessBackend
from stepmill.spec.errors import ClosedPoolError, EngineBug, StepmillError, WorkerDied
from stepmill.spec.options import OnFault, PoolOptions
from stepmill.worker.channel import wait_ready
from stepmill.worker.messages import Request, WorkerPlan, WorkerReport
from stepmill.worker.settle import uninterrupted

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
JOIN_S = 1.0  # how long close() waits for a restart that it has just broken off
_HINTS = {
    OnFault.RAISE: "bring them back with reset() or revive(), or let on_fault='truncate' do it",
    OnFault.TRUNCATE: "their episodes are cut short",
    OnFault.REPLAY: "their episodes are played again",
}


class Budget:
    """How many repairs a worker may still have: so many in a window of time, and so many in all of the pool's life."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._times: dict[int, deque[float]] = {}
        self._total = 0

    def take(self, worker: int) -> float | None:
        """Return how long to wait before the repair, in seconds; None if there is none left."""
        now = time.monotonic()
        times = self._times.setdefault(worker, deque())
        while times and now - times[0] > self._options.restart_window_s:
            times.popleft()
        limit = self._options.max_restarts_total
        if len(times) >= self._options.max_restarts or (limit is not None and self._total >= limit):
            return None
        times.append(now)
        self._total += 1
        return 0.0 if len(times) == 1 else min(FIRST_BACKOFF_S * 2 ** (len(times) - 2), MAX_BACKOFF_S)


class Memory(Protocol):
    """What a pool remembers of envs for the day when they are built anew."""

    def orders(self, env_ids: Sequence[int]) -> Sequence[Request]:
        """Return what gives new envs of one worker back what the user has set on them."""

    def is_replayed(self, env_id: int) -> bool:
        """Whether an env is given that back as its calls are repeated."""

    def began(self, report: WorkerReport) -> None:
        """Take note of the new worker."""


class Restarts:
    """Restarts workers: in the pool's thread, or in threads of their own, for which nobody waits."""

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.num_done = 0
        self.budget = Budget(options)
        self.plans = plans
        self._backend = backend
        self._policy = options.on_fault
        self._ledger: _native.Ledger | None = None
        self._reaper: _native.Reaper | None = None
        self._memory: Memory | None = None
        self._threads: dict[int, threading.Thread] = {}
        self._failures: dict[int, StepmillError] = {}
        self._stop = threading.Event()
        self.told: set[int] = set()  # dead workers whose death was told, under the policy "raise"
        self._generations = [0] * len(plans)

    def attach(self, ledger: _native.Ledger, reaper: _native.Reaper | None) -> None:
        """Take the ledger that hears of restarts, and the reaper that watches restarted workers."""
        self._ledger, self._reaper = ledger, reaper

    def remember(self, memory: Memory) -> None:
        """Take what gives a restarted worker's envs back what the user had set on them."""
        self._memory = memory

    @property
    def can_replace_living(self) -> bool:
        """Whether a worker can be ended against its will: a process, not a thread."""
        return isinstance(self._backend, ProcessBackend)

    @property
    def ledger(self) -> _native.Ledger:
        """The ledger whose workers these are."""
        assert self._ledger is not None
        return self._ledger

    # ---- restarting ---------------------------------------------------------------------------------------------

    def begin(self, worker: int, delay_s: float, *, tries_again: bool = True) -> None:
        """Restart a worker in a thread of its own; its envs can be sent commands meanwhile."""
        self.ledger.set_restarting(worker, True)
        thread = threading.Thread(
            target=self._run,
            args=(worker, delay_s, tries_again),
            name=f"stepmill-restart-{worker}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as exc:  # no thread is left
            self._failures[worker] = EngineBug(f"worker {worker} cannot be restarted: {exc}; close() other pools")
            self.ledger.set_restarting(worker, False)
            return
        self._threads[worker] = thread

    def _run(self, worker: int, delay_s: float | None, tries_again: bool) -> None:
        try:
            while delay_s is not None and not self.pause(delay_s) and self.is_dead(worker):
                try:
                    self.restart(worker)
                    return
                except StepmillError as failure:
                    self._failures[worker] = failure
                except Exception as exc:  # no descriptor left, no memory: tried again like any failure
                    self._failures[worker] = EngineBug(
                        f"worker {worker} could not be restarted: {type(exc).__name__}: {exc}"
                    )
                delay_s = self.budget.take(worker) if tries_again else None
        finally:  # given up: what its envs were commanded meanwhile becomes faults
            self.ledger.set_restarting(worker, False)

    def restart(self, worker: int, *, is_played: bool = False) -> None:
        """End what is left of a worker and start it anew; wait for it.

        Args:
            worker: its number.
            is_played: its envs are to be played again, so that what was set on them is repeated in its place.
        Raises:
            EnvError, EnvTimeout, WorkerDied: it could not be started.
        """
        self.end(worker)
        self.ledger.free_overflow(worker)
        report = self._backend.revive(worker, self._late_orders(worker, is_played=is_played))
        if self._memory is not None:
            self._memory.began(report)
        if isinstance(self._backend, Mortal) and self._reaper is not None:
            self._reaper.watch(worker, self._backend.pidfds[worker])
        self.num_done += 1
        self._generations[worker] += 1
        self.told.discard(worker)
        self.ledger.set_restarting(worker, False)

    def _late_orders(self, worker: int, *, is_played: bool) -> Iterator[Request]:
        yield from self.orders(worker, is_played=is_played)

    def orders(self, worker: int, *, is_played: bool = False) -> Sequence[Request]:
        """Return what gives a new worker's envs back what the user has set on them, but for those that are played again."""
        memory = self._memory
        if memory is None:
            return ()
        servers = self.plans[worker].env_ids
        return memory.orders([server for server in servers if not (is_played and memory.is_replayed(server))])

    def restore(self, worker: int, env_ids: Sequence[int]) -> None:
        """Give envs of a worker that serves already what the user has set on them."""
        for order in () if self._memory is None else self._memory.orders(env_ids):
            self._backend.call({worker: order})[0].result()

    def end(self, worker: int) -> None:
        """End what is left of a worker and bury it: before its successor begins, whose rows these are then."""
        if isinstance(self._backend, Mortal) and self._reaper is not None:
            with uninterrupted():
                self._backend.end_worker(worker)
                self._reaper.declare_dead(worker)
                self.ledger.mend_words(worker)

    def wait(self, worker: int) -> None:
        """Wait until no thread restarts this worker."""
        thread = self._threads.pop(worker, None)
        if thread is not None:
            thread.join()

    def is_restarting(self, worker: int) -> bool:
        """Whether a thread is at it."""
        thread = self._threads.get(worker)
        return thread is not None and thread.is_alive()

    def is_dead(self, worker: int) -> bool:
        """Whether the worker is gone, or was given up."""
        return self.ledger.is_dead(worker)

    def is_gone(self, worker: int) -> bool:
        """The same, asked of its process: the reaper, which may not have heard of its death yet, does now."""
        if not self.is_dead(worker) and isinstance(self._backend, Mortal) and self._reaper is not None:
            pidfd = self._backend.pidfds.get(worker)
            if pidfd is not None and wait_ready({pidfd: select.POLLIN}, 0.0):
                self._reaper.declare_dead(worker)
        return self.is_dead(worker)

    def witness(self) -> Callable[[WorkerDied], None]:
        """Return what a call made now asks to word the death that it tells; a worker of now counts as told then."""
        generations = tuple(self._generations)

        def tell(error: WorkerDied) -> None:
            if self._policy is OnFault.RAISE and self._generations[error.worker] == generations[error.worker]:
                self.told.add(error.worker)
            with contextlib.suppress(ClosedPoolError):
                name_envs(error, self.ledger.envs_of(error.worker))

        return tell

    # ---- the end ------------------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> bool:
        """Wait, unless the pool is closed; return whether it is."""
        return self._stop.wait(seconds)

    def stop(self) -> None:
        """Break off restarts that wait for their time."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the threads of restarts to end, and let go of all that is closed by now."""
        for thread in list(self._threads.values()):
            thread.join(JOIN_S)
        self._threads.clear()
        self._reaper = self._memory = None

    # ---- what is told -------------------------------------------------------------------------------------------

    def note_failure(self, worker: int, failure: StepmillError) -> None:
        """Keep why a worker could not be restarted, to be told with its envs' faults."""
        self._failures[worker] = failure

    def take_failure(self, worker: int) -> StepmillError | None:
        """Return why the worker could not be restarted, once."""
        return self._failures.pop(worker, None)

    def obituary(self, worker: int) -> WorkerDied:
        """Return the error that tells of a worker's death."""
        exit_code = self._backend.exit_code(worker) if isinstance(self._backend, Mortal) else None
        return died_error(worker, self.ledger.envs_of(worker), exit_code, hint=_HINTS[self._policy])
