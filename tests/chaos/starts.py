"""Interrupts the construction of pools at random moments, and checks that nothing leaks and nothing else is closed."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from tests.chaos.fault_injection import Interrupter
from tests.chaos.kinds import Kind
from tests.chaos.report import ChaosReport
from tests.chaos.rounds import make_pool

NUM_FOREIGN = 64  # descriptors that are opened after an interrupt; more than a pool of a round has
END_S = 20.0  # how long threads and processes may take to end
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True)
class Inventory:
    """The children, threads, descriptors and mappings of this process; each as a line of text."""

    children: frozenset[str]
    threads: frozenset[str]
    descriptors: frozenset[str]
    mappings: frozenset[str]

    @classmethod
    def take(cls) -> Inventory:
        """Read them from /proc."""
        tasks = list(Path("/proc/self/task").iterdir())
        children = (pid for task in tasks for pid in _read(task / "children").split())
        with open("/proc/self/maps", encoding="utf-8") as file:
            mappings = [line.strip() for line in file if "memfd:stepmill" in line]
        return cls(
            frozenset(children),
            frozenset(f"{task.name} {_read(task / 'comm').strip()}" for task in tasks),
            frozenset(_list_descriptors()),
            frozenset(mappings),
        )

    def find_new(self, before: Inventory) -> list[str]:
        """Return what this inventory has and an earlier one did not."""
        names = (field.name for field in fields(self))
        return [f"{name}: {each}" for name in names for each in sorted(getattr(self, name) - getattr(before, name))]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # the thread has ended
        return ""


def _list_descriptors() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            yield f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}"


class StartRound:
    """Makes pools of one kind, one after another, and interrupts the construction of most."""

    def __init__(self, report: ChaosReport, rng: random.Random, kind: Kind, *, context: str) -> None:
        self._report = report
        self._rng = rng
        self._kind = kind
        self._context = context

    def run(self, seconds: float) -> None:
        """Make pools for this long."""
        until = time.monotonic() + seconds
        with tempfile.TemporaryDirectory(prefix="stepmill-chaos-") as folder, _adopted_orphans():
            begin = time.monotonic()
            self._use(folder)
            usual_s = time.monotonic() - begin
            before = Inventory.take()
            with Interrupter(self._rng) as interrupter:
                while time.monotonic() < until:
                    self._interrupt(folder, interrupter, usual_s)
                    self._check(before)
            self._use(folder)

    def _use(self, folder: str) -> None:
        """Make a pool without an interrupt, and reset it."""
        with make_pool(self._kind, self._context, folder) as pool:
            identities = pool.reset(seed=self._rng.randrange(2**31)).obs[:, 0]
            if not np.array_equal(identities, np.arange(pool.num_envs)):
                self._report.complain(
                    f"the first reset of a pool that was made after interrupted ones returned the identities {identities.tolist()}"
                )

    def _interrupt(self, folder: str, interrupter: Interrupter, within_s: float) -> None:
        pools = []
        try:
            with interrupter.interrupt(within_s):
                pools.append(make_pool(self._kind, self._context, folder))
        except KeyboardInterrupt:
            self._report.inflicted["Ctrl-C in a construction"] += 1
        for pool in pools:  # the construction ended before the signal came
            pool.close()

    def _check(self, before: Inventory) -> None:
        """Report what a construction has leaked, and descriptors of the program that it has closed."""
        foreign = {fd: os.fstat(fd).st_ino for fd in (os.memfd_create("foreign") for _ in range(NUM_FOREIGN))}
        gc.collect()
        deadline = time.monotonic() + END_S
        join_threads()
        lost = [fd for fd, inode in foreign.items() if _inode_of(fd) != inode]
        for fd in foreign.keys() - set(lost):
            os.close(fd)
        if lost:
            self._report.complain(f"an interrupted construction has closed descriptors {lost} of the program")
        while left := _left_since(before):
            if time.monotonic() >= deadline:
                self._report.complain(f"an interrupted construction has left {left}")
                return
            time.sleep(0.001)  # there is no way to wait for the end of an orphan


def join_threads() -> None:
    """Wait for threads of closed pools to end; one that hangs in an env returns after a while."""
    deadline = time.monotonic() + END_S
    for thread in threading.enumerate():
        if thread.name.startswith("stepmill"):
            thread.join(max(0.0, deadline - time.monotonic()))


def _left_since(before: Inventory) -> list[str]:
    now = Inventory.take()
    for pid in now.children - before.children:
        with suppress(ChildProcessError):
            os.waitpid(int(pid), os.WNOHANG)
    return now.find_new(before)


def _inode_of(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


@contextmanager
def _adopted_orphans() -> Iterator[None]:
    """Make this process the parent of descendants whose own parent dies, so that all of them are found."""
    prctl = ctypes.CDLL(None).prctl
    was_adopting = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was_adopting))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, was_adopting.value)
