"""How often a failed reset has been tried again. In the same process the worker does it by itself; in a new one the pool."""

from __future__ import annotations

from stepmill.pool.faults import FaultKind, FaultRow
from stepmill.spec.errors import EnvError, StepmillError
from stepmill.spec.options import PoolOptions, RetryIn

RETRIED = (FaultKind.RAISED, FaultKind.DIED, FaultKind.TIMED_OUT)
"""Failures of a reset that another process may not have."""


class ResetRetries:
    """Counts the attempts of resets that are tried again in a new process."""

    def __init__(self, options: PoolOptions) -> None:
        self.max_attempts = options.reset_retries + 1
        self.wait_s = options.reset_retry_wait_s
        self._retry_in = options.reset_retry_in
        self._attempts: dict[int, tuple[int, int]] = {}  # by env: ticket of the last attempt, and which it was

    @property
    def is_in_new_process(self) -> bool:
        """Whether there are such resets at all."""
        return self.max_attempts > 1 and self._retry_in is RetryIn.NEW

    def is_used_up_by(self, row: FaultRow, error: StepmillError) -> bool:
        """Whether this fault is that of the last attempt that the worker makes by itself."""
        has_retried = self.max_attempts > 1 and self._retry_in is RetryIn.SAME
        return has_retried and row[1] == FaultKind.RAISED and isinstance(error, EnvError) and error.phase == "reset"

    def take(self, env_id: int, ticket: int) -> bool:
        """Count a failed reset; return whether it may be tried once more."""
        last, attempts = self._attempts.get(env_id, (ticket, 0))
        attempts = attempts + 1 if last == ticket else 1
        self._attempts[env_id] = (ticket, attempts)
        return attempts < self.max_attempts

    def note(self, env_id: int, ticket: int) -> None:
        """Take note of the command by which it is tried again."""
        self._attempts[env_id] = (ticket, self._attempts[env_id][1])
