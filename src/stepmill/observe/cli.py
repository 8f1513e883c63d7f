"""The entry point of the command line. `main` turns every outcome into an exit status and at most one line on stderr.

 0    done
 1    an env, a worker or a policy failed while it ran; `--traceback` shows where
 2    the command cannot work as given: an unknown id, a missing extra, a count below 1, ...
 130  Ctrl-C
 143  SIGTERM

Modules that take long to import are imported inside `main`, so that a Ctrl-C during start-up is caught as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import FrameType
from typing import NoReturn

from stepmill.spec.errors import EnvError, MissingExtraError, StepmillError, UsageError

# Env constructors raise these when their library is not installed. The message names the pip command.
MISSING_LIBRARY = frozenset({"DependencyNotInstalled", "ImportError", "ModuleNotFoundError"})


class ExitStatus(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
    TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `stepmill` with the given arguments, by default those of the process, and return its exit status."""

    def run_command() -> int:
        from stepmill.observe.commands import dispatch

        return dispatch(sys.argv[1:] if arguments is None else list(arguments))

    return guard(run_command)


def guard(command: Callable[[], int]) -> int:
    """Run a command and return its exit status. An exception becomes a status and one line on stderr."""
    before = signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        # A second Ctrl-C must not print a traceback while the interpreter shuts down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        complain("interrupted")
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:
        return _leave_closed_pipe()
    except StepmillError as error:
        complain(f"{_first_line(error.message)}{_count_others(error)}")
        return ExitStatus.USAGE if is_user_mistake(error) else ExitStatus.FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


def is_user_mistake(error: StepmillError) -> bool:
    """Whether the command cannot work as given: its input is invalid, or a library is not installed."""
    if isinstance(error, EnvError):
        return error.phase == "construct" and error.error_type.rpartition(".")[2] in MISSING_LIBRARY
    return isinstance(error, (UsageError, MissingExtraError))


def complain(message: str) -> None:
    """Write the first non-empty line of a message to stderr."""
    # If stderr is closed, there is nowhere to report the error.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"stepmill: {_first_line(message)}\n")
        sys.stderr.flush()


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "failed without a message")


def _count_others(error: StepmillError) -> str:
    return f" (and {len(error.others)} more; --traceback shows all)" if error.others else ""


def _exit_on_sigterm(_signum: int, _frame: FrameType | None) -> NoReturn:
    """Raise, so that the live view restores the cursor and the pool closes."""
    raise SystemExit(ExitStatus.TERMINATED)


def _leave_closed_pipe() -> int:
    """Exit silently, as `head` expects. stdout becomes /dev/null, because the flush at exit would raise otherwise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitStatus.FAILED
