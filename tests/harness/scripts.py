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
    return _run(str(path), *arguments, cwd=path.parent, timeout_s=timeout_s)


def run_source(source: str, *arguments: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    """Run a script by `python -c` to its end."""
    return _run("-c", textwrap.dedent(source), *arguments, cwd=ROOT, timeout_s=timeout_s)


def _run(*arguments: str, cwd: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *STRICT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False)
