"""The launcher: the process that starts the workers of one pool, and reports to the learner how they end.

    forkserver   a fresh interpreter that imports what every worker needs, and then forks workers
    spawn        a fresh interpreter that starts each worker as another fresh interpreter
    fork         a fork of the learner, made at the start of the pool before stepmill has threads; workers are forks of it

The launcher is the parent of the workers. So the learner need not fork later, when it may have threads and a GPU, and needs
no signal handler for child processes. The launcher has one thread, which waits in one poll; it ends when the learner closes
the channel or is gone.
"""

from __future__ import annotations

import contextlib
import errno
import gc
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

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.spec.options import Context
from stepmill.worker import process_setup
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.fresh_interpreter import InterpreterStart, start_interpreter
from stepmill.worker.messages import Exited, Launched, LaunchFailed, LaunchWorker, Quit, WorkerPlan, dump, load

_REAP_S = 0.3  # how long the launcher waits at its end for workers that it has killed
_EVENTS = select.POLLIN


@dataclass(frozen=True)
class _Child:
    worker: int
    pid: int
    pidfd: OwnedFd
    interpreter: subprocess.Popen[bytes] | None  # None if the child is a fork

    def reap(self) -> int | None:
        """Wait for the end of the child; return its exit code, or None if other code in this process has reaped it."""
        if self.interpreter is not None:
            return self.interpreter.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None


def _make_child(worker: int, pid: int, interpreter: subprocess.Popen[bytes] | None) -> _Child:
    """Return the child for a process that was just started. If its pidfd cannot be opened, kill the process and raise."""
    try:
        return _Child(worker, pid, OwnedFd.pidfd(pid), interpreter)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # the process is not reaped yet, so no other process has this pid
        _Child(worker, pid, OwnedFd(), interpreter).reap()
        raise


def main(fd: int, arguments: Mapping[str, object]) -> None:
    """Run a launcher in a fresh interpreter. `fd` is the socket of its channel."""
    process_setup.reset_signal_handlers()
    preload, learner = arguments["preload"], arguments["learner"]
    if not isinstance(preload, list) or not isinstance(learner, int):
        raise TypeError(f"the launcher got wrong arguments: {arguments}")
    _load(preload)
    gc.freeze()
    channel = Channel(socket.socket(fileno=fd), use_thread=False)
    _run_and_leave(Launcher(channel, learner, Context(arguments["context"]), {}))


@dataclass(frozen=True)
class InheritedState:
    """What a launcher that is a fork of the learner inherits in memory."""

    plans: Sequence[WorkerPlan]
    environ: Mapping[str, str]
    preload: Sequence[str]


def main_forked(channel: Channel, learner: int, inheritance: InheritedState) -> None:
    """Run a launcher in a fork of the learner. Never returns."""
    try:
        process_setup.remove_parent_cleanup()
        process_setup.reset_signal_handlers()
        process_setup.detach_stdin()
        os.environ.update(inheritance.environ)
        _load(inheritance.preload)
        launcher = Launcher(channel, learner, Context.FORK, {plan.worker: plan for plan in inheritance.plans})
    except BaseException:
        traceback.print_exc()
        process_setup.exit_process(1)
    else:
        _run_and_leave(launcher)


def _load(names: Sequence[str]) -> None:
    """Import modules once in the launcher, so that forked workers need not import them."""
    for name in names:
        # A module that cannot be imported here fails again in the worker that needs it, which reports the error.
        with contextlib.suppress(Exception):
            import_module(name)


def _run_and_leave(launcher: Launcher) -> None:
    code = 1
    try:
        launcher.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        process_setup.exit_process(code)


class Launcher:
    """Starts workers on request, and reaps them."""

    def __init__(self, channel: Channel, learner: int, context: Context, plans: Mapping[int, WorkerPlan]) -> None:
        self._channel = channel
        self._learner = learner
        self._context = context
        self._plans = plans
        self._children: dict[int, _Child] = {}  # by pidfd

    def run(self) -> None:
        """Serve until the learner sends Quit or is gone, then kill the remaining workers."""
        try:
            while self._run_once():
                pass
        finally:
            self._kill_all()

    def _run_once(self) -> bool:
        poller = select.poll()
        poller.register(self._channel.fd, _EVENTS | (select.POLLOUT if self._channel.has_backlog else 0))
        poller.register(self._learner, _EVENTS)
        for pidfd in self._children:
            poller.register(pidfd, _EVENTS)
        ready = {fd for fd, _ in poller.poll()}
        if self._learner in ready:
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
            if not isinstance(message, LaunchWorker):
                raise TypeError(f"the launcher got a {type(message).__name__}; it accepts LaunchWorker and Quit")
            self._launch(message.worker, frame.fds)
        return True

    # ---- starting -------------------------------------------------------------------------------------------------

    def _launch(self, worker: int, fds: Sequence[OwnedFd]) -> None:
        """Start a worker. `fds` has the socket of its channel, or is empty if this process may open no more files."""
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            start = self._start_fresh if self._context is Context.SPAWN else self._fork
            child = start(worker, fds[0])
        except Exception as exc:  # no memory, too many processes, too many open files
            self._channel.send(dump(LaunchFailed(worker, f"{type(exc).__name__}: {exc}")))
            return
        # The pidfd is opened before the child is reaped, so it cannot refer to a later process with the same pid.
        self._children[child.pidfd.fileno()] = child
        try:
            self._channel.send(dump(Launched(worker, child.pid)), [child.pidfd.fileno()])
        except OSError as exc:  # no descriptor is left for the duplicate
            self._end_child(child)
            self._channel.send(dump(LaunchFailed(worker, f"{type(exc).__name__}: {exc}")))

    def _start_fresh(self, worker: int, fd: OwnedFd) -> _Child:
        arguments = {"learner": self._learner}
        start = InterpreterStart("stepmill.worker.main:main", arguments, (self._learner,), os.environ)
        process = start_interpreter(start, fd.fileno())
        return _make_child(worker, process.pid, process)

    def _fork(self, worker: int, fd: OwnedFd) -> _Child:
        pid = process_setup.fork()
        if pid == 0:
            self._run_as_worker(worker, fd)
        return _make_child(worker, pid, None)

    def _run_as_worker(self, worker: int, fd: OwnedFd) -> None:
        try:
            from stepmill.worker.main import run_worker  # imported here because a launcher that spawns does not need it

            self._channel.close_local_copy()
            for child in self._children.values():
                child.pidfd.close()
            process_setup.enable_crash_traceback()
            run_worker(Channel(socket.socket(fileno=fd.release())), self._learner, self._plans.get(worker))
        except BaseException:
            traceback.print_exc()
        finally:
            process_setup.exit_process(1)

    # ---- ending ---------------------------------------------------------------------------------------------------

    def _end_child(self, child: _Child) -> None:
        """Kill a worker that was not reported to the learner."""
        del self._children[child.pidfd.fileno()]
        with contextlib.suppress(ProcessLookupError):
            _native.pidfd_send_signal(child.pidfd.fileno(), signal.SIGKILL)
        child.reap()
        child.pidfd.close()

    def _reap(self, child: _Child) -> None:
        code = child.reap()
        child.pidfd.close()
        if code is not None:
            self._channel.send(dump(Exited(child.worker, child.pid, code)))

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
