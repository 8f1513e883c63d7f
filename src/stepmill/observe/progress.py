"""Progress bars of the commands, on stderr. Only this file imports rich's progress bars."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

DELAY_S = 1.0  # a block that ends sooner shows no bar


@contextmanager
def show_progress(what: str, total: float, *, is_quiet: bool) -> Iterator[Callable[..., None]]:
    """Draw a bar in a thread during the block, if stderr is a terminal and the block takes more than DELAY_S.

    The block gets a function that it calls with what is completed of `total`, and optionally another text in place of `what`.
    """
    console = Console(stderr=True)
    if is_quiet or not console.is_terminal or console.is_dumb_terminal:
        yield lambda _completed, _what=None: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(what, total=total)
    timer = threading.Timer(DELAY_S, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda completed, what=None: progress.update(task, completed=completed, description=what)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()
