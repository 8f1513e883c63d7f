"""Starts the starter of this program, and asks it for launchers. The code of the starter is in `worker/starter.py`.

A starter has the state that this program had when the starter was made: environment variables, directories, sys.path,
limits, rights, cores and so on. It serves another pool only if a new starter would have the same state. Otherwise a new
starter replaces it, and the old one ends with its last launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import multiprocessing.util
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from stepmill._native import OwnedFd
from stepmill.backends.process_link import ProcessLink, ServerLink
from stepmill.spec.choices import Context
from stepmill.spec.closing import close_on_error
from stepmill.spec.errors import LauncherDied, describe_exit
from stepmill.worker.channel import NO_FD, ChannelClosed, deadline_after
from stepmill.worker.fresh_interpreter import InterpreterStart, interpreter_flags, start_interpreter
from stepmill.worker.messages import StartLauncher
from stepmill.worker.process_setup import worker_environ
from stepmill.worker.signals import allow_signals, defer_signals

# Modules that the starter imports once for all forked workers. They are named, because this package does not import them.
_PRELOAD = ["numpy.random", "stepmill.worker.main", "stepmill.envs"]
# Further modules to import if the learner has imported a library, because its envs then need them.
_PRELOAD_IF_USED = {
    "gymnasium": ["gymnasium", "stepmill.envs.gymnasium", "stepmill.envs.gymnasium_registry"],
    "stepmill.aio": ["stepmill.worker.coroutine_server"],
}

IDLE_S = 10.0  # how long a starter without launchers waits for the next pool
_CLOSE_S = 0.3
_EXIT_CODE_S = 0.2  # how long the starter may take to report the exit code of a launcher
# A variable that pytest changes in each test. A launcher gets the new value. No library reads the variable at its import.
_VOLATILE = {"PYTEST_CURRENT_TEST"}
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
        stdio = tuple((number, os.isatty(number)) for number in (1, 2) if _is_open(number))
        return cls(lasting, tuple(map(str, words)), stdio, _read_system())


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _read_system() -> tuple[object, ...]:
    status = [line for line in _read_file("/proc/thread-self/status").splitlines() if line.startswith(_STATUS)]
    files = [_read_file(f"/proc/self/{name}") for name in ("limits", "cgroup", "oom_score_adj", "timerslack_ns")]
    scheduling = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    # While a starter exists, its directories keep their inode numbers, even if they are removed.
    return *status, *files, _identity("."), _identity("/"), _read_namespaces(), os.getpgid(0), os.getsid(0), *scheduling


def _read_file(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _identity(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


def _read_namespaces() -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(os.readlink(f"/proc/thread-self/ns/{name}") for name in sorted(os.listdir("/proc/thread-self/ns")))
    return ()


class StarterClient(ServerLink):
    """One starter process. Any thread may use this object."""

    def __init__(self, inputs: ProgramInputs, preload: Sequence[str]) -> None:
        """Start the process, and return before it is ready. The caller defers signals."""
        super().__init__()
        self.inputs = inputs
        self.is_retired = False
        self._numbers = itertools.count()
        with close_on_error(self.close):  # this ends a process that has been started
            self._interpreter = self._start_interpreter(preload)
            self.set_process(self._interpreter.pid, OwnedFd.pidfd(self._interpreter.pid))

    def _start_interpreter(self, preload: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.peer, contextlib.closing(OwnedFd.pidfd(os.getpid())) as learner:
            arguments = {"learner": learner.fileno(), "preload": list(preload), "idle_s": IDLE_S}
            entry = "stepmill.worker.starter:main"
            start = InterpreterStart(entry, arguments, (learner.fileno(),), self.inputs.environ)
            return start_interpreter(start, self.peer.fileno())

    def start_launcher(self, launcher: ProcessLink, request: StartLauncher, deadline: float) -> int:
        """Start a launcher, wait until it runs, and return its number. The caller defers signals.

        Raises:
            ChannelClosed: the starter ended before it had started the launcher.
            TimeoutError: the starter did not answer in time.
            OSError: the system refuses another process or descriptor.
        """
        number = next(self._numbers)
        stdio = tuple(fd for fd, _ in self.inputs.stdio)
        with close_on_error(lambda: self._drop(number)):
            self.request(request._replace(number=number, stdio=stdio), launcher, stdio)
            with allow_signals():
                self.wait_report(lambda: launcher.pidfd != NO_FD or launcher.launch_failure is not None, deadline)
            if launcher.launch_failure is not None:
                raise OSError(errno.EAGAIN, f"no process can be started: {launcher.launch_failure}")
            if launcher.pidfd == NO_FD:
                raise ChannelClosed if self.is_dead else TimeoutError
        return number

    def release(self, number: int) -> int | None:
        """Return the exit code of a launcher that has ended, or None if it is not known, and forget the launcher."""
        with defer_signals():
            code = self.wait_exit(self._children[number], _EXIT_CODE_S)
            self._drop(number)
        return code

    def _drop(self, number: int) -> None:
        with self._lock:
            self._children.pop(number, None)
            self._end_if_unused()

    # ---- the end --------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Start no more launchers, and end the starter with the last one."""
        with self._lock:
            self.is_retired = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.is_retired and not self._children:
            self.end(_CLOSE_S)

    def reap(self) -> None:
        self.exit_code = self._interpreter.wait()

    def forget(self) -> None:
        """Close the descriptors. A forked child of the learner calls this, because the starter is not its own."""
        self.channel.close_local_copy()
        self._process.close()
        self._interpreter.returncode = 0  # the starter is not a child of this process, which cannot wait for it


