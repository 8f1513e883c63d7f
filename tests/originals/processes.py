"""Calls of the originals that do not return: they are made in processes that can be ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable

NEVER_S = 4.0


def returns(function: Callable[[], object]) -> bool:
    """Whether a function returns or raises, in a forked process, within NEVER_S. It and its children are ended."""
    process = multiprocessing.get_context("fork").Process(target=_call_in_own_group, args=(function,))
    process.start()
    process.join(NEVER_S)
    found = process.exitcode is not None
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all have ended
    process.join()
    return found


def _call_in_own_group(function: Callable[[], object]) -> None:
    os.setpgid(0, 0)
    try:
        function()
    finally:
        os._exit(0)
