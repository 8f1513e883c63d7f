"""Runs a whole program in an interpreter of its own, and waits for what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
# CPython 3.15 would raise that a process with threads forks.
STRICT = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")


def start_script(
    source: str, *arguments: str, interpreter: tuple[str, ...] = STRICT, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    """Start `source` by `python -c`; its output is captured, its input is a pipe. Use it as a context manager."""
    command = [sys.executable, *interpreter, "-c", textwrap.dedent(source), *arguments]
    return subprocess.Popen(
        command, cwd=cwd, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run_file(path: Path, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """Run a script file to its end."""
    return subprocess.run(
        [sys.executable, *STRICT, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=path.parent,
        check=False,
    )


def run_source(source: str, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """Run a script by `python -c` to its end."""
    return subprocess.run(
        [sys.executable, *STRICT, "-c", textwrap.dedent(source), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        check=False,
    )
