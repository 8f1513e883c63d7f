"""The processes that start others: a launcher starts the workers of one pool, and the starter the launchers of a program.

A launcher reports to the learner how the workers end. How it is made, and how it makes them:

    forkserver   a fork of the starter, which has imported what every worker needs; workers are forks of it
    spawn        a fork of the starter; it starts each worker as a fresh interpreter
    fork         a fork of the learner, made at the start of the pool before stepmill has threads; workers are forks of it

The launcher is the parent of the workers. Therefore the learner need not fork later, when it may have threads and use a
GPU, and it needs no signal handler for child processes.

A program has one starter, which serves all its pools. The starter is a fresh interpreter. It imports once the modules that
every worker needs, and forks a launcher for each pool. Its own output is discarded. A launcher writes to the files that the
learner has when its pool is made. Without launchers, the starter ends after some time.

Both have one thread, which waits in one poll for requests and for the ends of children (`ChildServer`). They end when the
learner closes the channel or is gone.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, invalidate_caches
from typing import NamedTuple

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.spec.choices import Context
from stepmill.worker import process_setup
from stepmill.worker.channel import Channel, ChannelClosed, deadline_after, wait_ready
from stepmill.worker.fresh_interpreter import start_interpreter
from stepmill.worker.messages import Exited, Launched, LaunchFailed, Quit, Start, WorkerPlan, dump_plain, load

_REAP_S = 0.3  # how long the process waits at its end for children that it has killed


def load_modules(names: Sequence[str]) -> None:
    """Import modules once, so that forked processes need not import them."""
    for name in names:
        # A module that cannot be imported here fails again in the worker that needs it, which reports the error.
        with contextlib.suppress(Exception):
            import_module(name)


class ChildServer:
    """Starts one process for each request, and reaps it. Subclasses define how a process is started."""

    def __init__(self, channel: Channel, learner: int, *, idle_s: float | None = None) -> None:
        """`learner` is the pidfd of the learner. Without children, the process ends after `idle_s` seconds."""
        self.learner = learner
        self._channel = channel
        self._idle_s = idle_s
        self._children: dict[int, _Child] = {}  # by pidfd

    def start(self, request: Start, fds: Sequence[OwnedFd]) -> int:
        """Start a process, and return its pid. `fds` came with the request."""
        raise NotImplementedError

    def fork(self, run: Callable[[], object]) -> int:
        """Call `run` in a fork of this process, without the descriptors of this object. Return the pid."""

        def run_alone() -> None:
            self._channel.close_local_copy()
            for child in self._children.values():
                child.pidfd.close()
            run()

        return process_setup.fork(run_alone)

    def serve(self) -> None:
        """Serve until the learner sends Quit or is gone, and then kill the remaining children."""
        try:
            with contextlib.suppress(ChannelClosed):
                while self._run_once():
                    pass
        finally:
            self._kill_all()
            self._channel.close_local_copy()

    def _run_once(self) -> bool:
        channel = self._channel
        wanted = dict.fromkeys((channel.fd, self.learner, *self._children), select.POLLIN)
        wanted[channel.fd] |= select.POLLOUT if channel.has_backlog else 0
        ready = wait_ready(wanted, None if self._children else deadline_after(self._idle_s), math.inf)
        if self.learner in ready or not ready:
            return False
        for pidfd in ready.keys() & self._children.keys():
            self._reap(self._children.pop(pidfd))
        channel.push()
        return channel.fd not in ready or self._apply_messages()

    def _apply_messages(self) -> bool:
        while (frame := self._channel.poll_frame()) is not None:
            message = load(frame.data)
            if isinstance(message, Quit):
                return False
            if not isinstance(message, Start):
                raise TypeError(f"got a {type(message).__name__}; this process accepts Start and Quit")
            self._launch(message, frame.fds)
        return True

    def _launch(self, request: Start, fds: Sequence[OwnedFd]) -> None:
        """Start a process, and report this. `fds` is empty if this process may open no more files."""
        child = None
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            pid = self.start(request, fds)
            # The pidfd is opened before the child is reaped, so it cannot refer to a later process with the same pid.
            child = _Child(request.number, pid, process_setup.watch_child(pid))
            self._channel.send(dump_plain(Launched(request.number, pid)), [child.pidfd.fileno()])
        except Exception as exc:  # no memory, too many processes, too many open files
            if child is not None:  # the learner does not know it
                child.kill()
                child.reap()
            self._channel.send(dump_plain(LaunchFailed(request.number, f"{type(exc).__name__}: {exc}")))
        else:
            self._children[child.pidfd.fileno()] = child

    def _reap(self, child: _Child) -> None:
        code = child.reap()
        if code is not None:
            self._channel.send(dump_plain(Exited(child.number, code)))

    def _kill_all(self) -> None:
        for child in self._children.values():
            child.kill()
        deadline = time.monotonic() + _REAP_S
        while self._children and time.monotonic() < deadline:
            for pidfd in wait_ready(dict.fromkeys(self._children, select.POLLIN), deadline, math.inf):
                self._children.pop(pidfd).reap()


class _Child(NamedTuple):
    """A process that was started, and has not been reaped yet."""

    number: int
    pid: int
    pidfd: OwnedFd

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            _native.pidfd_send_signal(self.pidfd.fileno(), signal.SIGKILL)

    def reap(self) -> int | None:
        """Wait for the end of the process, and return its exit code if it is known."""
        self.pidfd.close()
        return process_setup.reap_child(self.pid)


# ---- launchers --------------------------------------------------------------------------------------------------------


def run_launcher(
    fd: int, learner: int, context: Context, environ: Mapping[str, str], plans: Sequence[WorkerPlan] = ()
) -> None:
    """Run a launcher in a fork of the starter or of the learner, from which it has inherited the plans.

    `fd` is the socket of its channel, and `learner` the pidfd of the learner.
    """
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    channel = Channel(socket.socket(fileno=fd), use_thread=False)
    Launcher(channel, learner, context, {plan.worker: plan for plan in plans}).serve()


class Launcher(ChildServer):
    """Starts workers on request, and reaps them."""

    def __init__(self, channel: Channel, learner: int, context: Context, plans: Mapping[int, WorkerPlan]) -> None:
        super().__init__(channel, learner)
        self._context = context
        self._plans = plans

    def start(self, request: Start, fds: Sequence[OwnedFd]) -> int:
        if self._context is Context.SPAWN:
            return start_interpreter("stepmill.worker.main:main", fds[0].fileno(), self.learner, os.environ)
        return self.fork(lambda: self._run_worker(request.worker, fds[0].release()))

    def _run_worker(self, worker: int, fd: int) -> None:
        from stepmill.worker.main import run_worker  # imported here because a launcher that spawns does not need it

        run_worker(fd, self.learner, self._plans.get(worker))


# ---- the starter ------------------------------------------------------------------------------------------------------


def run_starter(fd: int, learner: int, preload: Sequence[str], idle_s: float) -> None:
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
