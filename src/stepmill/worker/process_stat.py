"""Reads what Linux says about a process."""

from __future__ import annotations

import os


def read_stat(folder: str | os.PathLike[str]) -> list[bytes]:
    """Return the fields of /proc/PID/stat, or of a thread's, that follow the name: state, parent, ...; see proc(5).

    Raises:
        OSError: the process or the thread has ended.
    """
    with open(os.path.join(folder, "stat"), "rb") as file:
        return file.read().rpartition(b")")[2].split()
