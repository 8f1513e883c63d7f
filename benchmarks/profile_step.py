"""Measures the parent's share of a `VectorEnv.step`: `python -m benchmarks.profile_step [--num-envs 8] [--num-workers 2]`.

The parent sends actions and receives results; in the rest of a step it waits for workers. Both parts are timed separately, and the results
are ready before they are received, so that no waiting is included. Waking a sleeping worker takes a system call: sending actions is timed
with sleeping workers, and again with one worker that spins. The Python layers are timed on the serial backend, as the difference between a
call through the front-end and the native call.
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
from stepmill.pool.port import PoolPort

TARGET_US = 4.0
BATCHES = 200
CALLS = 500
SPIN_US = 1e4  # long enough that a worker is still spinning at the next step
GAP_S = 30e-6  # workers have finished a no-op batch by then, and have not gone to sleep, as with a busy learner


def time_calls(call: Callable[[], object]) -> float:
    """Return the microseconds of one call: the median of batches, each timed as a whole."""
    clock = time.perf_counter
    taken = []
    for _ in range(BATCHES // 4):
        start = clock()
        for _ in range(CALLS):
            call()
        taken.append((clock() - start) / CALLS)
    return statistics.median(taken) * 1e6


def time_layers(num_envs: int) -> dict[str, float]:
    """Return the microseconds of each layer's call on the serial backend. The native call is the last."""
    actions = action_ring("noop", num_envs)[0]
    with_native: dict[str, float] = {}
    envs = stepmill.VectorEnv(env_fns("noop", num_envs), backend="serial", num_workers=0)
    try:
        envs.reset(seed=0)
        # The layers below are private, but a profiler may use them.
        pool = envs._pool
        with_native["VectorEnv.step"] = time_calls(lambda: envs.step(actions))
        port = PoolPort(pool)
        with_native["PoolPort.step_fast"] = time_calls(lambda: port.step_fast(actions))
        with_native["PoolState.step"] = time_calls(lambda: pool._state.step(actions))
    finally:
        envs.close()
    return with_native


def time_parent(
    num_envs: int, num_workers: int, spin_us: float | None = None
) -> tuple[list[float], list[float], float]:
    """Return the microseconds of sending actions and of receiving ready results for each step, and of a whole step."""
    actions = action_ring("noop", num_envs)[0]
    clock = time.perf_counter
    envs = stepmill.VectorEnv(
        env_fns("noop", num_envs),
        backend="process",
        num_workers=num_workers,
        options=stepmill.PoolOptions(tuning={"spin_us": spin_us}),
    )
    sending, receiving = [], []
    try:
        envs.reset(seed=0)
        for _ in range(BATCHES * 20):
            start = clock()
            envs.step_async(actions)
            sent = clock()
            _spin_until(lambda: len(envs._pool.ready_ids) == num_envs, sent + GAP_S)
            begin = clock()
            obs, *_ = envs.step_wait()
            receiving.append(clock() - begin)
            sending.append(sent - start)
            obs.item(0)
        whole_us = time_calls(lambda: envs.step(actions))
    finally:
        envs.close()
    # Both parts include one call of the clock.
    clock_us = time_calls(clock)
    return [each * 1e6 - clock_us for each in sending], [each * 1e6 - clock_us for each in receiving], whole_us


def _spin_until(is_done: Callable[[], bool], not_before_s: float) -> None:
    while not is_done() or time.perf_counter() < not_before_s:
        pass


def main() -> int:
    """Print the parts. The exit status is 1 if the parent's share is not below the target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step", description="The parent's share of a step."
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=2)
    options = parser.parse_args()
    layers = time_layers(options.num_envs)
    sending, receiving, whole_us = time_parent(options.num_envs, options.num_workers)
    sending_awake, _, _ = time_parent(options.num_envs, 1, SPIN_US)
    share_us = statistics.median(sending_awake) + statistics.median(receiving)
    print(
        f"NumPy {np.__version__}, n={options.num_envs}, {options.num_workers} workers; microseconds: median, first decile"
    )
    for name, taken_us in layers.items():
        print(f"  {name:<34}{taken_us:8.2f}           serial: envs included")
    print(f"  {'Python above the native call':<34}{layers['VectorEnv.step'] - layers['PoolState.step']:8.2f}")
    for name, parts in (
        ("sending actions, workers asleep", sending),
        ("sending actions, worker awake", sending_awake),
        ("receiving results that are ready", receiving),
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
