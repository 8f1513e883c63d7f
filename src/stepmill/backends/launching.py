"""The learner's hold on the launcher, the process that starts this pool's workers (see worker/launcher.py)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.backends.base import describe_exit, signal_name
from stepmill.backends.link import WorkerLink
from stepmill.spec.errors import LauncherDied
from stepmill.spec.options import Context
from stepmill.worker import launcher
from stepmill.worker.boot import Start, start_interpreter
from stepmill.worker.channel import NO_FD, Channel, ChannelClosed, wait_ready
from stepmill.worker.messages import (
    Exited,
    Launched,
    LaunchFailed,
    LaunchWorker,
    Quit,
    WorkerPlan,
    WorkerSettings,
    dump,
    load,
)
from stepmill.worker.settle import born_deaf, fork, worker_environ
from stepmill.worker.signals import defer_signals

# What a forked worker would otherwise load again and again. Names, since this room imports none of them.
_PRELOAD = ["numpy.random", "stepmill.worker.work", "stepmill.envs"]
# What to load as well if the learner has it loaded, because then the envs will need it.
_PRELOAD_IF_USED = {"gymnasium": ["gymnasium", "stepmill.envs.gymnasium", "stepmill.envs.gymnasium_registry"]}


class LauncherHandle:
    """Starts the launcher, tells it to start workers, hears how they end, ends it. `close` may come from any thread."""

    def __init__(self, settings: WorkerSettings, plans: Sequence[WorkerPlan]) -> None:
        """Starts it. In context "fork" this forks the calling process, so no thread of the pool may run yet.

        The caller defers signals, and closes what it has made.
        """
        self._links: dict[int, WorkerLink] = {}  # the newest of each worker
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._lock = threading.RLock()  # one thread at a time reads the channel; reentrant for signal handlers
        self._is_fork = settings.context is Context.FORK
        self.pid, self._pidfd = 0, OwnedFd()
        learner = OwnedFd.pidfd(os.getpid())
        self._channel, theirs = Channel.pair()
        with theirs, contextlib.closing(learner):
            try:
                if self._is_fork:
                    self.pid = self._fork(settings, plans, theirs, learner.fileno())
                else:
                    self._process = self._start_afresh(settings, theirs, learner.fileno())
                    self.pid = self._process.pid
                self._pidfd = OwnedFd.pidfd(self.pid)
            except BaseException:
                self._channel.close()
                if self.pid:
                    os.kill(self.pid, signal.SIGKILL)  # it is not reaped, so the number is still its own
                    self._reap()
                raise

    def _fork(self, settings: WorkerSettings, plans: Sequence[WorkerPlan], theirs: socket.socket, learner: int) -> int:
        inheritance = launcher.Inheritance(plans, _environ(settings), _preload())
        with born_deaf():
            pid = fork()
            if pid == 0:
                try:
                    self._channel.release()
                    launcher.main_forked(Channel(theirs, use_thread=False), learner, inheritance)
                finally:
                    os._exit(1)  # the learner's own code must never go on in here
        return pid

    def _start_afresh(self, settings: WorkerSettings, theirs: socket.socket, learner: int) -> subprocess.Popen[bytes]:
        preload = _preload() if settings.context is Context.FORKSERVER else []
        facts = {"context": settings.context.value, "learner": learner, "preload": preload}
        start = Start("stepmill.worker.launcher:main", facts, (learner,), _environ(settings))
        return start_interpreter(start, theirs.fileno())

    @property
    def fds(self) -> dict[int, int]:
        """What to poll for news of the launcher: descriptors and poll events."""
        return {self._channel.fd: select.POLLIN, self._pidfd.fileno(): select.POLLIN}

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._pidfd.fileno() == NO_FD

    @property
    def is_dead(self) -> bool:
        """Whether the launcher has ended."""
        return self.is_closed or bool(wait_ready({self._pidfd.fileno(): select.POLLIN}, 0.0))

    def launch(self, link: WorkerLink) -> None:
        """Asks for a process for this link; `pump` hears of it.

        Raises:
            LauncherDied: the launcher is gone.
        """
        self._links[link.plan.worker] = link
        try:
            with defer_signals(), link.peer as sock:
                self._channel.send(dump(LaunchWorker(link.plan.worker)), [sock.fileno()])
        except ChannelClosed as exc:
            raise self.death() from exc

    def pump(self) -> None:
        """Takes in what the launcher has sent: tells the links of processes that began, failed to, or ended."""
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            while (frame := self._channel.take()) is not None:
                self._receive(load(frame.data), frame.fds)

    def wait_exit(self, link: WorkerLink, timeout_s: float) -> int | None:
        """Returns how the process of a link that is dead has ended; waits a little for the launcher to know."""
        deadline = time.monotonic() + timeout_s
        self.pump()
        while link.exit_code is None and not self.is_dead and time.monotonic() < deadline:
            wait_ready(self.fds, deadline)
            self.pump()
        return link.exit_code

    def death(self) -> LauncherDied:
        """Returns the error for a launcher that has ended by itself."""
        code = self._reap()
        name = signal_name(code)
        hint = (
            "with context='fork' it cannot be replaced, and no worker can be started any more: make the pool anew"
            if self._is_fork
            else "stderr may say why; make the pool anew"
        )
        return LauncherDied(
            f"the process that starts workers {describe_exit(code)}; {hint}",
            exit_code=code if name is None else None,
            signal_name=name,
            is_final=self._is_fork,
        )

    def _receive(self, message: object, fds: tuple[OwnedFd, ...]) -> None:
        link = self._links.get(getattr(message, "worker", NO_FD))
        if link is None:
            return
        if isinstance(message, Launched) and fds:
            link.begin_life(message.pid, fds[0])
        elif isinstance(message, Launched):  # this process may open no more files
            link.refuse(os.strerror(errno.EMFILE))
        elif isinstance(message, LaunchFailed):
            link.refuse(message.reason)
        elif isinstance(message, Exited) and message.pid == link.pid:
            link.exit_code = message.code

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Ends the launcher, which kills what is left of its workers, and leaves no zombie. Idempotent."""
        with defer_signals(), self._lock:
            if not self.is_closed:
                self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.send(dump(Quit()))
        deadline = time.monotonic() + timeout_s
        while not self.is_dead and time.monotonic() < deadline:
            wait_ready({self._pidfd.fileno(): select.POLLIN}, deadline)
        if not self.is_dead:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)
        self._reap()
        self._pidfd.close()
        self._channel.close()

    def _reap(self) -> int | None:
        """Waits for the end of a launcher that is dead, or was killed, and returns its exit code."""
        if self._code is None and self._process is not None:
            self._code = self._process.wait()
        elif self._code is None and self.pid:
            with contextlib.suppress(ChildProcessError):  # somebody in this process waits for any child
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _preload() -> list[str]:
    if_used = (names for used, names in _PRELOAD_IF_USED.items() if used in sys.modules)
    return [*_PRELOAD, *(name for names in if_used for name in names)]


def _environ(settings: WorkerSettings) -> dict[str, str]:
    return worker_environ(os.environ, settings.worker_env, settings.worker_threads)
