"""Reads data of processes from Linux for `doctor` and `tune`: children, threads, memory, descriptors and CPU time."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from stepmill.worker.process_stat import read_stat

OWN_CHILDREN = (b"resource_tracker", b"forkserver", b"stepmill.worker")  # helpers of Python and stepmill


def children() -> set[int]:
    """Return the pids of the living children of this process, without helpers of Python and stepmill."""
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            state, parent = read_stat(folder)[:2]
            command = (folder / "cmdline").read_bytes()
            if int(parent) == os.getpid() and state != b"Z" and not any(name in command for name in OWN_CHILDREN):
                found.add(int(folder.name))
    return found


def cpu_seconds(folder: Path) -> float:
    """Return how long a process or a thread has used a core.

    Raises:
        OSError: the process or the thread has ended.
    """
    return sum(map(int, read_stat(folder)[11:13])) / os.sysconf("SC_CLK_TCK")


def wait_for_end(pids: set[int]) -> set[int]:
    """Give children a second to end, and return those that have not."""
    until_s = time.monotonic() + 1.0
    while (left := pids & children()) and time.monotonic() < until_s:
        time.sleep(0.02)
    return left


def thread_seconds() -> dict[int, float]:
    """Return the CPU time of each thread, by its id."""
    found = {}
    for folder in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found[int(folder.name)] = cpu_seconds(folder)
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def scheduled_seconds(pid: int) -> tuple[float, float]:
    """Return how long all threads of a process have used a core, and how long they have waited for one to be free.

    Threads that have ended are not counted. Without the kernel's statistics the second number is 0.
    """
    used_ns = waited_ns = 0
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            used, waited, _ = (folder / "schedstat").read_text().split()
            used_ns += int(used)
            waited_ns += int(waited)
    return (used_ns / 1e9, waited_ns / 1e9) if used_ns else (cpu_seconds(Path(f"/proc/{pid}")), 0.0)
