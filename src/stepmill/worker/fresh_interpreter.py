"""Starts a fresh Python process that runs a function of this package, with the sys.path of the starting process.

The code on its command line reads sys.path and the function's name from a pipe. Before that it imports only modules that are
built into the interpreter, so that a file `socket.py` in the working directory is not imported by mistake.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from stepmill._native import OwnedFd
from stepmill.spec.errors import UsageError
from stepmill.worker.module_contents import names_of
from stepmill.worker.process_setup import block_signals

_CODE = """\
import sys, os, gc, marshal
gc.disable()
with os.fdopen({pipe}, "rb") as pipe:
    boot = marshal.loads(pipe.read())
sys.path[:], sys.argv[:] = boot["path"], boot["argv"]
from stepmill.worker.fresh_interpreter import run_entry
run_entry(boot)
"""


def start_interpreter(entry: str, fd: int, learner: int, environ: Mapping[str, str], **arguments: object) -> int:
    """Start a fresh interpreter, and return its pid.

    Args:
        entry: the function to call, as "module:name". Its arguments are `fd`, `learner` and the `arguments` here.
        fd: the socket of its channel, which the process inherits with the same number.
        learner: a pidfd of the learner, which the process inherits, too.
        environ: the environment variables of the process.
        arguments: numbers, strings, and lists of them.
    Raises:
        UsageError: the path of the Python executable is not known, or the system refuses to start it.
    """
    if not sys.executable:
        raise UsageError("this Python is embedded and has no executable to start workers with; use context='fork'")
    boot = {
        "path": _import_path(),
        "argv": [str(word) for word in getattr(sys, "argv", [])],
        "entry": entry,
        "arguments": {"fd": fd, "learner": learner, **arguments},
    }
    read_end, write_end = map(OwnedFd, os.pipe())
    with contextlib.closing(write_end):
        try:
            with contextlib.closing(read_end), block_signals():
                process = subprocess.Popen(
                    [sys.executable, *interpreter_flags(), "-c", _CODE.format(pipe=read_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=dict(environ),
                    pass_fds=(fd, learner, read_end.fileno()),
                )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as exc:
            raise UsageError(
                f"cannot start workers with {sys.executable}: {exc}; restore the executable, or use context='fork'"
            ) from exc
        process.returncode = 0  # the process is reaped by its pid, and not by this object
        # BrokenPipeError means that the process is dead already, which its pidfd reports.
        with contextlib.suppress(BrokenPipeError), open(write_end.fileno(), "wb", closefd=False) as pipe:
            pipe.write(marshal.dumps(boot))
    return process.pid


def interpreter_flags() -> list[str]:
    """Return the options of this interpreter's command line with which another interpreter must be started."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def _import_path() -> list[str]:
    """Return sys.path for a fresh interpreter.

    An empty entry, as in notebooks, means the working directory, which may have changed since the program imported its
    modules. The folders of these modules come before it.
    """
    path = [str(entry) for entry in sys.path]
    if "" in path:
        folders = [_import_folder(name, names_of(module).get("__file__")) for name, module in list(sys.modules.items())]
        new = [each for each in dict.fromkeys(folders) if each and each not in (*path, os.getcwd())]
        path[path.index("") : path.index("")] = new
    return path


def _import_folder(name: str, file: object) -> str:
    """Return the folder in which a module or package was found, or "" if its file has another name."""
    folder, base = os.path.split(file) if isinstance(file, str) else ("", "")
    if base == "__init__.py" and os.path.basename(folder) == name:
        return os.path.dirname(folder)
    return folder if base == f"{name}.py" else ""


def run_entry(boot: Mapping[str, Any]) -> None:
    """Call the entry function. This runs in the fresh interpreter."""
    module, _, name = boot["entry"].partition(":")
    entry = getattr(import_module(module), name)
    gc.freeze()  # modules stay; searching them for garbage would take a twentieth of the time of the imports
    gc.enable()
    entry(**boot["arguments"])
