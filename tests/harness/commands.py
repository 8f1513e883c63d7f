"""Runs `stepmill` in a fork of this process, which has imported what a program of its own would import for half a second."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from stepmill.backends.starter_client import STARTERS
from stepmill.cli.main import main
from tests.harness.scripts import ROOT


def run_command(*arguments: str, cwd: Path = ROOT, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line with these arguments in `cwd`, with `text` as its input, to its end.

    Tests of signals, terminals and the interpreter's own start need a process of its own: `python -m stepmill`.
    """
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        given.write(text)
        for stream in (given, sys.stdout, sys.stderr):
            stream.flush()
        given.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the fork does not need
            pid = os.fork()
        if pid == 0:
            _run_in_fork(arguments, cwd, (given, out, err))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), err.read())


def _run_in_fork(arguments: Sequence[str], cwd: Path, streams: Sequence[IO[str]]) -> None:
    status = 70
    try:
        _become_a_program(cwd, streams)
        status = main(arguments)
        STARTERS.close()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become_a_program(cwd: Path, streams: Sequence[IO[str]]) -> None:
    """Have what `python -m stepmill` has in this directory: its files, module path, warnings, handlers of signals and of logging."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
    os.chdir(cwd)
    sys.path.insert(0, str(cwd))
    warnings.resetwarnings()
    logging.getLogger("stepmill").handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
