"""What follows the failure of an env (`Recovery`) and the death of a worker, by remedy. A fault policy is a remedy with a name.

    remedy   an env failed                                                    its worker died
    RAISE    ResolveFault(RAISE)                                              FailWorker
    CUT      ResolveFault(CUT)                                                BeginRestart(CUT), ResolveFault(CUT)
    KEEP     ResolveFault(KEEP); BeginRestart if calls have changed the env   BeginRestart(KEEP)

RAISE is also the remedy for interrupts, and for failures over a limit. Decisions about commands that were lost in a death
that was handled before include no further restart. After KEEP, the replay begins as soon as the worker serves.

`decide_death` depends only on its arguments: it makes no calls, reads no clock and counts nothing. `EnvErrorLimits` and
`ResetAttempts` count, and say when a remedy is not used any more.
"""

from __future__ import annotations

from stepmill.pool.events import (
    BeginRestart,
    Death,
    Decision,
    EnvFailed,
    FailWorker,
    FaultKind,
    Remedy,
    ResolveFault,
    ServerView,
)
from stepmill.pool.faults import fault_info
from stepmill.pool.workers import DEAD, FailureLimit, WorkerState
from stepmill.spec.errors import EnvError, StepmillError, add_clause
from stepmill.spec.options import OnFault, PoolOptions, RetryIn

REMEDIES = {OnFault.RAISE: Remedy.RAISE, OnFault.TRUNCATE: Remedy.CUT, OnFault.REPLAY: Remedy.KEEP}
# Faults of a reset that may not recur in a new process.
RETRYABLE = (FaultKind.RAISED, FaultKind.DIED, FaultKind.TIMED_OUT)


def decide_death(death: Death, state: WorkerState, remedy: Remedy, error: StepmillError) -> list[Decision]:
    """Decide about the envs of a worker that has died, and about commands that were lost.

    Args:
        death: the death, with the lost commands to decide about.
        state: the state of the worker. DEAD_UNREPORTED: its death was not handled before.
        remedy: what happens to the episodes that its envs lose.
        error: the description of the death.
    """
    if remedy is Remedy.RAISE and state in DEAD:
        return [FailWorker(death.worker, death.generation)]
    decisions: list[Decision] = []
    if state is WorkerState.DEAD_UNREPORTED:
        decisions.append(BeginRestart(death.worker, death.generation, remedy, fault_info("neighbour", error)))
        if remedy is Remedy.KEEP:
            return decisions
    for fault in death.faults:
        info = fault_info((fault.kind or FaultKind.DIED).name.lower(), error)
        decisions.append(ResolveFault(fault.env_id, fault.ticket, remedy, info))
    return decisions


class EnvErrorLimits:
    """Counts the errors of each env. A policy handles up to `max_env_errors` in `restart_window_s`."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._limits: dict[int, FailureLimit] = {}

    def allow(self, env_id: int, error: StepmillError) -> bool:
        """Count an error. If there are too many, add this to its text and return False."""
        max_errors, window_s = self._options.restarts.max_env_errors, self._options.restarts.restart_window_s
        number = self._limits.setdefault(env_id, FailureLimit(max_errors, window_s)).count()
        if number is None:
            add_clause(
                error,
                f"env {env_id} has failed more than {max_errors} times in {window_s:g} s "
                "(restarts.max_env_errors), so it is no longer reset automatically; call reset()",
            )
        return number is not None


class ResetAttempts:
    """Counts the attempts of failed resets.

    Depending on `resets.retry_in`, the worker repeats a reset in the same process, or the pool repeats it in a new
    process (`is_in_new_process`).
    """

    def __init__(self, options: PoolOptions) -> None:
        self.max_attempts = options.resets.retries + 1
        self.wait_s = options.resets.retry_wait_s
        self.is_in_new_process = self.max_attempts > 1 and options.resets.retry_in is RetryIn.NEW
        self._attempts: dict[int, tuple[int, int]] = {}  # by env: the ticket and the number of the last attempt

    def is_last(self, fault: EnvFailed, error: StepmillError) -> bool:
        """Return whether this is the fault of the last attempt of a worker that itself repeats resets."""
        is_retried = self.max_attempts > 1 and not self.is_in_new_process
        return is_retried and fault.kind is FaultKind.RAISED and isinstance(error, EnvError) and error.phase == "reset"

    def count(self, fault: EnvFailed) -> bool:
        """Count a failed reset, and return whether it may be repeated in a new process."""
        last, attempts = self._attempts.get(fault.env_id, (fault.ticket, 0))
        attempts = attempts + 1 if last == fault.ticket else 1
        self._attempts[fault.env_id] = (fault.ticket, attempts)
        return attempts < self.max_attempts

    def record_retry(self, view: ServerView) -> None:
        """Record that the newest command of an env repeats a reset."""
        if view.env_id in self._attempts:
            self._attempts[view.env_id] = (view.ticket, self._attempts[view.env_id][1])

    def add_count(self, error: StepmillError) -> StepmillError:
        """Add the number of attempts to the error of the last attempt, and return the error."""
        return add_clause(error, f"this was the last of {self.max_attempts} attempts to reset it")
