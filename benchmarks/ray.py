"""Env-steps per second of one program on a Ray cluster: stepmill, an actor per env, Tianshou's RayVectorEnv, and RLlib's env runners.

    python -m benchmarks.setup --only ray                 makes .venvs/ray-bench, with Ray, RLlib and Tianshou
    .venvs/ray-bench/bin/python -m benchmarks.ray [--sizes 32 256 1024] [--seconds 5] [--nodes 2] [--address ADDRESS]
    ... -m benchmarks.ray --fit [--latency-ms 5]          fits the cost model of docs/scaling.md with 1, 2 and 4 nodes
    ... -m benchmarks.ray --cartpole [--sizes 64 256]     rollouts near the envs, beside a local process pool, with CartPole
    ... -m benchmarks.ray --memory 100000                 memory of a program with this many envs; fails above 2 GB

The env does nothing, so that only the engines are measured. Engines that are not installed are left out. Without an address, the
machines are processes of this one, which must have enough cores: else compare ratios only.

Rows with "near the envs" choose actions on the nodes, at random, and send NUM_STEPS steps in one message.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np

import stepmill
from benchmarks.ray_cost import NODE_COUNTS, print_fit
from stepmill.frontends.ray_rollout import MAX_IN_FLIGHT, RayRollout
from stepmill.pool.port import PoolPort

Step = Callable[[], object]

NUM_STEPS = 64  # in one message of the engines that collect near the envs
MAX_BYTES = 2_000_000_000  # of the program with --memory
NUM_ROUNDS = 5  # of --cartpole
IDLE_S = 1.0


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
        step = PoolPort(pool).step_fast
        yield lambda: step(actions)
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


class RandomPolicy:
    """Chooses actions at random."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __call__(self, obs: Any, env_ids: Any) -> Any:
        return self._rng.integers(0, 2, len(env_ids))


@contextlib.contextmanager
def run_rollouts(num_envs: int, num_nodes: int) -> Iterator[Step]:
    """RayRollout."""
    nodes = stepmill.RayOptions(num_nodes=num_nodes)
    with RayRollout([NoOpEnv] * num_envs, NUM_STEPS, policy=RandomPolicy(), nodes=nodes, num_workers=1) as rollout:
        yield rollout.collect


