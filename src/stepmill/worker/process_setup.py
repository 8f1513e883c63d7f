"""Forks processes, sets them up to be launchers or workers, and ends them.

A fork inherits the signal handlers, blocked signals, buffered output, exit functions and garbage of its parent. This module
resets those that would otherwise take effect a second time in the child.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NoReturn

import numpy as np

from stepmill._native import OwnedFd
from stepmill.worker.signals import DEFERRED

STDERR = 2
DUMP_SIGNAL = int(signal.SIGRTMAX) - 2  # requests the traceback of a worker's threads; envs are unlikely to use it
# Numeric libraries read these variables when they are imported.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def worker_environ(
    base: Mapping[str, str], worker_env: Mapping[str, str], worker_threads: int | None
) -> dict[str, str]:
    """Return the environment variables of workers: those of the learner, the thread counts, and those of the user."""
    threads = {} if worker_threads is None else dict.fromkeys(THREAD_VARIABLES, str(worker_threads))
    return {**base, **threads, **worker_env}


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block signals in processes that are started in the block; `reset_signal_handlers` unblocks them.

    Otherwise a process that gets Ctrl-C before it has set its handlers would print a traceback.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def fork(run: Callable[[], object]) -> int:
    """Call `run` in a fork of this process, which ends afterwards, and return the pid of the fork."""
    flush_stdio()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads. The user has chosen context='fork', and the child runs none of their code.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        run_and_exit(run)
    return pid


def run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Call `run`, and end this process. Whatever is raised, the code that follows does not run."""
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        exit_process(code)


def watch_child(pid: int) -> OwnedFd:
    """Return the pidfd of a new child. If it cannot be opened, kill the child and raise the error."""
    try:
        return OwnedFd.pidfd(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # the process is not reaped yet, so no other process has this pid
        reap_child(pid)
        raise


def reap_child(pid: int) -> int | None:
    """Wait for the end of a child. Return its exit code, or None if other code in this process has reaped it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def remove_parent_cleanup() -> None:
    """Prevent the parent's exit functions and finalizers from running in this fork."""
    atexit._clear()
    # The garbage collector ignores the objects that exist now, because their finalizers must run only in the parent.
    gc.freeze()


def reset_signal_handlers() -> None:
    """Ignore Ctrl-C, restore the default of every other signal that has a Python handler, and unblock all signals."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, exit codes of children would be lost
    # The handler does nothing. It is not SIG_IGN, which programs that an env starts would inherit.
    signal.signal(signal.SIGINT, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def restore_sigint_in_children() -> None:
    """Restore the default handler of Ctrl-C in processes that an env forks. Workers call this."""
    os.register_at_fork(after_in_child=_restore_sigint)


def _restore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def detach_stdin() -> None:
    """Replace stdin with an empty file, so that only the learner reads its input."""
    null = os.open(os.devnull, os.O_RDONLY)
    # Replace the descriptor before the file object: closing the old object would move the learner's file position.
    os.dup2(null, 0)
    if null != 0:
        os.close(null)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115


def enable_crash_traceback() -> None:
    """Print a traceback to stderr if the process crashes in native code."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(STDERR)


def write_traces_to(fd: int) -> None:
    """Write the traceback of a crash to `fd`, and on DUMP_SIGNAL that of all threads. `fd` must stay open."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable(fd)
        faulthandler.register(DUMP_SIGNAL, fd)


def seed_global_generators(entropy: int, worker: int) -> None:
    """Seed `random` and `np.random` differently in each worker, since forks inherit the same state."""
    words = np.random.SeedSequence([entropy, worker]).generate_state(8)
    random.seed(words.tobytes())
    np.random.seed(words)  # noqa: NPY002


def limit_threads(worker_threads: int | None) -> None:
    """Limit the threads of libraries that are imported already and do not read THREAD_VARIABLES."""
    if worker_threads is None:
        return
    for module, function in (("torch", "set_num_threads"), ("cv2", "setNumThreads")):
        set_threads = getattr(sys.modules.get(module), function, None)
        if set_threads is not None:
            set_threads(worker_threads)


def apply_own_settings(environ: Mapping[str, str], affinity: Sequence[int] | None) -> None:
    """Set the environment variables and cores of this worker process."""
    os.environ.update(environ)
    pin_cores(affinity)


def pin_cores(affinity: Sequence[int] | None) -> None:
    """Restrict the calling thread, and the threads and processes that it starts, to these cores."""
    if affinity is not None:
        os.sched_setaffinity(0, affinity)


def flush_stdio() -> None:
    """Flush stdout and stderr, and ignore errors."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def exit_process(code: int) -> NoReturn:
    """End this process at once. Only the exit functions that it has registered run, and no finalizers."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    flush_stdio()
    os._exit(code)
