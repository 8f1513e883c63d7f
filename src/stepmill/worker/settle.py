"""Makes a process that was forked, or started afresh, fit to be a launcher or a worker.

A fork inherits everything its maker had: handlers, buffered output, exit functions, garbage, blocked signals. What of it
would run twice or at the wrong time in the child is put aside here.
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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

import numpy as np

from stepmill.worker.signals import DEFERRED

STDERR = 2
DUMP_SIGNAL = int(signal.SIGRTMAX) - 2  # "write down where you stand": one that no env is likely to use
# What numeric libraries read when they are loaded.
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
    """Returns the environment of workers: the learner's, thread counts, and on top what the user chose."""
    threads = {} if worker_threads is None else dict.fromkeys(THREAD_VARIABLES, str(worker_threads))
    return {**base, **threads, **worker_env}


@contextlib.contextmanager
def born_deaf() -> Iterator[None]:
    """Lets a process that is started meanwhile begin with signals blocked, until `settle_signals` lets them in.

    Otherwise Ctrl-C would make it print a traceback if it came before the process could settle.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, DEFERRED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def fork() -> int:
    """Forks, with nothing left in the buffers of stdout and stderr. Returns 0 in the child, else its pid."""
    flush_stdio()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads. The child runs none of their code, and whoever chose to fork knows of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def settle_fork() -> None:
    """Forgets what the maker of this fork wanted to be done later: exit functions and finalizers of its garbage."""
    atexit._clear()
    # What is here now belongs to the maker: if it became garbage here, its finalizers would run a second time.
    gc.freeze()


def settle_signals() -> None:
    """Ignores Ctrl-C, and gives every other signal that had a Python handler its default."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would make exit codes vanish
    # A handler that does nothing, and not SIG_IGN: programs that an env starts must not inherit deafness to Ctrl-C.
    signal.signal(signal.SIGINT, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def spare_children() -> None:
    """Lets processes that an env forks hear Ctrl-C as they would without us. Called in workers."""
    os.register_at_fork(after_in_child=_hear_interrupts)


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def settle_stdin() -> None:
    """Lets go of the learner's stdin: nobody but the learner reads what is typed or piped there."""
    null = os.open(os.devnull, os.O_RDONLY)
    # First the descriptor: were the old file object closed first, it would move the file position it shares with the learner.
    os.dup2(null, 0)
    if null != 0:
        os.close(null)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115


def settle_faults() -> None:
    """Prints a traceback to stderr if the process crashes in native code."""
    with contextlib.suppress(OSError, ValueError):
        faulthandler.enable(STDERR)


def trace_into(fd: int) -> None:
    """Writes the traceback of a crash to `fd` instead, and that of all threads when DUMP_SIGNAL comes. `fd` stays open."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable(fd)
        faulthandler.register(DUMP_SIGNAL, fd)


def seed_globals(entropy: int, worker: int) -> None:
    """Seeds `random` and `np.random`, so that forked workers do not all draw the same."""
    words = np.random.SeedSequence([entropy, worker]).generate_state(8)
    random.seed(words.tobytes())
    np.random.seed(words)  # noqa: NPY002


def limit_threads(worker_threads: int | None) -> None:
    """Tells libraries that are loaded already and do not look at the environment how many threads they may use."""
    if worker_threads is None:
        return
    for module, function in (("torch", "set_num_threads"), ("cv2", "setNumThreads")):
        set_threads = getattr(sys.modules.get(module), function, None)
        if set_threads is not None:
            set_threads(worker_threads)


def pin_cores(affinity: Sequence[int] | None) -> None:
    """Lets the calling thread, and the threads and processes that it starts, run on these cores only."""
    if affinity is not None:
        os.sched_setaffinity(0, affinity)


def flush_stdio() -> None:
    """Flushes stdout and stderr, as far as they are there and work."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def leave(code: int) -> None:
    """Ends this process at once: exit functions registered here run, the maker's do not, nor does any finalizer."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    flush_stdio()
    os._exit(code)
