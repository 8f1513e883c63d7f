"""Env-steps per second of one program on a Ray cluster of two machines: stepmill, an actor per env, and Tianshou's RayVectorEnv.

    python -m benchmarks.ray [--sizes 32 256 1024] [--seconds 5] [--nodes 2] [--address ADDRESS]

The env does nothing, so that only the engines are measured. Needs Ray; Tianshou is left out where it is missing. Without an address,
the machines are processes of this one, which must have enough cores.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np

import stepmill

Step = Callable[[], object]


class NoOpEnv(gymnasium.Env[Any, Any]):
    """Returns the same observation of 4 floats."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._obs = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._obs, 0.0, False, False, {}


@contextlib.contextmanager
def run_stepmill(num_envs: int, num_nodes: int) -> Iterator[Step]:
    """A pool with one worker per CPU."""
    nodes = stepmill.RayOptions(num_nodes=num_nodes)
    with stepmill.Pool([NoOpEnv] * num_envs, backend="ray", ray=nodes) as pool:
        pool.reset(seed=0)
        actions = np.zeros(num_envs, np.int64)
        yield lambda: pool.step_fast(actions)
        print(f"    stats of {num_envs} envs: {pool.stats().nodes}")


@contextlib.contextmanager
def run_actors(num_envs: int, _num_nodes: int) -> Iterator[Step]:
    """One actor per env."""
    import ray

    make = ray.remote(NoOpEnv).options(num_cpus=0, scheduling_strategy="SPREAD")
    actors = [make.remote() for _ in range(num_envs)]
    ray.get([actor.reset.remote() for actor in actors])
    try:
        yield lambda: np.stack([result[0] for result in ray.get([actor.step.remote(0) for actor in actors])])
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def run_tianshou(num_envs: int, _num_nodes: int) -> Iterator[Step]:
    """Tianshou's RayVectorEnv."""
    from tianshou.env import RayVectorEnv

    envs = RayVectorEnv([NoOpEnv] * num_envs)
    envs.reset()
    actions = np.zeros(num_envs, np.int64)
    try:
        yield lambda: envs.step(actions)
    finally:
        envs.close()


ENGINES = {"stepmill": run_stepmill, "actor per env": run_actors, "Tianshou": run_tianshou}


def measure(step: Step, seconds: float) -> float:
    """Return the steps of all envs per second, after a warm-up of a fifth of the time."""
    for limit_s in (seconds / 5, seconds):
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < limit_s:
            step()
            count += 1
        rate = count / (time.perf_counter() - began)
    return rate


def measure_all(given: argparse.Namespace) -> None:
    """Print a row for each engine and size."""
    print(f"{'engine':<16}{'envs':>8}{'steps of all/s':>18}{'env-steps/s':>16}{'us per env-step':>18}")
    for name, engine in ENGINES.items():
        if name == "Tianshou" and find_spec("tianshou") is None:
            print(f"{name:<16} is not installed")
            continue
        for size in [size for size in given.sizes if name == "stepmill" or size <= given.max_actors]:
            with engine(size, given.nodes) as step:
                rate = measure(step, given.seconds)
            print(f"{name:<16}{size:>8}{rate:>18.1f}{rate * size:>16.0f}{1e6 / (rate * size):>18.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 256, 1024])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=4, help="of each simulated machine")
    parser.add_argument(
        "--max-actors", type=int, default=256, help="engines with an actor per env run at most this many"
    )
    parser.add_argument("--address", default=None)
    given = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    cluster = None
    if given.address is None:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": given.cpus, "include_dashboard": False})
        for _ in range(given.nodes - 1):
            cluster.add_node(num_cpus=given.cpus)
    ray.init(address=given.address or cluster.address, log_to_driver=False)
    try:
        measure_all(given)
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


if __name__ == "__main__":
    main()
