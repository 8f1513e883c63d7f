"""Starts the starter of this program, and asks it for launchers. The code of the starter is in `worker/launcher.py`.

A starter has the state that this program had when the starter was made: environment variables, directories, sys.path,
limits, rights, cores and so on. It serves another pool only if a new starter would have the same state. Otherwise a new
starter replaces it, and the old one ends with its last launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from stepmill._native import OwnedFd
from stepmill.backends.process_link import ProcessLink, ServerLink
from stepmill.spec.choices import Context
from stepmill.spec.closing import close_on_error
from stepmill.worker.channel import NO_FD, ChannelClosed, deadline_after
from stepmill.worker.fresh_interpreter import interpreter_flags, start_interpreter
from stepmill.worker.messages import LauncherSetup
from stepmill.worker.process_setup import worker_environ
from stepmill.worker.signals import allow_signals, defer_signals

T = TypeVar("T")

# Modules that the starter imports once for all forked workers. They are named, because this package does not import them.
_PRELOAD = ["numpy.random", "stepmill.worker.main", "stepmill.envs"]
# Further modules to import if the learner has imported a library, because its envs then need them.
_PRELOAD_IF_USED = {
    "gymnasium": ["gymnasium", "stepmill.envs.gymnasium", "stepmill.envs.gymnasium_registry"],
    "stepmill.aio": ["stepmill.worker.coroutine_server"],
}

IDLE_S = 10.0  # how long a starter without launchers waits for the next pool
_CLOSE_S = 0.3
_OUTPUT = (1, 2)
# A variable that pytest changes in each test. A launcher gets the new value. No library reads the variable at its import.
_VOLATILE = {"PYTEST_CURRENT_TEST"}
_NAMESPACES = "/proc/thread-self/ns"
_STATUS = (b"Umask", b"Uid", b"Gid", b"Groups", b"SigIgn", b"Cap", b"NoNewPrivs", b"Seccomp", b"Cpus_", b"Mems_")


@dataclass(frozen=True)
class ProgramInputs:
    """The state of this process and thread that a new process inherits. Two equal objects mean equal new processes.

    Attributes:
        environ: the environment variables for the new process.
        interpreter: the executable, its flags, sys.path and sys.argv.
        stdio: which of the descriptors 1 and 2 are open, and whether each is a terminal.
        system: the state that the operating system passes to a child.
    """

    environ: Mapping[str, str] = field(repr=False)
    interpreter: tuple[str, ...]
    stdio: tuple[tuple[int, bool], ...]
    system: tuple[object, ...]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ProgramInputs:
        words = [sys.executable, *interpreter_flags(), *sys.path, *getattr(sys, "argv", [])]
        lasting = {name: value for name, value in environ.items() if name not in _VOLATILE}
        stdio = tuple((number, os.isatty(number)) for number in filter(_is_open, _OUTPUT))
        return cls(lasting, tuple(map(str, words)), stdio, _read_system())


def _is_open(number: int) -> bool:
    return _unless_refused(lambda: os.fstat(number)) is not None


def _read_system() -> tuple[object, ...]:
    status = [line for line in _read_file("/proc/thread-self/status").splitlines() if line.startswith(_STATUS)]
    files = [_read_file(f"/proc/self/{name}") for name in ("limits", "cgroup", "oom_score_adj", "timerslack_ns")]
    # While a starter exists, its directories keep their inode numbers, even if they are removed.
    places = _unless_refused(lambda: os.stat(".")[1:3]), _unless_refused(lambda: os.stat("/")[1:3])
    spaces = _unless_refused(lambda: [os.readlink(f"{_NAMESPACES}/{name}") for name in sorted(os.listdir(_NAMESPACES))])
    ids = os.getpgid(0), os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return *status, *files, *places, spaces, *ids


def _read_file(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _unless_refused(read: Callable[[], T]) -> T | None:
    """Return what `read` returns, or None if the system refuses it."""
    with contextlib.suppress(OSError):
        return read()
    return None


class StarterClient(ServerLink):
    """One starter process. Any thread may use this object."""

    def __init__(self, inputs: ProgramInputs, preload: Sequence[str]) -> None:
        """Start the process, and return before it is ready. The caller defers signals."""
        super().__init__()
        self.inputs = inputs
        self.is_retired = False
        # If this fails, a process that has been started finds that its channel is closed.
        with close_on_error(self.close), self.peer, contextlib.closing(OwnedFd.pidfd(os.getpid())) as learner:
            entry, fds = "stepmill.worker.launcher:run_starter", (self.peer.fileno(), learner.fileno())
            self.set_process(start_interpreter(entry, *fds, inputs.environ, preload=list(preload), idle_s=IDLE_S))

    def start_launcher(self, launcher: ProcessLink, setup: LauncherSetup, deadline: float) -> None:
        """Start a launcher, and wait until it runs. The caller defers signals.

        Raises:
            ChannelClosed: the starter ended before it had started the launcher.
            TimeoutError: the starter did not answer in time.
            OSError: the system refuses another process or descriptor.
        """
        number = self.request(launcher, setup.stdio, setup=setup)
        with close_on_error(lambda: self.drop(number)):
            with allow_signals():
                self.wait_until(lambda: launcher.pidfd != NO_FD or launcher.launch_failure is not None, deadline)
            if launcher.launch_failure is not None:
                raise OSError(errno.EAGAIN, f"no process can be started: {launcher.launch_failure}")
            if launcher.pidfd == NO_FD:
                raise ChannelClosed if self.is_dead else TimeoutError

    def drop(self, number: int) -> None:
        with self._lock:
            super().drop(number)
            self._end_if_unused()

    def retire(self) -> None:
        """Start no more launchers, and end the starter with the last one."""
        with self._lock:
            self.is_retired = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.is_retired and not self._children:
            self.end(_CLOSE_S)

    def forget(self) -> None:
        """Close the descriptors. A forked child of the learner calls this, because the starter is not its own."""
        self.channel.close_local_copy()
        self._process.close()
        self.pidfd, self._unreaped = NO_FD, 0


class Starters:
    """The starters of this program. At most one is not retired. Any thread may use this object."""

    def __init__(self) -> None:
        self.current: StarterClient | None = None
        self._retired: weakref.WeakSet[StarterClient] = weakref.WeakSet()  # their launchers keep them alive
        self._lock = threading.RLock()

    def prepare(self, setup: LauncherSetup) -> tuple[StarterClient, bool]:
        """Return a starter for launchers with this setup, and whether the starter is new."""
        with defer_signals(), self._lock:
            inputs = ProgramInputs.read(setup.environ)
            if self.current is not None and not self.current.is_dead and self.current.inputs == inputs:
                return self.current, False
            self.close()
            self.current = StarterClient(inputs, setup.preload)
            if multiprocessing.parent_process() is not None:  # its forked children run no exit functions
                multiprocessing.util.Finalize(None, self.close, exitpriority=0)
            return self.current, True

    def start_launcher(self, launcher: ProcessLink, setup: LauncherSetup, timeout_s: float | None) -> None:
        """Start a launcher. The caller defers signals.

        Raises:
            LauncherDied: the starter ended before it had started the launcher, and so did the next starter.
            TimeoutError: the starter did not answer in time, and was killed.
            OSError: the system refuses another process or descriptor.
        """
        deadline = deadline_after(timeout_s)
        while True:
            starter, is_new = self.prepare(setup)
            try:
                return starter.start_launcher(launcher, setup, deadline)
            except TimeoutError:
                starter.kill()
                raise
            except ChannelClosed as exc:
                if is_new and not starter.is_retired:  # another thread may have retired it
                    raise starter.died_error("launchers", "stderr may say why; make a new pool") from exc
                self._replace(starter)
                launcher.renew_channel()  # the starter may have started a launcher on the old channel before it ended

    def _replace(self, starter: StarterClient) -> None:
        """Let the next pool start a new starter, unless another thread has done so."""
        with self._lock:
            if self.current is starter:
                self.close()

    def close(self) -> None:
        """End the starter, or, if it has launchers, let it end with the last of them."""
        with defer_signals(), self._lock:
            starter, self.current = self.current, None
            if starter is not None:
                self._retired.add(starter)
                starter.retire()

    def forget(self) -> None:
        """Stop using the starters of the process from which this process was forked."""
        for starter in (*self._retired, *([] if self.current is None else [self.current])):
            starter.forget()
        self.current, self._retired = None, weakref.WeakSet()
        self._lock = threading.RLock()  # a thread that does not exist in this process may hold the old lock


STARTERS = Starters()
atexit.register(STARTERS.close)
os.register_at_fork(after_in_child=STARTERS.forget)


def prepare_starter(context: Context, worker_env: Mapping[str, str], worker_threads: int | None) -> None:
    """Start the starter, unless it runs or is not needed. This returns at once, while the starter imports its modules.

    The arguments are options of the pool. `worker_env` is empty if it differs between workers.
    """
    if context is not Context.FORK:
        with defer_signals():
            STARTERS.prepare(launcher_setup(context, worker_env, worker_threads))


def launcher_setup(context: Context, worker_env: Mapping[str, str], worker_threads: int | None) -> LauncherSetup:
    """Return how to start the launcher of a pool with these options."""
    if_used = (names for used, names in _PRELOAD_IF_USED.items() if used in sys.modules)
    preload = [] if context is Context.SPAWN else [*_PRELOAD, *(name for names in if_used for name in names)]
    environ = worker_environ(os.environ, worker_env, worker_threads)
    return LauncherSetup(context, environ, preload, tuple(filter(_is_open, _OUTPUT)))
