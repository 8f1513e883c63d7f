"""The parent's own share of a `VectorEnv.step`: `python -m benchmarks.profile_step [--num-envs 8] [--num-workers 2]`.

What the parent does itself is giving the actions and taking the results; the rest of a step is waiting for workers. Both parts are timed
apart, with the results there before they are taken, so that no waiting is in them. To wake workers that sleep is a system call each: giving
actions is timed with them, and again with one worker that spins, where there are none. The Python layers are timed on the serial backend,
as the difference between a call through the front-end and the same call made natively.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import stepmill
from benchmarks.envs import action_ring, env_fns

TARGET_US = 4.0
BATCHES = 200
CALLS = 500
SPIN_US = 1e4  # so long does a worker spin that is to be found awake
GAP_S = 30e-6  # workers are done with a no-op batch by then, and still awake: what a busy learner sees


def time_calls(call: Callable[[], object]) -> float:
    """Microseconds of one call: the median of batches, each timed as a whole."""
    clock = time.perf_counter
    taken = []
    for _ in range(BATCHES // 4):
        start = clock()
        for _ in range(CALLS):
            call()
        taken.append((clock() - start) / CALLS)
    return statistics.median(taken) * 1e6


def time_layers(num_envs: int) -> dict[str, float]:
    """Microseconds of each layer's call on the serial backend; the native one is the last."""
    actions = action_ring("noop", num_envs)[0]
    with_native: dict[str, float] = {}
    envs = stepmill.VectorEnv(env_fns("noop", num_envs), backend="serial", num_workers=0)
    try:
        envs.reset(seed=0)
        # The layers below have no public door; a profiler may look behind it.
        pool = envs._pool
        with_native["VectorEnv.step"] = time_calls(lambda: envs.step(actions))
        with_native["Pool.step_fast"] = time_calls(lambda: pool.step_fast(actions))
        with_native["Ledger.step"] = time_calls(lambda: pool._state.step(actions))
    finally:
        envs.close()
    return with_native


def time_parent(
    num_envs: int, num_workers: int, spin_us: float | None = None
) -> tuple[list[float], list[float], float]:
    """Microseconds of giving actions and of taking results that are there, step by step, and of a whole step with its waiting."""
    actions = action_ring("noop", num_envs)[0]
    clock = time.perf_counter
    envs = stepmill.VectorEnv(
        env_fns("noop", num_envs),
        backend="process",
        num_workers=num_workers,
        options=stepmill.PoolOptions(spin_us=spin_us),
    )
    giving, taking = [], []
    try:
        envs.reset(seed=0)
        for _ in range(BATCHES * 20):
            start = clock()
            envs.step_async(actions)
            given = clock()
            _spin_until(lambda: len(envs._pool.ready_ids) == num_envs, given + GAP_S)
            begin = clock()
            obs, *_ = envs.step_wait()
            taking.append(clock() - begin)
            giving.append(given - start)
            obs.item(0)
        whole_us = time_calls(lambda: envs.step(actions))
    finally:
        envs.close()
    # What the clock itself costs is in both parts once.
    clock_us = time_calls(clock)
    return [each * 1e6 - clock_us for each in giving], [each * 1e6 - clock_us for each in taking], whole_us


def _spin_until(is_done: Callable[[], bool], not_before_s: float) -> None:
    while not is_done() or time.perf_counter() < not_before_s:
        pass


def main() -> int:
    """Print the parts; exit status 1 when the parent's share is over the target at the default size."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step", description="The parent's share of a step."
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args()
    layers = time_layers(options.num_envs)
    giving, taking, whole_us = time_parent(options.num_envs, options.num_workers)
    giving_awake, _, _ = time_parent(options.num_envs, 1, SPIN_US)
    share_us = statistics.median(giving_awake) + statistics.median(taking)
    print(
        f"NumPy {np.__version__}, n={options.num_envs}, {options.num_workers} workers; microseconds: median, first decile"
    )
    for name, taken_us in layers.items():
        print(f"  {name:<34}{taken_us:8.2f}           serial: envs included")
    print(f"  {'Python above the native call':<34}{layers['VectorEnv.step'] - layers['Ledger.step']:8.2f}")
    for name, parts in (
        ("giving actions, workers asleep", giving),
        ("giving actions, worker awake", giving_awake),
        ("taking results that are ready", taking),
    ):
        print(f"  {name:<34}{statistics.median(parts):8.2f}{statistics.quantiles(parts, n=10)[0]:8.2f}   process")
    print(f"  {'a whole step':<34}{whole_us:8.2f}           process: waiting included")
    verdict = "met" if share_us < TARGET_US else "missed"
    print(
        f"  {'parent, without waking workers':<34}{share_us:8.2f}           target below {TARGET_US:g} at n=8: {verdict}"
    )
    return 0 if share_us < TARGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
