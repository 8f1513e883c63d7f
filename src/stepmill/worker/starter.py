"""The starter, a process that starts launchers. A program has one starter, which serves all its pools.

The starter is a fresh interpreter. It imports once the modules that every worker needs, and forks a launcher for each
pool. Its own output is discarded. A launcher writes to the files that the learner has when its pool is made. Without
launchers, the starter ends after some time.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from importlib import invalidate_caches

from stepmill._native import OwnedFd
from stepmill.worker import process_setup
from stepmill.worker.channel import Channel
from stepmill.worker.launcher import ChildServer, load_modules, run_launcher
from stepmill.worker.messages import Start


def main(fd: int, learner: int, preload: Sequence[str], idle_s: float) -> None:
    """Run a starter in a fresh interpreter. `fd` is the socket of its channel, and `learner` the pidfd of the learner."""
    process_setup.reset_signal_handlers()
    load_modules(preload)
    _detach_output()
    channel = Channel(socket.socket(fileno=fd), use_thread=False)
    process_setup.run_and_exit(Starter(channel, learner, idle_s=idle_s).serve)


class Starter(ChildServer):
    """Starts launchers on request, and reaps them."""

    def start(self, request: Start, fds: Sequence[OwnedFd]) -> int:
        setup = request.setup
        assert setup is not None  # the learner asks the starter for launchers only
        for file, number in zip(fds[1:], setup.stdio, strict=True):
            os.dup2(file.fileno(), number)
            file.close()
        try:
            invalidate_caches()  # there may be new files to import since the last pool
            load_modules(setup.preload)
            gc.freeze()
            return self.fork(lambda: run_launcher(fds[0].release(), self.learner, setup.context, setup.environ))
        finally:
            _detach_output()


def _detach_output() -> None:
    """Replace the learner's files for output with /dev/null, so that the reader of a pipe sees its end."""
    process_setup.flush_stdio()
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    if null > 2:
        os.close(null)