class Starters:
    """The starters of this program. At most one is not retired. Any thread may use this object."""

    def __init__(self) -> None:
        self.current: StarterClient | None = None
        self._retired: weakref.WeakSet[StarterClient] = weakref.WeakSet()  # their launchers keep them alive
        self._lock = threading.RLock()

    def prepare(self, environ: Mapping[str, str], preload: Sequence[str]) -> tuple[StarterClient, bool]:
        """Return a starter for launchers with these environment variables, and whether the starter is new."""
        with defer_signals(), self._lock:
            inputs = ProgramInputs.read(environ)
            if self.current is not None and not self.current.is_dead and self.current.inputs == inputs:
                return self.current, False
            self.close()
            self.current = StarterClient(inputs, preload)
            if multiprocessing.parent_process() is not None:  # its forked children run no exit functions
                multiprocessing.util.Finalize(None, self.close, exitpriority=0)
            return self.current, True

    def start_launcher(
        self, launcher: ProcessLink, request: StartLauncher, timeout_s: float | None
    ) -> Callable[[], int | None]:
        """Start a launcher, and return a function that waits for its exit code. The caller defers signals.

        Raises:
            LauncherDied: the starter ended before it had started the launcher, and so did the next starter.
            TimeoutError: the starter did not answer in time, and was killed.
            OSError: the system refuses another process or descriptor.
        """
        deadline = deadline_after(timeout_s)
        while True:
            starter, is_new = self.prepare(request.environ, request.preload)
            try:
                number = starter.start_launcher(launcher, request, deadline)
                return partial(starter.release, number)
            except TimeoutError:
                starter.kill()
                raise
            except ChannelClosed as exc:
                self._drop(starter, exc, is_final=is_new)
                launcher.renew_channel()  # the starter may have started a launcher on the old channel before it ended

    def _drop(self, starter: StarterClient, cause: ChannelClosed, *, is_final: bool) -> None:
        """Stop using this starter, which has ended.

        Raise LauncherDied if `is_final`, unless another thread has retired the starter.
        """
        if is_final and not starter.is_retired:
            starter.reap()
            end = describe_exit(starter.exit_code)
            raise LauncherDied(
                f"the process that starts launchers {end}; stderr may say why; make a new pool"
            ) from cause
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
            STARTERS.prepare(worker_environ(os.environ, worker_env, worker_threads), preload_of(context))


def preload_of(context: Context) -> list[str]:
    """Return the names of the modules that a launcher imports for its workers."""
    if context is Context.SPAWN:
        return []
    if_used = (names for used, names in _PRELOAD_IF_USED.items() if used in sys.modules)
    return [*_PRELOAD, *(name for names in if_used for name in names)]
