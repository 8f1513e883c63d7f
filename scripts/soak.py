"""Step CartPole ten million times on the process backend, and fail if memory, descriptors, threads or processes grow.

Usage: soak.py [STEPS]. The learner and all its children are measured after a tenth of the steps and at the end.
"""

import sys
import time
from dataclasses import dataclass

import numpy as np
import psutil

import stepmill

NUM_ENVS = 64
NUM_WORKERS = 2
MAX_GROWTH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Usage:
    """The resources of the learner and all its children."""

    size_bytes: int  # memory that is not shared with other processes
    num_descriptors: int
    num_threads: int
    num_processes: int


def measure() -> Usage:
    """Return the current usage."""
    learner = psutil.Process()
    family = [learner, *learner.children(recursive=True)]
    return Usage(
        size_bytes=sum(process.memory_full_info().uss for process in family),
        num_descriptors=sum(process.num_fds() for process in family),
        num_threads=sum(process.num_threads() for process in family),
        num_processes=len(family),
    )


def describe(steps: int, usage: Usage) -> str:
    """Return one line about a measurement."""
    memory = usage.size_bytes / 2**20
    return (
        f"soak: {steps:>10,} steps: {memory:.1f} MiB, {usage.num_descriptors} descriptors, "
        f"{usage.num_threads} threads, {usage.num_processes} processes"
    )


def find_growth(before: Usage, after: Usage) -> list[str]:
    """Return a description of each resource that has grown."""
    grown = []
    if after.size_bytes > before.size_bytes + MAX_GROWTH_BYTES:
        grown.append(f"memory by {(after.size_bytes - before.size_bytes) / 2**20:.1f} MiB")
    for name in ("num_descriptors", "num_threads", "num_processes"):
        difference = getattr(after, name) - getattr(before, name)
        if difference > 0:
            grown.append(f"{name} by {difference}")
    return grown


def main() -> int:
    """Run the steps. The exit status is 1 if a resource has grown."""
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    envs = stepmill.make_vec("CartPole-v1", num_envs=NUM_ENVS, backend="process", num_workers=NUM_WORKERS)
    try:
        envs.reset(seed=0)
        actions = np.random.default_rng(0).integers(0, 2, size=(1024, NUM_ENVS))
        rounds, warm_rounds = total // NUM_ENVS, total // NUM_ENVS // 10
        started = time.monotonic()
        warm = measure()
        for number in range(rounds):
            envs.step(actions[number % len(actions)])
            if number == warm_rounds:
                warm = measure()
                print(describe(number * NUM_ENVS, warm), flush=True)
        ended = measure()
        seconds = time.monotonic() - started
    finally:
        envs.close()
    print(describe(rounds * NUM_ENVS, ended), f"in {seconds:.0f} s")
    grown = find_growth(warm, ended)
    print(f"soak: grew: {', '.join(grown)}" if grown else "soak: nothing grew")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
