"""Exit statuses of the command line, and its messages on stderr.

0    done
1    an env, a worker or a policy failed while it ran; `--traceback` shows where
2    the command cannot work as given: an unknown id, a missing extra, a count below 1, ...
130  Ctrl-C
143  SIGTERM
"""

from __future__ import annotations

import contextlib
import sys
from enum import IntEnum


class ExitStatus(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
    TERMINATED = 143


def complain(message: str) -> None:
    """Write the first non-empty line of a message to stderr."""
    # If stderr is closed, there is nowhere to report the error.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"stepmill: {first_line(message)}\n")
        sys.stderr.flush()


def first_line(message: str) -> str:
    """Return the first non-empty line of a message."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "failed without a message")
