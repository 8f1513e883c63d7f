"""Ctrl-C at a chosen line of stepmill's own code, and what must be left after it: nothing."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import stepmill
from tests.harness.leaks import Footprint, find_leaks

# Code of stepmill, and Python code of the standard library that it runs in the main thread.
INTERRUPTED = (
    str(Path(stepmill.__file__).parent),
    *(module.__file__ for module in (contextlib, threading, socket, subprocess)),
)
NUM_FOREIGN = 64  # descriptors that the program opens after the interrupt; more than a pool of the tests has
END_S = 20.0  # a guard against hangs


class LineInterrupt:
    """Calls a function, and raises SIGINT in this process before the n-th line that it executes of some files."""

    def __init__(
        self, at_line: int, files: tuple[str, ...] = INTERRUPTED, by_instruction: tuple[str, ...] = ()
    ) -> None:
        """`files`: how their paths begin. `by_instruction`: names of functions in them, each of whose instructions counts
        like a line, but for the return, which Python does not interrupt.
        """
        self._left = at_line
        self._files = files
        self._by_instruction = by_instruction
        self.where = ""  # the line; empty if so many were not executed

    def call(self, function: Callable[[], object]) -> bool:
        """Return whether the function raised KeyboardInterrupt."""
        sys.settrace(self._enter_frame)
        try:
            function()
        except KeyboardInterrupt as exc:
            exc.__traceback__ = None  # a program that goes on: nothing refers to the frames
            return True
        finally:
            sys.settrace(None)
        return False

    def _enter_frame(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if frame.f_code.co_name in self._by_instruction:
            frame.f_trace = self._count  # CPython 3.13 reports instructions only where it is set first
            frame.f_trace_opcodes = True
        return self._count

    def _count(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" or (event == "opcode" and not _is_return(frame)):
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)
        return self._count


def _is_return(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


@contextlib.contextmanager
def interrupted_after(
    seconds: float, handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler
) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread after a while, as Ctrl-C does; or call another handler there."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class ForeignFiles:
    """Files of the program, which take the lowest descriptors that are free, and notice when somebody closes one."""

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}
        for _ in range(NUM_FOREIGN):
            fd = os.memfd_create("foreign")
            self._inodes[fd] = os.fstat(fd).st_ino

    def close(self) -> list[int]:
        """Close them; return the numbers of those that were not the program's any more."""
        lost = [fd for fd, inode in self._inodes.items() if not self._is_whole(fd, inode)]
        for fd in self._inodes.keys() - set(lost):
            os.close(fd)
        self._inodes.clear()
        return lost

    @staticmethod
    def _is_whole(fd: int, inode: int) -> bool:
        try:
            return os.fstat(fd).st_ino == inode
        except OSError:
            return False


def find_damage(before: Footprint) -> list[str]:
    """Go on as a program does after an interrupt; return what is broken or left behind since `before`."""
    files = ForeignFiles()
    gc.collect()
    wait_for_threads()
    damage = [f"descriptor {fd} of the program was closed" for fd in files.close()]
    # A worker whose launcher was killed while it started is an orphan, and in tests orphans come to this process.
    return damage + find_leaks(before, grace_s=END_S, reaps=True)


def wait_for_threads() -> None:
    """Wait for threads of closed pools to end; one that hangs in an env returns after a while."""
    deadline = time.monotonic() + END_S
    for thread in threading.enumerate():
        if thread.name.startswith("stepmill"):
            thread.join(max(0.0, deadline - time.monotonic()))
