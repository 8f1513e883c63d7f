"""The programs that envs have started: a hung one would outlive a worker that had to be killed.

A player is known by its pid and by when it started, since pids come again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

Player = tuple[int, int]  # pid, and when it started in the kernel's ticks


def find_players() -> list[Player]:
    """Return the child processes of this process."""
    found = []
    for entry in Path("/proc").iterdir():
        stat = _read_stat(int(entry.name)) if entry.name.isdigit() else None
        if stat is not None and stat[0] == os.getpid():
            found.append((int(entry.name), stat[1]))
    return found


def end_players(players: Iterable[Player]) -> None:
    """Kill players that are still there."""
    for pid, started in players:
        with contextlib.suppress(OSError):  # it is gone
            _end(pid, started)


def _end(pid: int, started: int) -> None:
    pidfd = os.pidfd_open(pid)  # from here on the number is this process's
    try:
        stat = _read_stat(pid)
        if stat is not None and stat[1] == started:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _read_stat(pid: int) -> tuple[int, int] | None:
    """Return a process's parent, and when it started; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19])
