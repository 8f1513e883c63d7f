"""The learner's hold on the launcher, the process that starts this pool's workers (see worker/launcher.py)."""

from __future__ import annotations

import contextlib
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
from stepmill.backends.link import WorkerLink
from stepmill.spec.errors import EngineBug
from stepmill.spec.options import Context
from stepmill.worker import launcher
from stepmill.worker.boot import Start, start_interpreter
from stepmill.worker.channel import NO_FD, Channel, ChannelClosed, close_fds, wait_ready
from stepmill.worker.messages import (
    Exited,
    Failed,
    Launched,
    LaunchFailed,
    LaunchWorker,
    Quit,
    WorkerPlan,
    WorkerSettings,
    dump,
    load,
)
from stepmill.worker.settle import born_deaf, fork, uninterrupted, worker_environ

# What a forked worker would otherwise load again and again. Names, since this room imports none of them.
_PRELOAD = ["numpy.random", "stepmill.worker.work", "stepmill.envs"]
# What to load as well if the learner has it loaded, because then the envs will need it.
_PRELOAD_IF_USED = {"gymnasium": ["gymnasium", "stepmill.envs.gymnasium"]}


class LauncherHandle:
    """Starts the launcher, tells it to start workers, hears how they end, ends it. `close` may come from any thread."""

    def __init__(self, settings: WorkerSettings, plans: Sequence[WorkerPlan]) -> None:
        """Starts it. In context "fork" this forks the calling process, so no thread of the pool may run yet."""
        self._links: dict[int, WorkerLink] = {}  # the newest of each worker
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._lock = threading.RLock()  # one thread at a time reads the channel; reentrant for signal handlers
        self._channel, theirs = Channel.pair()
        learner = _native.pidfd_open(os.getpid())
        self.pid, self._pidfd = 0, NO_FD
        try:
            with theirs:
                if settings.context is Context.FORK:
                    self.pid = self._fork(settings, plans, theirs, learner)
                else:
                    self._process = self._start_afresh(settings, theirs, learner)
                    self.pid = self._process.pid
            self._pidfd = _native.pidfd_open(self.pid)
        except BaseException:
            self._channel.close()
            raise
        finally:
            os.close(learner)

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
        return start_interpreter(Start("stepmill.worker.launcher:main", facts, (learner,), _environ(settings)), theirs)

    @property
    def fds(self) -> dict[int, int]:
        """What to poll for news of the launcher: descriptors and poll events."""
        return {self._channel.fd: select.POLLIN, self._pidfd: select.POLLIN}

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._pidfd == NO_FD

    @property
    def is_dead(self) -> bool:
        """Whether the launcher has ended."""
        return self._pidfd == NO_FD or bool(wait_ready({self._pidfd: select.POLLIN}, 0.0))

    def launch(self, link: WorkerLink) -> None:
        """Asks for a process for this link; `pump` hears of it.

        Raises:
            EngineBug: the launcher is gone.
        """
        self._links[link.plan.worker] = link
        try:
            with link.peer as sock, uninterrupted():
                self._channel.send(dump(LaunchWorker(link.plan.worker)), [sock.fileno()])
        except ChannelClosed as exc:
            raise self.gone() from exc

    def pump(self) -> None:
        """Takes in what the launcher has sent: tells the links of processes that began, failed to, or ended."""
        with self._lock, contextlib.suppress(ChannelClosed), uninterrupted():
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

    def gone(self) -> EngineBug:
        """Returns the error for a launcher that has ended by itself."""
        code = self._reap()
        how = "" if code is None else f" with exit code {code}"
        return EngineBug(
            f"the process that starts workers has ended{how}; stderr may say why; "
            "if something killed it, make the pool anew, else please report this"
        )

    def _receive(self, message: object, fds: tuple[int, ...]) -> None:
        link = self._links.get(getattr(message, "worker", NO_FD))
        if link is None:
            close_fds(fds)
        elif isinstance(message, Launched):
            link.pid, link.pidfd = message.pid, fds[0]
        elif isinstance(message, LaunchFailed):
            record = {"phase": "launch", "type": "OSError", "message": message.reason, "traceback": ""}
            link.answer, link.is_void = Failed(((None, record),)), True
        elif isinstance(message, Exited) and message.pid == link.pid:
            link.exit_code = message.code

    # ---- the end --------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Ends the launcher, which kills what is left of its workers, and leaves no zombie. Idempotent."""
        with self._lock:
            if self._pidfd != NO_FD:
                self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        with contextlib.suppress(ChannelClosed):
            self._channel.send(dump(Quit()))
        deadline = time.monotonic() + timeout_s
        while not self.is_dead and time.monotonic() < deadline:
            wait_ready({self._pidfd: select.POLLIN}, deadline)
        if not self.is_dead:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._reap()
        os.close(self._pidfd)
        self._pidfd = NO_FD
        self._channel.close()

    def _reap(self) -> int | None:
        """Waits for the end of a launcher that is dead, or was killed, and returns its exit code."""
        if self._code is None and self._process is not None:
            self._code = self._process.wait()
        elif self._code is None and self._pidfd != NO_FD:
            with contextlib.suppress(ChildProcessError):  # somebody in this process waits for any child
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _preload() -> list[str]:
    if_used = (names for used, names in _PRELOAD_IF_USED.items() if used in sys.modules)
    return [*_PRELOAD, *(name for names in if_used for name in names)]


def _environ(settings: WorkerSettings) -> dict[str, str]:
    return worker_environ(os.environ, settings.worker_env, settings.worker_threads)
