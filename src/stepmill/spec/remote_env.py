"""What the code of an env outside the worker's process needs: the time limits of its calls, and errors that have no traceback here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class CallLimits:
    """How many seconds calls of an env may take; None means no limit. The defaults are for envs that are made without a pool.

    Backends that end the process of a late env set only `start_s`. `spin_s`: how long both sides wait for each other without
    sleep, if the wait before was as short.
    """

    start_s: float | None = 120.0
    step_s: float | None = None
    reset_s: float | None = None
    call_s: float | None = None
    spin_s: float = 2e-3


class _OfThread(threading.local):
    limits = CallLimits()


_OF_THREAD = _OfThread()


def limits_here() -> CallLimits:
    """Return the limits of the envs that this thread builds."""
    return _OF_THREAD.limits


@contextmanager
def set_limits(limits: CallLimits) -> Iterator[None]:
    """Set the limits of the envs that this thread builds in the block."""
    before, _OF_THREAD.limits = _OF_THREAD.limits, limits
    try:
        yield
    finally:
        _OF_THREAD.limits = before


class CallTooLate(Exception):
    """A call took longer than its limit, and the process that it ran in was ended. The text is the limit in seconds."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"{limit_s:g}")


class RemoteError(Exception):
    """An exception of an env in another process.

    Attributes:
        error_type: the dotted name of its class.
        message: its text.
        remote_traceback: its traceback in that process.
    """

    def __init__(self, error_type: str, message: str, remote_traceback: str) -> None:
        super().__init__(error_type, message, remote_traceback)
        self.error_type, self.message, self.remote_traceback = error_type, message, remote_traceback

    def __str__(self) -> str:
        return (
            f"{self.error_type}: {self.message}\n\n{self.remote_traceback}" if self.remote_traceback else self.message
        )
