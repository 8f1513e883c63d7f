"""Progress bars of the commands, on stderr. Only this file imports rich's progress bars."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["BarColumn", "TextColumn", "TimeElapsedColumn", "TimeRemainingColumn", "make_progress", "show_progress"]

DELAY_S = 1.0  # a block that ends sooner shows no bar


def make_progress(*columns: ProgressColumn, is_quiet: bool, has_thread: bool = True) -> Progress:
    """Return a bar that is not started. It draws nothing if `is_quiet` or if stderr is no terminal.

    Args:
        has_thread: whether a thread draws the bar ten times a second. Otherwise it is drawn when it is updated with
            refresh=True.
    """
    console = Console(stderr=True)
    is_hidden = is_quiet or not console.is_terminal or console.is_dumb_terminal
    return Progress(*columns, console=console, transient=True, disable=is_hidden, auto_refresh=has_thread)


@contextmanager
def show_progress(*columns: ProgressColumn, is_quiet: bool) -> Iterator[Progress]:
    """Draw a bar in a thread during the block, if stderr is a terminal and the block takes more than DELAY_S."""
    progress = make_progress(*columns, is_quiet=is_quiet)
    if progress.disable:
        yield progress
        return
    timer = threading.Timer(DELAY_S, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield progress
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
