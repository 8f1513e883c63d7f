"""Counts the instructions of a step: `python -m benchmarks.instructions [--cells serial-8,kernel-1024] [PYTHON ...]`.

Only the program's own thread is counted: what the pool does, on the serial and the kernel backend together with the envs, with
processes without them. Each PYTHON is the interpreter of another environment, for example of a checkout of an older commit, and gets a
column. The thread is executed one instruction at a time (ptrace), so counts are the same on a busy machine, and where virtual machines
have no hardware counters (`perf stat`). A system call is one instruction. The number is the median of several steps in several processes:
a step with workers sometimes waits less or once more, and some steps measure the time of a call. The least of all is no good measure: it is
that of a rare step which found all results there. On the serial backend most of it are the envs and their results. Two runs give numbers
within 0.3 %. Each column takes a few minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from statistics import median_low
from typing import Any

from benchmarks.paths import ROOT

STEPS = {"serial-8": 9, "serial-128": 1, "process-8": 21, "process-128": 5, "kernel-1024": 1}  # of each process
PROCESSES = 3
WARM_UP = 200
NUM_WORKERS = {"serial": 0, "process": 2, "kernel": 1}
# Short names of linux/ptrace.h.
TRACE_ME, CONTINUE, SINGLE_STEP = 0, 7, 9
FIXED_ADDRESSES = 0x0040000  # of linux/personality.h: otherwise hashes of addresses make a difference of a hundredth
# A copy by one repeated instruction would count each repetition.
TUNABLES = ":".join(f"glibc.cpu.x86_rep_{name}_threshold=1073741824" for name in ("movsb", "stosb"))
_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_ptrace.restype = ctypes.c_long


def make_step(cell: str) -> tuple[Any, Callable[[], object]]:
    """Return the vector env of a cell, and what steps it."""
    import stepmill
    from benchmarks.envs import action_ring, env_fns

    backend, _, size = cell.partition("-")
    num_envs = int(size)
    keywords: Any = {"backend": backend, "num_workers": NUM_WORKERS[backend], "tuning": {"spin_us": 0}}
    name = "cartpole" if backend == "kernel" else "noop"
    if backend == "kernel":
        envs: Any = stepmill.make_vec("CartPole-v1", num_envs, **keywords)
    else:
        envs = stepmill.VectorEnv(env_fns(name, num_envs), **keywords)
    actions = action_ring(name, num_envs)[0]
    return envs, lambda: envs.step(actions)


def run_traced(cell: str) -> None:
    """Step the envs of a cell. A signal to oneself stands before and after each part that is counted."""
    ptrace(TRACE_ME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    envs, step = make_step(cell)
    envs.reset(seed=0)
    for _ in range(WARM_UP):
        step()
    kill, own, mark = os.kill, os.getpid(), signal.SIGUSR1
    for part in [lambda: None] * 8 + [step] * STEPS[cell]:
        kill(own, mark)
        part()
        kill(own, mark)
    envs.close()


def ptrace(request: int, pid: int, signum: int = 0) -> None:
    """Trace this process, or continue a traced one."""
    if _ptrace(request, pid, None, signum) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace: {os.strerror(ctypes.get_errno())}; a container may forbid it")


def count_parts(pid: int) -> list[int]:
    """Run a traced process to its end, and return how many instructions its marked parts have."""
    counts: list[int] = []
    is_counting = False
    _, status = os.waitpid(pid, 0)
    while os.WIFSTOPPED(status):
        signum = os.WSTOPSIG(status)
        if signum == signal.SIGUSR1:
            is_counting = not is_counting
            counts += [0] if is_counting else []
        elif signum == signal.SIGTRAP:
            counts[-1] += 1
        is_ours = signum in {signal.SIGUSR1, signal.SIGTRAP, signal.SIGSTOP}
        ptrace(SINGLE_STEP if is_counting else CONTINUE, pid, 0 if is_ours else signum)
        _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"the measured program failed, wait status {status}")
    return counts


def count_step(python: str, cell: str) -> int:
    """Return the instructions of a step of one cell with one interpreter, in one process."""
    command = [python, "-m", "benchmarks.instructions", "--traced", cell]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": TUNABLES}
    with subprocess.Popen(command, env=environment) as traced:
        try:
            counts = count_parts(traced.pid)
        finally:
            traced.kill()
    return median_low(counts[8:]) - min(counts[:8])


def main() -> None:
    """Print a row for each cell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description="Instructions of a step.")
    parser.add_argument("--cells", default=",".join(STEPS), help="some of " + ", ".join(STEPS))
    parser.add_argument("--traced", help=argparse.SUPPRESS)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="interpreters of other environments")
    options = parser.parse_args()
    if options.traced:
        run_traced(options.traced)
        return
    _libc.personality(FIXED_ADDRESSES)
    print("instructions of a step", "this", *options.pythons, sep="  ")
    for cell in options.cells.split(","):
        pythons = (sys.executable, *options.pythons)
        rounds = [[count_step(python, cell) for python in pythons] for _ in range(PROCESSES)]
        own, *others = (median_low(counts) for counts in zip(*rounds, strict=True))
        columns = "".join(f"{other:10,} ({own / other - 1:+.1%})" for other in others)
        print(f"{cell:<12}{own:10,}{columns}", flush=True)


if __name__ == "__main__":
    main()
