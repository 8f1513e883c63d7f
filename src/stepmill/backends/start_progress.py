"""Shows on a terminal how many envs of a pool have been built, if building takes long."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

from stepmill.spec.closing import CloseAtEnd

DELAY_S = 1.0  # a start that takes less time shows nothing
INTERVAL_S = 0.2
MIN_RATE_S = 1e-3
DUMB_TERMINALS = ("", "dumb", "unknown")
ERASE_LINE = "\r\x1b[2K"


class StartProgress(CloseAtEnd):
    """Rewrites one line on stderr. The thread that starts the workers calls `show` in each slice of its wait."""

    def __init__(self, num_envs: int, *, is_wanted: bool) -> None:
        self._num_envs = num_envs
        self._file = sys.stderr if is_wanted and _is_terminal(sys.stderr) else None
        self._begun_s = time.monotonic()
        self._due_s = self._begun_s + DELAY_S
        self._is_shown = False

    def show(self, count_built: Callable[[], int]) -> None:
        """Write the line a few times a second if the start takes long; only then, count the envs. This raises no exceptions."""
        now_s = time.monotonic()
        if self._file is None or now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        self._is_shown = True
        text = progress_text(count_built(), self._num_envs, now_s - self._begun_s)
        self._write(f"{ERASE_LINE}{text[: shutil.get_terminal_size().columns - 1]}")

    def close(self) -> None:
        """Erase the line, if there is one."""
        if self._is_shown:
            self._write(ERASE_LINE)
        self._file = None
        self._is_shown = False

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the start
            self._file.write(text)
            self._file.flush()


def progress_text(num_built: int, num_envs: int, elapsed_s: float) -> str:
    """Return one line with the number of envs built, the rate, and, after the first env, the time left."""
    text = f"stepmill: {num_built:,} of {num_envs:,} envs are built after {elapsed_s:.0f} s"
    if num_built == 0 or num_built == num_envs:
        return text
    per_s = num_built / max(elapsed_s, MIN_RATE_S)
    return f"{text}, {per_s:.3g} per second, {(num_envs - num_built) / per_s:.0f} s left"


def _is_terminal(file: TextIO | None) -> bool:
    if file is None or os.environ.get("TERM", "") in DUMB_TERMINALS:
        return False
    if file is not cast("TextIO", sys.__stderr__):
        return False  # a program that has replaced stderr may draw on the terminal itself, as rich does
    try:
        return file.isatty()
    except (OSError, ValueError):  # the stream is closed
        return False
