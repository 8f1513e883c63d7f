"""Calls of the originals that do not return: they are made in processes that can be ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable

from tests.harness.hangs import HANG_GUARD_S

NEVER_S = 4.0


def check_returns(function: Callable[[], object], is_expected: bool) -> None:
    """Fail unless a function returns or raises in a forked process, or does neither within NEVER_S if that is expected."""
    limit_s = HANG_GUARD_S if is_expected else NEVER_S
    assert (_exit_code(function, limit_s) is not None) is is_expected


def check_fails(function: Callable[[], object]) -> None:
    """Fail if a function returns without an exception in a forked process."""
    assert _exit_code(function, NEVER_S) != 0


def _exit_code(function: Callable[[], object], limit_s: float) -> int | None:
    """Return 1 if a function raises, and None if it takes longer. Its process and the children of that are ended."""
    process = multiprocessing.get_context("fork").Process(target=_call_in_own_group, args=(function,))
    process.start()
    process.join(limit_s)
    found = process.exitcode
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
    except BaseException:
        os._exit(1)
    os._exit(0)
