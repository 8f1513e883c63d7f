"""Terminals: a file that says it is one, and what a program writes to a pseudo-terminal."""

from __future__ import annotations

import io
import os
import select
import time

from tests.harness.hangs import HANG_GUARD_S


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def read_terminal(fd: int, wanted: str | None = None) -> str:
    """Read what a program writes to its terminal until `wanted` has come, or until the program has ended."""
    data = b""
    deadline_s = time.monotonic() + HANG_GUARD_S
    while wanted is None or wanted not in data.decode(errors="replace"):
        assert select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0], f"never came: {wanted}"
        try:
            data += os.read(fd, 65536)
        except OSError:  # EIO: the other end is closed
            assert wanted is None, data.decode(errors="replace")
            break
    return data.decode(errors="replace")
