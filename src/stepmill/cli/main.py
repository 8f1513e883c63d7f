"""The entry point of the command line. `main` turns every outcome into an exit status and at most one line on stderr.

Modules that take long to import are imported inside `main`, so that a Ctrl-C during start-up is caught as well.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, cast

from stepmill.observe.exit_status import ExitStatus, complain, first_line
from stepmill.spec.errors import EnvError, MissingExtraError, StepmillError, UsageError

# Env constructors raise these when their library is not installed. The message names the pip command.
MISSING_LIBRARY = frozenset({"DependencyNotInstalled", "ImportError", "ModuleNotFoundError"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `stepmill` with the given arguments, by default those of the process, and return its exit status.

    An exception becomes a status and one line on stderr.
    """
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    show_warning = warnings.showwarning
    try:
        warnings.showwarning = cast("Any", _show_warning)
        _report_log()
        from stepmill.cli.commands import dispatch  # loads click

        status = dispatch(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        # A second Ctrl-C must not print a traceback while the interpreter shuts down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # If this one came inside of exec(), with which dataclasses are made, `python -m` would end by the signal: this exec() makes
        # the interpreter forget it.
        exec("")
        complain("interrupted")
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        return _leave_closed_pipe()
    except StepmillError as error:
        complain(f"{first_line(error.message)}{_count_others(error)}")
        return ExitStatus.USAGE if is_user_mistake(error) else ExitStatus.FAILED
    finally:
        signal.signal(signal.SIGTERM, before)
        warnings.showwarning = show_warning


def _show_warning(message: Warning | str, category: type[Warning], filename: str, *_: object, **_named: object) -> None:
    """Write a warning as one line: a RuntimeWarning as its message, others with their category and file."""
    complain(f"{message}" if category is RuntimeWarning else f"{category.__name__}: {message} ({filename})")


def _report_log() -> None:
    """Write the pool's log as lines on stderr, because the user has not configured logging here."""
    logger = logging.getLogger("stepmill")
    if not logger.handlers:
        logger.addHandler(_LinesOnStderr(logging.WARNING))


class _LinesOnStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())


def is_user_mistake(error: StepmillError) -> bool:
    """Whether the command cannot work as given: its input is invalid, or a library is not installed."""
    if isinstance(error, EnvError):
        return error.phase == "construct" and error.error_type.rpartition(".")[2] in MISSING_LIBRARY
    return isinstance(error, (UsageError, MissingExtraError))


def _count_others(error: StepmillError) -> str:
    return f" (and {len(error.others)} more; --traceback shows all)" if error.others else ""


def _exit_on_sigterm(_signum: int, _frame: FrameType | None) -> NoReturn:
    """Raise, so that the live view restores the cursor and the pool closes."""
    raise SystemExit(ExitStatus.TERMINATED)


def _leave_closed_pipe() -> int:
    """Exit silently, as `head` expects. stdout becomes /dev/null, because the flush at exit would raise otherwise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitStatus.FAILED
