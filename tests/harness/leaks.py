"""What a process has, so that a test can show it has left nothing behind: children, threads, descriptors, shared memory."""

from __future__ import annotations

import ctypes
import gc
import glob
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing import resource_tracker

from stepmill.backends.starter_client import STARTERS
from tests.harness.hangs import HANG_GUARD_S

GRACE_S = HANG_GUARD_S
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, so that none can hide from `Footprint`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class Footprint:
    """What this process had at one moment; each thing as a line of text.

    The starter and its descriptors are left out: there is one per program, and it ends with it (tests/crash/test_starter.py).
    Its launchers are included. Left out is Python's resource tracker, too, of which the same is true.
    """

    processes: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    mappings: tuple[str, ...]
    shm: frozenset[str]

    @classmethod
    def take(cls) -> Footprint:
        return cls(
            processes=frozenset(map(_describe_process, descendants())),
            threads=frozenset(_list_threads()),
            descriptors=frozenset(_list_descriptors()),
            mappings=tuple(sorted(_list_mappings())),
            shm=frozenset(name for name in os.listdir("/dev/shm") if "stepmill" in name),
        )

    def find_new(self, before: Footprint) -> list[str]:
        """Return what is there now and was not before."""
        new = [f"process {line}" for line in self.processes - before.processes]
        new += [f"thread {line}" for line in self.threads - before.threads]
        new += [f"descriptor {line}" for line in self.descriptors - before.descriptors]
        new += [f"mapping {line}" for line in (Counter(self.mappings) - Counter(before.mappings)).elements()]
        new += [f"/dev/shm/{line}" for line in self.shm - before.shm]
        return sorted(new)


def find_leaks(before: Footprint, *, grace_s: float = GRACE_S, reaps: bool = False) -> list[str]:
    """Return what has been left behind since `before`; what is on its way out has `grace_s` seconds to go.

    Args:
        before: what there was.
        grace_s: seconds.
        reaps: collect zombies, which are orphans of processes that the test has killed.
    """
    deadline = time.monotonic() + grace_s
    gc_is_due = True
    while True:
        if reaps:
            reap_orphans()
        leaks = Footprint.take().find_new(before)
        if leaks and gc_is_due:
            gc_is_due = False
            gc.collect()
            continue
        if not leaks or time.monotonic() >= deadline:
            return leaks
        time.sleep(0.01)  # nothing to synchronise with: a thread's end cannot be waited for from outside


def starter_pid() -> int | None:
    """Return the pid of the process that starts the launchers of this program, or None if there is none."""
    return None if STARTERS.current is None else STARTERS.current.pid


def _tracker() -> tuple[int | None, int | None]:
    """Return the pid of Python's resource tracker, and the descriptor of its pipe."""
    tracker = resource_tracker._resource_tracker
    return tracker._pid, tracker._fd


def descendants(pid: int | None = None) -> list[int]:
    """Return the pids of all descendants of a process (None: of this one, without its starter and tracker), zombies included."""
    found: list[int] = []
    todo = [os.getpid() if pid is None else pid]
    while todo:
        new = _children(todo.pop())
        found += new
        todo += new
    return [each for each in found if pid is not None or each not in (starter_pid(), _tracker()[0])]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path) as file:
                found += map(int, file.read().split())
        except OSError:
            continue  # the thread has ended
    return found


def workers_of_pools() -> list[int]:
    """Return the pids of the launchers and workers of pools among our descendants."""
    return [pid for pid in descendants() if b"stepmill.worker" in _command_line(pid) and is_running(pid)]


def _command_line(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    return _state(pid) not in ("", "Z", "X")


def wait_until_gone(pids: list[int], *, timeout_s: float) -> list[int]:
    """Return which processes still run after at most `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    alive = [pid for pid in pids if is_running(pid)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.002)
        alive = [pid for pid in alive if is_running(pid)]
    return alive


def reap_orphans() -> None:
    """Collect dead processes that came to us when their parents died. Never call it while a child of ours may be one."""
    for pid in descendants():
        if _state(pid) == "Z":
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def kill_descendants() -> None:
    """End whatever a failed test has left, and the starter, so that the next test starts clean."""
    pids = [each for each in descendants(os.getpid()) if each != _tracker()[0]]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    wait_until_gone(pids, timeout_s=HANG_GUARD_S)
    reap_orphans()


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    stat = _stat(pid)
    return stat[0] if stat else ""


def _describe_process(pid: int) -> str:
    stat = _stat(pid)
    command = _command_line(pid).replace(b"\0", b" ").decode(errors="replace").strip()
    start_time = stat[19] if stat else "?"
    return f"{pid} {'(zombie) ' if stat and stat[0] == 'Z' else ''}{command[:120]} started at {start_time}"


def _list_threads() -> list[str]:
    lines = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                lines.append(f"{task} {file.read().strip()}")
        except OSError:
            continue
    return lines


def _list_descriptors() -> list[str]:
    lines = []
    starter = STARTERS.current
    kept = {str(_tracker()[1])}
    if starter is not None:  # of a message that has arrived in part, its channel has the descriptors
        received = [fd.fileno() for fd in starter.channel._fds]
        kept.update(map(str, (starter.channel.fd, starter.pidfd, *received)))
    for fd in os.listdir("/proc/self/fd"):
        if fd in kept:
            continue
        try:
            lines.append(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return lines


def _list_mappings() -> list[str]:
    with open("/proc/self/maps") as file:
        return [line.split(maxsplit=5)[5].strip() for line in file if "memfd:" in line]
