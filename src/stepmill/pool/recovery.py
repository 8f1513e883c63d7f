"""What a fault leads to: an error, an episode that is cut short and marked, or one that is played again.

fault ─► budget left? ─ no ─► error, the env is FAULTED
            │ yes
            ├ truncate: the ledger marks the episode; a dead worker restarts in a thread, nobody waits for it
            └ replay:   a dead worker restarts, its envs' episodes are played again; what cannot be is truncated
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence

from stepmill import _native
from stepmill.backends.base import Backend, Mortal, died_error
from stepmill.pool.faults import FaultKind, FaultRow, fault_error, fault_info
from stepmill.spec.errors import EngineBug, StepmillError, WorkerDied
from stepmill.spec.options import OnFault, PoolOptions
from stepmill.worker.messages import WorkerPlan, WorkerReport

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
JOIN_S = 1.0  # how long close() waits for a restart that it has just broken off
_REPLAYED, _REPLAY_FAULT = -1, -2  # what Ledger.replay returns beside a step
_HINTS = {
    OnFault.RAISE: "bring them back with reset() or revive(), or let on_fault='truncate' do it",
    OnFault.TRUNCATE: "their episodes are cut short",
    OnFault.REPLAY: "their episodes are played again",
}
_DEATHS = (FaultKind.DIED, FaultKind.TIMED_OUT, FaultKind.NEIGHBOUR)


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


class Recovery:
    """Carries out the policy of a pool. Its methods are called by the pool's thread; restarts run in threads of their own."""

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        self.restarts = 0
        self._plans = plans
        self._backend = backend
        self._policy = options.on_fault
        self._own_policy = options.on_fault if options.on_raise is None else options.on_raise
        self._budget = Budget(options)
        self._worker_of = [plan.worker for plan in plans for _ in plan.env_ids]
        self._ledger: _native.Ledger | None = None
        self._reaper: _native.Reaper | None = None
        self._restore: Callable[[WorkerReport], None] = _restore_nothing
        self._threads: dict[int, threading.Thread] = {}
        self._failures: dict[int, StepmillError] = {}
        self._stop = threading.Event()

    def attach(self, ledger: _native.Ledger, reaper: _native.Reaper | None) -> None:
        """Take the ledger whose faults these are, and the reaper that watches restarted workers."""
        self._ledger, self._reaper = ledger, reaper

    def on_restart(self, restore: Callable[[WorkerReport], None]) -> None:
        """`restore(report)` gives a restarted worker's envs back what the user had set on them."""
        self._restore = restore

    @property
    def ledger(self) -> _native.Ledger:
        """The ledger whose faults these are."""
        assert self._ledger is not None
        return self._ledger

    # ---- from native code ---------------------------------------------------------------------------------------

    def on_dead(self, worker: int) -> StepmillError | dict[str, str] | None:
        """Say what becomes of a worker that `send` finds dead: an error, what infos say of its restart, or None to go on."""
        if self._policy is OnFault.REPLAY:
            return None
        delay_s = None if self._policy is OnFault.RAISE else self._budget.take(worker)
        error = self.obituary(worker)
        if delay_s is None:
            return error
        self._begin_restart(worker, delay_s)
        return fault_info("neighbour", error)

    # ---- from the pool's thread ---------------------------------------------------------------------------------

    def absorb(self) -> list[StepmillError]:
        """Deal with every fault there is; return the errors of those that the policy cannot or must not repair."""
        faults = self.ledger.faults()
        deaths: dict[int, list[FaultRow]] = {}
        errors: list[StepmillError] = []
        for row in faults:
            if row[1] in _DEATHS:
                deaths.setdefault(self._worker_of[row[0]], []).append(row)
            else:
                errors.extend(self._absorb_own(row))
        for worker, rows in deaths.items():
            errors.extend(self._absorb_death(worker, rows))
        return errors

    def revive(self, env_ids: Sequence[int], *, wait: bool = True, anew: bool = False) -> None:
        """Restart the dead workers of these envs; all envs of such a worker must be reset then. `anew`: the living, too.

        With `wait=False` nobody waits: commands wait for the worker, and if it cannot be started they become its fault.

        Raises:
            EnvError, EnvTimeout, WorkerDied: the worker could not be started. Not with `wait=False`.
        """
        for worker in sorted({self._worker_of[env_id] for env_id in env_ids}):
            thread = self._threads.get(worker)
            if thread is not None and thread.is_alive() and not wait:
                continue
            if thread is not None:
                self._threads.pop(worker).join()
            if anew:
                self._end(worker)
            if self._is_dead(worker):
                self._write_off(worker)
                if wait:
                    self._restart(worker)
                else:
                    self._begin_restart(worker, 0.0, tries_again=False)
        self.ledger.renew(list(env_ids))

    def _write_off(self, worker: int) -> None:
        """What the worker's envs were at is lost: who waits is FAULTED, who has a result yet to be received hears of it next."""
        self.ledger.fail([row[0] for row in self.ledger.faults() if self._worker_of[row[0]] == worker])
        self.ledger.fail_worker(worker)
        self.ledger.lose_envs(self._plans[worker].env_ids, fault_info("neighbour", self.obituary(worker)))

    def stop(self) -> None:
        """Break off restarts that wait for their time."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the threads of restarts to end, and let go of all that is closed by now."""
        for thread in self._threads.values():
            thread.join(JOIN_S)
        self._threads.clear()
        self._reaper = None
        self._restore = _restore_nothing

    # ---- one env, one worker ------------------------------------------------------------------------------------

    def _absorb_own(self, row: FaultRow) -> list[StepmillError]:
        env_id = row[0]
        error = fault_error(row)
        delay_s = (
            None
            if self._own_policy is OnFault.RAISE or row[1] == FaultKind.INTERRUPTED
            else self._budget.take(self._worker_of[env_id])
        )
        if delay_s is None:
            self.ledger.fail([env_id])
            return [error]
        self._stop.wait(delay_s)
        if self._own_policy is OnFault.REPLAY:
            self._replay(env_id, fault_info("raised", error))
        else:
            self.ledger.truncate(env_id, fault_info("raised", error))
        return []

    def _absorb_death(self, worker: int, rows: Sequence[FaultRow]) -> list[StepmillError]:
        error = self._failures.pop(worker, None) or self._death_error(worker, rows)
        is_over = not self._is_dead(worker) or self._is_restarting(
            worker
        )  # these rows are of a death that is dealt with
        if is_over and self._policy is OnFault.TRUNCATE:
            self._truncate(rows, error)
            return []
        delay_s = None if self._policy is OnFault.RAISE else self._budget.take(worker)
        if delay_s is None:
            self.ledger.fail([row[0] for row in rows])
            if not is_over:
                self.ledger.fail_worker(worker)
            return [error]
        if self._policy is OnFault.REPLAY:
            return self._replay_worker(worker, error, delay_s)
        self.ledger.lose_envs(self._plans[worker].env_ids, fault_info("neighbour", error))
        self._begin_restart(worker, delay_s)
        self._truncate(rows, error)
        return []

    def _truncate(self, rows: Sequence[FaultRow], error: StepmillError) -> None:
        for env_id, kind, _ in rows:
            self.ledger.truncate(env_id, fault_info(FaultKind(kind).name.lower(), error))

    def _replay_worker(self, worker: int, error: StepmillError, delay_s: float) -> list[StepmillError]:
        self._stop.wait(delay_s)
        try:
            self._restart(worker)
        except StepmillError as failure:
            self._failures[worker] = failure
            return []  # it is still dead: the next round takes from the budget again
        for env_id in self._plans[worker].env_ids:
            if self._is_dead(worker):
                break  # again: what is pending has become a fault by now
            self._replay(env_id, fault_info("died", error))
        return []

    def _replay(self, env_id: int, info: dict[str, str]) -> None:
        """Bring an env back to where the user believes it is; if that cannot be, cut its episode short, with the reason."""
        state = self.ledger.states()[env_id]
        reason = "its log is not whole: too long, cut short before, or with actions of no fixed size"
        if self.ledger.can_replay(env_id):
            outcome = self.ledger.replay(env_id)
            if outcome == _REPLAYED or self._is_dead(self._worker_of[env_id]):
                return
            reason = (
                "it raised in between"
                if outcome == _REPLAY_FAULT
                else f"step {outcome} gave another result than before"
            )
            warnings.warn(
                f"env {env_id} is not replayable: {reason}; its episode is cut short", RuntimeWarning, stacklevel=2
            )
        info = {**info, "not_replayable": reason}
        if state in (2, 3) and self.ledger.is_pending(env_id):
            self.ledger.truncate(env_id, info)
        else:
            self.ledger.lose_envs([env_id], info)

    # ---- restarts -----------------------------------------------------------------------------------------------

    def _begin_restart(self, worker: int, delay_s: float, *, tries_again: bool = True) -> None:
        self.ledger.set_restarting(worker, True)
        thread = threading.Thread(
            target=self._run_restart,
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

    def _run_restart(self, worker: int, delay_s: float | None, tries_again: bool) -> None:
        try:
            while delay_s is not None and not self._stop.wait(delay_s) and self._is_dead(worker):
                try:
                    self._restart(worker)
                    return
                except StepmillError as failure:
                    self._failures[worker] = failure
                except Exception as exc:  # no descriptor left, no memory: tried again like any failure
                    self._failures[worker] = EngineBug(
                        f"worker {worker} could not be restarted: {type(exc).__name__}: {exc}"
                    )
                delay_s = self._budget.take(worker) if tries_again else None
        finally:  # given up: what its envs were commanded meanwhile becomes faults
            self.ledger.set_restarting(worker, False)

    def _end(self, worker: int) -> None:
        if isinstance(self._backend, Mortal) and self._reaper is not None:
            self._backend.end_worker(worker)
            self._reaper.declare_dead(worker)  # buried before its successor begins, whose rows these are then

    def _restart(self, worker: int) -> None:
        reaper, backend = self._reaper, self._backend
        self._end(worker)
        report = backend.revive(worker)
        self._restore(report)
        if isinstance(backend, Mortal) and reaper is not None:
            reaper.watch(worker, backend.pidfds[worker])
        self.restarts += 1
        self.ledger.set_restarting(worker, False)

    def _is_restarting(self, worker: int) -> bool:
        thread = self._threads.get(worker)
        return thread is not None and thread.is_alive()

    def _is_dead(self, worker: int) -> bool:
        return self.ledger.is_dead(worker)

    # ---- what is told -------------------------------------------------------------------------------------------

    def obituary(self, worker: int) -> WorkerDied:
        """Return the error that tells of a worker's death."""
        exit_code = self._backend.exit_code(worker) if isinstance(self._backend, Mortal) else None
        hint = _HINTS[self._policy]
        return died_error(worker, self._plans[worker].env_ids, exit_code, hint=hint)

    def _death_error(self, worker: int, rows: Sequence[FaultRow]) -> StepmillError:
        late = [row for row in rows if row[1] == FaultKind.TIMED_OUT]
        return fault_error(late[0]) if late else self.obituary(worker)


def _restore_nothing(report: WorkerReport) -> None:
    """Stands for a pool that has set nothing on its envs."""
