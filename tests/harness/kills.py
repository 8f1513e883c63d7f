"""Signals that end or stop a process, and the wait until it has ended or stopped."""

from __future__ import annotations

import os
import select
import signal
from contextlib import closing
from pathlib import Path

from stepmill import _native
from tests.harness.hangs import HANG_GUARD_S


def kill_process(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a process a signal, and wait until all its threads have ended: not only until it is a zombie."""
    with closing(_native.OwnedFd.pidfd(pid)) as pidfd:
        _native.pidfd_send_signal(pidfd.fileno(), number)
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        assert poller.poll(HANG_GUARD_S * 1000), f"process {pid} does not end after signal {number}"


def stop_process(pid: int) -> None:
    """Stop a process, and wait until all its threads are stopped: a signal has no effect yet when `kill` returns."""
    os.kill(pid, signal.SIGSTOP)
    while not all(
        "State:\tT" in each.read_text(encoding="utf-8") for each in Path(f"/proc/{pid}/task").glob("*/status")
    ):
        os.sched_yield()
