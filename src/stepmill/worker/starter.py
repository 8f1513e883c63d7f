"""The starter, a process that starts launchers. A program has one starter, which serves all its pools.

The starter is a fresh interpreter. It imports once the modules that every worker needs, and forks a launcher for each
pool. Its own output is discarded. A launcher writes to the files that the learner has when its pool is made. Without
launchers, the starter ends after some time.
"""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import invalidate_caches

from stepmill._native import OwnedFd
from stepmill.worker import process_setup
from stepmill.worker.channel import Channel
from stepmill.worker.launcher import Child, ChildServer, Launcher, load_modules
from stepmill.worker.messages import StartLauncher


def main(fd: int, arguments: Mapping[str, object]) -> None:
    """Run a starter in a fresh interpreter. `fd` is the socket of its channel."""
    process_setup.reset_signal_handlers()
    learner, preload, idle_s = arguments["learner"], arguments["preload"], arguments["idle_s"]
    if not (isinstance(preload, list) and isinstance(learner, int) and isinstance(idle_s, float)):
        raise TypeError(f"the starter got wrong arguments: {arguments}")
    load_modules(preload)
    _detach_output()
    Starter(Channel(socket.socket(fileno=fd), use_thread=False), learner, StartLauncher, idle_s=idle_s).run_and_leave()


class Starter(ChildServer[StartLauncher]):
    """Starts launchers on request, and reaps them."""

    def start(self, request: StartLauncher, fds: Sequence[OwnedFd]) -> Child:
        _attach_output(zip(fds[1:], request.stdio, strict=True))
        try:
            invalidate_caches()  # there may be new files to import since the last pool
            load_modules(request.preload)
            gc.freeze()
            pid = process_setup.fork()
            if pid == 0:
                self._run_as_launcher(request, fds[0])
        finally:
            _detach_output()
        return Child.watch(request.number, pid)

    def _run_as_launcher(self, request: StartLauncher, fd: OwnedFd) -> None:
        try:
            self.close_in_fork()
            for name in os.environ.keys() - request.environ.keys():
                del os.environ[name]
            os.environ.update(request.environ)
            channel = Channel(socket.socket(fileno=fd.release()), use_thread=False)
            Launcher(channel, self._learner, request.context, {}).run_and_leave()
        except BaseException:
            traceback.print_exc()
        finally:
            process_setup.exit_process(1)


def _attach_output(files: Iterable[tuple[OwnedFd, int]]) -> None:
    """Replace these descriptors with these files, so that output is written to them."""
    for file, number in files:
        os.dup2(file.fileno(), number)
        file.close()


def _detach_output() -> None:
    """Replace the learner's files for output with /dev/null, so that the reader of a pipe sees its end."""
    process_setup.flush_stdio()
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    if null > 2:
        os.close(null)
