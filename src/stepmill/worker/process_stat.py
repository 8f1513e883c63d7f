"""Reads what Linux says about a process."""

from __future__ import annotations

import contextlib
import os


def read_stat(folder: str | os.PathLike[str]) -> list[bytes]:
    """Return the fields of /proc/PID/stat, or of a thread's, that follow the name: state, parent, ...; see proc(5).

    Raises:
        OSError: the process or the thread has ended.
    """
    with open(os.path.join(folder, "stat"), "rb") as file:
        return file.read().rpartition(b")")[2].split()


def process_state(pid: int) -> str:
    """Return the state letter of a process, as in ps(1): R, S, D, T, Z, ...; "" if there is none."""
    with contextlib.suppress(OSError, IndexError):
        return read_stat(f"/proc/{pid}")[0].decode()
    return ""
