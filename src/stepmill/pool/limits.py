"""Counts of failures, and the limits above which a pool stops handling them by itself."""

from __future__ import annotations

import time
from collections import deque

from stepmill.pool.events import EnvFailed, FaultKind, ServerView
from stepmill.spec.errors import EnvError, StepmillError, WorkerDied, add_clause
from stepmill.spec.options import PoolOptions, RetryIn

MAX_SAME_FAILURES = 2  # failures of one kind in one step; another replay would fail, too
MAX_SAME_SIGNALS = 3  # the same for signals from other processes, which may be a coincidence
_SIGNALS_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
# Faults of a reset that may not recur in a new process.
RETRYABLE = (FaultKind.RAISED, FaultKind.DIED, FaultKind.TIMED_OUT)


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
    process.
    """

    def __init__(self, options: PoolOptions) -> None:
        self.max_attempts = options.resets.retries + 1
        self.wait_s = options.resets.retry_wait_s
        self._retry_in = options.resets.retry_in
        self._attempts: dict[int, tuple[int, int]] = {}  # by env: the ticket and the number of the last attempt

    @property
    def is_in_new_process(self) -> bool:
        """Whether resets are repeated in new processes."""
        return self.max_attempts > 1 and self._retry_in is RetryIn.NEW

    def is_last(self, fault: EnvFailed, error: StepmillError) -> bool:
        """Return whether this is the fault of the last attempt of a worker that itself repeats resets."""
        is_retried = self.max_attempts > 1 and self._retry_in is RetryIn.SAME
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


class RepeatedFailures:
    """Counts, per env, consecutive failures of one kind in one step."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[tuple[int, ...], str, int, int]] = {}  # place, kind, number and ticket
        self._reasons: dict[int, str] = {}

    def record(self, env_id: int, place: tuple[int, ...], ticket: int, error: StepmillError) -> None:
        """Count a failure at a place, a tuple (env object, episode, step).

        If a worker dies before its env is replayed, the failure is found a second time, with the same ticket.
        """
        last_place, last_what, count, last_ticket = self._last.get(env_id, ((), "", 0, None))
        if last_ticket == ticket:
            return
        what = _kind_of(error)
        count = count + 1 if (last_place, last_what) == (place, what) else 1
        if count >= (MAX_SAME_SIGNALS if what in _SIGNALS_FROM_OUTSIDE else MAX_SAME_FAILURES):
            self._reasons[env_id] = f"step {place[-1]} failed in the same way when it was replayed ({what})"
        self._last[env_id] = place, what, count, ticket

    def pop_reason(self, env_id: int) -> str | None:
        """Return once why another replay would not help, or None if it may help."""
        return self._reasons.pop(env_id, None)


def _kind_of(error: StepmillError) -> str:
    """Return a key that is equal for errors of the same cause. The text is not part of it: it may contain times."""
    if isinstance(error, EnvError):
        return error.error_type
    if isinstance(error, WorkerDied):
        return error.signal_name or f"exit code {error.exit_code}"
    return type(error).__name__
