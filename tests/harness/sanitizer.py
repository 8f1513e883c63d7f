"""Forks that survive AddressSanitizer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_REST_S = 2.0


def fork_at_rest() -> None:
    """Lets every fork from here on wait until no other thread is about to run; for processes with AddressSanitizer.

    Up to GCC 13 its allocator takes no care of forks, as that of glibc does: if another thread is in `free` meanwhile,
    the child finds a lock taken that nobody gives back, and hangs in its next `malloc`. A thread that was joined is
    such a thread, for Python calls it joined before it has taken itself down.
    """
    os.register_at_fork(before=_await_rest)


def _await_rest() -> None:
    deadline = time.monotonic() + _REST_S
    while _is_busy() and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_busy() -> bool:
    for task in Path("/proc/self/task").iterdir():
        try:
            state = (task / "stat").read_bytes().rpartition(b") ")[2][:1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if state == b"R" and int(task.name) != threading.get_native_id():
            return True
    return False
