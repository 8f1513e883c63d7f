"""The launcher, the process that starts the workers of one pool and reports to the learner how they end.

    forkserver   a fork of the starter, which has imported what every worker needs; workers are forks of it
    spawn        a fork of the starter; it starts each worker as a fresh interpreter
    fork         a fork of the learner, made at the start of the pool before stepmill has threads; workers are forks of it

The launcher is the parent of the workers. Therefore the learner need not fork later, when it may have threads and use a
GPU, and it needs no signal handler for child processes.

The starter shares `ChildServer`. Both processes have one thread, which waits in one poll for requests and for the ends of
children. They end when the learner closes the channel or is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Generic, TypeVar

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.spec.choices import Context
from stepmill.worker import process_setup
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.fresh_interpreter import InterpreterStart, start_interpreter
from stepmill.worker.messages import (
    Exited,
    Launched,
    LaunchFailed,
    LaunchWorker,
    Quit,
    StartLauncher,
    WorkerPlan,
    dump,
    load,
)

_REAP_S = 0.3  # how long the process waits at its end for children that it has killed
_EVENTS = select.POLLIN

RequestT = TypeVar("RequestT", LaunchWorker, StartLauncher)


@dataclass(frozen=True)
class Child:
    """A process that was started, and has not been reaped yet."""

    number: int
    pid: int
    pidfd: OwnedFd
    interpreter: subprocess.Popen[bytes] | None  # None if the child is a fork

    @classmethod
    def watch(cls, number: int, pid: int, interpreter: subprocess.Popen[bytes] | None = None) -> Child:
        """Return the child for a new process. If its pidfd cannot be opened, kill the process and raise the error."""
        try:
            return cls(number, pid, OwnedFd.pidfd(pid), interpreter)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # the process is not reaped yet, so no other process has this pid
            cls(number, pid, OwnedFd(), interpreter).reap()
            raise

    def reap(self) -> int | None:
        """Wait for the end of the child. Return its exit code, or None if other code in this process has reaped it."""
        if self.interpreter is not None:
            return self.interpreter.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None


def load_modules(names: Sequence[str]) -> None:
    """Import modules once, so that forked processes need not import them."""
    for name in names:
        # A module that cannot be imported here fails again in the worker that needs it, which reports the error.
        with contextlib.suppress(Exception):
            import_module(name)


class ChildServer(Generic[RequestT]):
    """Starts one process for each request, and reaps it. Subclasses define how a process is started."""

    def __init__(self, channel: Channel, learner: int, request: type[RequestT], *, idle_s: float | None = None) -> None:
        """`learner` is the pidfd of the learner. Without children, the process ends after `idle_s` seconds."""
        self._channel = channel
        self._learner = learner
        self._request: type[RequestT] = request
        self._idle_s = idle_s
        self._children: dict[int, Child] = {}  # by pidfd

    def start(self, request: RequestT, fds: Sequence[OwnedFd]) -> Child:
        """Start a process. `fds` came with the request."""
        raise NotImplementedError

    def run_and_leave(self) -> None:
        """Serve until the learner sends Quit or is gone, then kill the remaining children and end this process."""
        code = 1
        try:
            while self._run_once():
                pass
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            self._kill_all()
            process_setup.exit_process(code)

    def close_in_fork(self) -> None:
        """Close the descriptors of this object in a fork of its process."""
        self._channel.close_local_copy()
        for child in self._children.values():
            child.pidfd.close()

    def _run_once(self) -> bool:
        poller = select.poll()
        poller.register(self._channel.fd, _EVENTS | (select.POLLOUT if self._channel.has_backlog else 0))
        poller.register(self._learner, _EVENTS)
        for pidfd in self._children:
            poller.register(pidfd, _EVENTS)
        is_idle = self._idle_s is not None and not self._children
        ready = {fd for fd, _ in poller.poll(self._idle_s * 1000 if self._idle_s is not None and is_idle else None)}
        if self._learner in ready or (is_idle and not ready):
            return False
        try:
            for pidfd in ready & self._children.keys():
                self._reap(self._children.pop(pidfd))
            self._channel.push()
            return self._channel.fd not in ready or self._apply_messages()
        except ChannelClosed:
            return False

    def _apply_messages(self) -> bool:
        while (frame := self._channel.poll_frame()) is not None:
            message = load(frame.data)
            if isinstance(message, Quit):
                return False
            if not isinstance(message, self._request):
                raise TypeError(
                    f"got a {type(message).__name__}; this process accepts {self._request.__name__} and Quit"
                )
            self._launch(message, frame.fds)
        return True

    def _launch(self, request: RequestT, fds: Sequence[OwnedFd]) -> None:
        """Start a process, and report this. `fds` is empty if this process may open no more files."""
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            child = self.start(request, fds)
        except Exception as exc:  # no memory, too many processes, too many open files
            self._channel.send(dump(LaunchFailed(request.number, f"{type(exc).__name__}: {exc}")))
            return
        # The pidfd is opened before the child is reaped, so it cannot refer to a later process with the same pid.
        self._children[child.pidfd.fileno()] = child
        try:
            self._channel.send(dump(Launched(request.number, child.pid)), [child.pidfd.fileno()])
        except OSError as exc:  # no descriptor is left for the duplicate
            self._end_child(child)
            self._channel.send(dump(LaunchFailed(request.number, f"{type(exc).__name__}: {exc}")))

    # ---- ending ---------------------------------------------------------------------------------------------------

    def _end_child(self, child: Child) -> None:
        """Kill a child that was not reported to the learner."""
        del self._children[child.pidfd.fileno()]
        with contextlib.suppress(ProcessLookupError):
            _native.pidfd_send_signal(child.pidfd.fileno(), signal.SIGKILL)
        child.reap()
        child.pidfd.close()

    def _reap(self, child: Child) -> None:
        code = child.reap()
        child.pidfd.close()
        if code is not None:
            self._channel.send(dump(Exited(child.number, child.pid, code)))

    def _kill_all(self) -> None:
        for pidfd in self._children:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(pidfd, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        while self._children and time.monotonic() < deadline:
            poller = select.poll()
            for pidfd in self._children:
                poller.register(pidfd, _EVENTS)
            for pidfd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._children.pop(pidfd).reap()


def main_forked(channel: Channel, learner: int, plans: Sequence[WorkerPlan], environ: Mapping[str, str]) -> None:
    """Run a launcher in a fork of the learner, from which it has inherited the plans. This does not return."""
    try:
        process_setup.remove_parent_cleanup()
        process_setup.reset_signal_handlers()
        process_setup.detach_stdin()
        os.environ.update(environ)
        launcher = Launcher(channel, learner, Context.FORK, {plan.worker: plan for plan in plans})
    except BaseException:
        traceback.print_exc()
        process_setup.exit_process(1)
    else:
        launcher.run_and_leave()


class Launcher(ChildServer[LaunchWorker]):
    """Starts workers on request, and reaps them."""

    def __init__(self, channel: Channel, learner: int, context: Context, plans: Mapping[int, WorkerPlan]) -> None:
        super().__init__(channel, learner, LaunchWorker)
        self._context = context
        self._plans = plans

    def start(self, request: LaunchWorker, fds: Sequence[OwnedFd]) -> Child:
        if self._context is Context.SPAWN:
            arguments = {"learner": self._learner}
            start = InterpreterStart("stepmill.worker.main:main", arguments, (self._learner,), os.environ)
            process = start_interpreter(start, fds[0].fileno())
            return Child.watch(request.number, process.pid, process)
        pid = process_setup.fork()
        if pid == 0:
            self._run_as_worker(request.number, fds[0])
        return Child.watch(request.number, pid)

    def _run_as_worker(self, worker: int, fd: OwnedFd) -> None:
        try:
            from stepmill.worker.main import run_worker  # imported here because a launcher that spawns does not need it

            self.close_in_fork()
            process_setup.enable_crash_traceback()
            run_worker(Channel(socket.socket(fileno=fd.release())), self._learner, self._plans.get(worker))
        except BaseException:
            traceback.print_exc()
        finally:
            process_setup.exit_process(1)
