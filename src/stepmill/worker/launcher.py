"""The small process that starts the workers of one pool, and tells the learner how they end.

    forkserver   a fresh interpreter that loads what every worker needs, then forks workers
    spawn        a fresh interpreter that starts each worker as one more fresh interpreter
    fork         a fork of the learner, made when the pool is made, before any thread of ours: workers are forks of that image

It is the parent of the workers, so the learner never forks later, when it may have threads and a GPU, and needs no signal
handler for its children. It runs one thread, sleeps in one poll, and ends when the learner closes its channel or is gone.
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
from stepmill.worker import settle
from stepmill.worker.boot import Start, start_interpreter
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.messages import Exited, Launched, LaunchFailed, LaunchWorker, Quit, WorkerPlan, dump, load

_REAP_S = 0.3  # how long a leaving launcher waits for workers it has killed
_EVENTS = select.POLLIN


@dataclass(frozen=True)
class _Child:
    worker: int
    pid: int
    pidfd: OwnedFd
    interpreter: subprocess.Popen[bytes] | None  # how it was started, if afresh

    def reap(self) -> int | None:
        """Returns the exit code of a child that has ended, or None if somebody else has reaped it."""
        if self.interpreter is not None:
            return self.interpreter.wait()
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None


def _own_child(worker: int, pid: int, interpreter: subprocess.Popen[bytes] | None) -> _Child:
    """Return a process that has just been started as a child; kill it if no descriptor of it can be opened."""
    try:
        return _Child(worker, pid, OwnedFd.pidfd(pid), interpreter)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # it is not reaped, so the number is still its own
        _Child(worker, pid, OwnedFd(), interpreter).reap()
        raise


def main(fd: int, facts: Mapping[str, object]) -> None:
    """Begins in a fresh interpreter. `fd` is the launcher's end of its channel."""
    settle.settle_signals()
    preload, learner = facts["preload"], facts["learner"]
    if not isinstance(preload, list) or not isinstance(learner, int):
        raise TypeError(f"these are not the facts a launcher needs: {facts}")
    _load(preload)
    gc.freeze()
    channel = Channel(socket.socket(fileno=fd), use_thread=False)
    _run_and_leave(Launcher(channel, learner, Context(facts["context"]), {}))


@dataclass(frozen=True)
class Inheritance:
    """What a launcher that is a fork of the learner finds in its memory."""

    plans: Sequence[WorkerPlan]
    environ: Mapping[str, str]
    preload: Sequence[str]


def main_forked(channel: Channel, learner: int, inheritance: Inheritance) -> None:
    """Begins in a fork of the learner. Never returns."""
    try:
        settle.settle_fork()
        settle.settle_signals()
        settle.settle_stdin()
        os.environ.update(inheritance.environ)
        _load(inheritance.preload)
        launcher = Launcher(channel, learner, Context.FORK, {plan.worker: plan for plan in inheritance.plans})
    except BaseException:
        traceback.print_exc()
        settle.leave(1)
    else:
        _run_and_leave(launcher)


def _load(names: Sequence[str]) -> None:
    """Loads once what each forked worker would load again."""
    for name in names:
        # What cannot be loaded here fails again in the worker that needs it, and is reported there.
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
        settle.leave(code)


class Launcher:
    """Starts workers when told to, and reaps them. Runs in a process of its own."""

    def __init__(self, channel: Channel, learner: int, context: Context, plans: Mapping[int, WorkerPlan]) -> None:
        self._channel = channel
        self._learner = learner
        self._context = context
        self._plans = plans
        self._children: dict[int, _Child] = {}  # by pidfd

    def run(self) -> None:
        """Serves until the learner says so or is gone; kills the workers that are left then."""
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
            return self._channel.fd not in ready or self._obey_all()
        except ChannelClosed:
            return False

    def _obey_all(self) -> bool:
        while (frame := self._channel.take()) is not None:
            order = load(frame.data)
            if isinstance(order, Quit):
                return False
            if not isinstance(order, LaunchWorker):
                raise TypeError(f"a launcher launches and quits, it cannot {type(order).__name__}")
            self._launch(order.worker, frame.fds)
        return True

    # ---- starting -------------------------------------------------------------------------------------------------

    def _launch(self, worker: int, fds: Sequence[OwnedFd]) -> None:
        """Start a worker. `fds` has the worker's end of its channel, or nothing if there was no room for it here."""
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            start = self._start_afresh if self._context is Context.SPAWN else self._fork
            child = start(worker, fds[0])
        except Exception as exc:  # no memory, too many processes, too many open files
            self._channel.send(dump(LaunchFailed(worker, f"{type(exc).__name__}: {exc}")))
            return
        # The descriptor is opened before the child is reaped, so it can never be another process of the same number.
        self._children[child.pidfd.fileno()] = child
        try:
            self._channel.send(dump(Launched(worker, child.pid)), [child.pidfd.fileno()])
        except OSError as exc:  # no descriptor is left for the duplicate
            self._end_child(child)
            self._channel.send(dump(LaunchFailed(worker, f"{type(exc).__name__}: {exc}")))

    def _start_afresh(self, worker: int, fd: OwnedFd) -> _Child:
        facts = {"learner": self._learner}
        start = Start("stepmill.worker.work:main", facts, (self._learner,), os.environ)
        process = start_interpreter(start, fd.fileno())
        return _own_child(worker, process.pid, process)

    def _fork(self, worker: int, fd: OwnedFd) -> _Child:
        pid = settle.fork()
        if pid == 0:
            self._become_worker(worker, fd)
        return _own_child(worker, pid, None)

    def _become_worker(self, worker: int, fd: OwnedFd) -> None:
        try:
            from stepmill.worker import work  # not before a fork: a launcher that spawns needs none of it

            self._channel.release()
            for child in self._children.values():
                child.pidfd.close()
            settle.settle_faults()
            work.live(Channel(socket.socket(fileno=fd.release())), self._learner, self._plans.get(worker))
        except BaseException:
            traceback.print_exc()
        finally:
            settle.leave(1)

    # ---- ending ---------------------------------------------------------------------------------------------------

    def _end_child(self, child: _Child) -> None:
        """Kill a worker that the learner has not heard of."""
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