@contextlib.contextmanager
def run_rllib(num_envs: int, num_nodes: int) -> Iterator[Step]:
    """One SingleAgentEnvRunner per node, with its part of the envs in a Gymnasium vector env."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.tune.registry import register_env

    register_env("stepmill-noop", lambda config: NoOpEnv())
    share = num_envs // num_nodes
    config = PPOConfig().environment("stepmill-noop").env_runners(num_envs_per_env_runner=share)
    make = ray.remote(SingleAgentEnvRunner).options(num_cpus=1, scheduling_strategy="SPREAD")
    runners = [make.remote(config=config, worker_index=1 + node, num_workers=num_nodes) for node in range(num_nodes)]
    try:
        yield lambda: ray.get(
            [runner.sample.remote(num_timesteps=NUM_STEPS * share, random_actions=True) for runner in runners]
        )
    finally:
        for runner in runners:
            ray.kill(runner)


@dataclass(frozen=True)
class Engine:
    """One row per size.

    Attributes:
        run: a context manager that makes the envs, and gives a function that steps all of them `steps_per_call` times.
        module: must be installed.
        has_actor_per_env: whether the number of envs is limited by --max-actors.
    """

    run: Callable[[int, int], contextlib.AbstractContextManager[Step]]
    module: str = "ray"
    steps_per_call: int = 1
    has_actor_per_env: bool = False


ENGINES = {
    "stepmill": Engine(run_stepmill),
    "actor per env": Engine(run_actors, has_actor_per_env=True),
    "Tianshou": Engine(run_tianshou, module="tianshou", has_actor_per_env=True),
    "stepmill, near the envs": Engine(run_rollouts, steps_per_call=NUM_STEPS),
    "RLlib, near the envs": Engine(run_rllib, module="ray.rllib", steps_per_call=NUM_STEPS),
}


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
    print(f"{'engine':<24}{'envs':>8}{'steps of all/s':>18}{'env-steps/s':>16}{'us per env-step':>18}", flush=True)
    for name, engine in ENGINES.items():
        if (missing := missing_library(engine)) is not None:
            print(f"{name:<24} cannot be measured: {missing}")
            continue
        for size in [size for size in given.sizes if not engine.has_actor_per_env or size <= given.max_actors]:
            with engine.run(size, given.nodes) as step:
                rate = measure(step, given.seconds) * engine.steps_per_call
            print(f"{name:<24}{size:>8}{rate:>18.1f}{rate * size:>16.0f}{1e6 / (rate * size):>18.2f}", flush=True)


def missing_library(engine: Engine) -> str | None:
    """Return why an engine cannot be imported, or None."""
    try:
        import_module(engine.module)
    except ImportError as exc:
        return str(exc)
    return None


def compare_cartpole(size: int, given: argparse.Namespace) -> None:
    """Print rollouts on the nodes with one worker each, and in this program with as many workers, in turns."""
    env_fns, policy = [partial(gymnasium.make, "CartPole-v1")] * size, RandomPolicy()
    nodes = stepmill.RayOptions(num_nodes=given.nodes)
    ratios = []
    with (
        stepmill.Pool(env_fns, backend="process", num_workers=given.nodes) as pool,
        RayRollout(env_fns, NUM_STEPS, policy=policy, nodes=nodes, num_workers=1, backend="process") as remote,
    ):
        local = stepmill.Rollout(pool, NUM_STEPS)
        for _ in range(NUM_ROUNDS):
            for _ in range(MAX_IN_FLIGHT):  # collected while the other one was measured
                remote.collect()
            there = measure(remote.collect, given.seconds)
            time.sleep(IDLE_S)  # until the nodes have done what they have begun
            here = measure(partial(local.collect, policy), given.seconds)
            ratios.append(there / here)
            rates = [rate * size * NUM_STEPS for rate in (there, here)]
            print(f"{size:>6} envs: {rates[0]:.0f} near the envs, {rates[1]:.0f} local env-steps/s: {ratios[-1]:.2f}x")
    print(f"{size:>6} envs: median {statistics.median(ratios):.2f}x of the local process backend", flush=True)


def measure_memory(num_envs: int, num_nodes: int) -> None:
    """Print the memory of this program with a pool of many envs, which run in threads of the nodes.

    Raises:
        SystemExit: it is more than MAX_BYTES.
    """
    before = peak_bytes()
    nodes = stepmill.RayOptions(num_nodes=num_nodes, resources={"CPU": 0}, host="thread", node_timeout_s=120.0)
    began = time.perf_counter()
    with stepmill.Pool(
        [NoOpEnv] * num_envs, backend="ray", ray=nodes, num_workers=num_nodes, start={"timeout_s": 600.0}
    ) as pool:
        pool.reset(seed=0)
        started_s = time.perf_counter() - began
        actions = np.zeros(num_envs, np.int64)
        began = time.perf_counter()
        for _ in range(5):
            pool.step(actions)
        step_s = (time.perf_counter() - began) / 5
    used = peak_bytes()
    print(
        f"{num_envs} envs on {num_nodes} nodes: the program has used at most {used / 1e6:.0f} MB of memory, {before / 1e6:.0f} MB "
        f"before the pool; start and first reset {started_s:.1f} s, a step of all envs {step_s:.2f} s"
    )
    if used > MAX_BYTES:
        raise SystemExit(f"more than {MAX_BYTES / 1e6:.0f} MB")


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    parser.add_argument("--fit", action="store_true", help="fit the cost model instead")
    parser.add_argument(
        "--latency-ms", type=float, default=5.0, help="added to each message in one part of --fit; 0: no such part"
    )
    parser.add_argument("--cartpole", action="store_true", help="compare rollouts with a local pool instead")
    parser.add_argument("--memory", type=int, metavar="ENVS", help="measure memory instead")
    given = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    cluster = None
    num_machines = max(NODE_COUNTS) if given.fit else given.nodes
    if given.address is None:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": given.cpus, "include_dashboard": False})
        for _ in range(num_machines - 1):
            cluster.add_node(num_cpus=given.cpus)
    ray.init(address=given.address or cluster.address, log_to_driver=False)
    try:
        if given.memory is not None:
            measure_memory(given.memory, given.nodes)
        elif given.cartpole:
            for size in given.sizes:
                compare_cartpole(size, given)
        elif given.fit:
            print_fit(NoOpEnv, given.seconds, given.latency_ms / 1e3)
        else:
            measure_all(given)
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


if __name__ == "__main__":
    main()
