"""Starts a fresh Python that continues in a function of ours, with the sys.path of the process that started it.

The code on its command line reads, from a pipe, what it needs before it can import anything of ours. Until then it imports
nothing that is not in the interpreter already, so that a stray `socket.py` in the working directory does no harm.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from stepmill._native import OwnedFd
from stepmill.spec.errors import UsageError
from stepmill.worker.settle import born_deaf

_CODE = """\
import sys, os, marshal
with os.fdopen({pipe}, "rb") as pipe:
    boot = marshal.loads(pipe.read())
sys.path[:], sys.argv[:] = boot["path"], boot["argv"]
from stepmill.worker.boot import enter
enter(boot)
"""


@dataclass(frozen=True)
class Start:
    """Where a fresh interpreter begins.

    Attributes:
        entry: the function, as "module:name"; it is called with the socket's descriptor and `facts`.
        facts: what it is told; numbers, strings, and lists of them.
        keep_fds: descriptors that it inherits under their numbers, beside its end of the channel.
        environ: its environment.
    """

    entry: str
    facts: Mapping[str, object]
    keep_fds: Sequence[int]
    environ: Mapping[str, str] = field(repr=False)


def start_interpreter(start: Start, fd: int) -> subprocess.Popen[bytes]:
    """Starts a fresh interpreter, which inherits its end of the channel, `fd`.

    Raises:
        UsageError: this Python does not know its own executable, or the system refuses to start it.
    """
    if not sys.executable:
        raise UsageError("this Python is embedded and has no executable to start workers with; use context='fork'")
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    read_end, write_end = map(OwnedFd, os.pipe())
    with contextlib.closing(write_end):
        try:
            with contextlib.closing(read_end), born_deaf():
                process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _CODE.format(pipe=read_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=dict(start.environ),
                    pass_fds=(fd, read_end.fileno(), *start.keep_fds),
                )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as exc:
            raise UsageError(
                f"no worker can be started with {sys.executable}: {exc}; is it still where it was?"
            ) from exc
        with contextlib.suppress(BrokenPipeError), open(write_end.fileno(), "wb", closefd=False) as pipe:
            pipe.write(_first_words(start, fd))  # a broken pipe: it is dead already
    return process


def _first_words(start: Start, fd: int) -> bytes:
    return marshal.dumps(
        {
            "path": [str(entry) for entry in sys.path],
            "argv": [str(word) for word in getattr(sys, "argv", [])],
            "entry": start.entry,
            "fd": fd,
            "facts": dict(start.facts),
        }
    )


def enter(boot: Mapping[str, object]) -> None:
    """Continues in the function that `start_interpreter` was given. Called in the fresh interpreter."""
    module, _, name = str(boot["entry"]).partition(":")
    getattr(import_module(module), name)(boot["fd"], boot["facts"])
