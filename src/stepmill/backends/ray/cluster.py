"""Connects to a Ray cluster, and makes the actors of a pool. Ray is imported when it is first used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from stepmill.backends.ray.node_host import NodeHost
from stepmill.spec.errors import MissingExtraError, UsageError
from stepmill.spec.ray_options import RayOptions

CONTROLS = 8  # starts, restarts and ends of workers at the same time
REQUESTS = 32  # calls of a node whose replies are waited for at the same time; each may go to all of its workers


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster."""

    node_id: str
    address: str
    num_cpus: int


def require_ray() -> Any:
    """Return the module `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_module("ray")
    except ImportError as exc:
        raise MissingExtraError(module="ray", extra="ray") from exc


def connect(options: RayOptions) -> Any:
    """Connect this program to the cluster, if it is not connected; return the module `ray`.

    Raises:
        UsageError: there is no cluster at the address.
    """
    ray = require_ray()
    if ray.is_initialized():
        return ray
    try:
        ray.init(
            address=options.address, log_to_driver=False, include_dashboard=False if options.address is None else None
        )
    except (ConnectionError, ValueError, RuntimeError) as exc:
        raise UsageError(
            f"there is no Ray cluster at {options.address or 'this machine'}: {exc}; start one with `ray start --head`, or "
            "leave `address` out"
        ) from exc
    return ray


def machines(ray: Any) -> list[Machine]:
    """Return the living machines of the cluster that have CPUs."""
    return [
        Machine(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"]["CPU"]))
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]


def count_cpus(options: RayOptions) -> int:
    """Return how many workers the nodes of a pool have CPUs for.

    Raises:
        UsageError: the cluster has no CPUs.
    """
    found = sorted((each.num_cpus for each in machines(connect(options))), reverse=True)
    if not found:
        raise UsageError("the Ray cluster has no machine with CPUs; add one with `ray start --address=...`")
    return sum(found[: options.num_nodes])


def count_nodes(ray: Any, options: RayOptions, num_workers: int) -> int:
    """Return how many actors share this number of workers."""
    return min(options.num_nodes or max(len(machines(ray)), 1), num_workers)


def make_actor(ray: Any, options: RayOptions, num_wanted: int, avoid: Collection[str] = ()) -> Any:
    """Start the actor of one node; return its handle at once.

    Args:
        ray: the module.
        options: of the pool.
        num_wanted: how many CPUs its workers can use.
        avoid: ids of machines that did not answer, on which it should not run.
    """
    found = machines(ray)
    num_cpus: float = num_wanted
    if options.num_cpus is not None:
        num_cpus = options.num_cpus
    elif found:
        num_cpus = min(num_wanted, max(each.num_cpus for each in found))
    strategy = options.strategy
    others = [each for each in found if each.node_id not in avoid]
    is_free = isinstance(strategy, str) and not options.resources  # else Ray knows which machines fit
    if others and len(others) < len(found) and is_free:
        free = _free_cpus(ray)
        best = max(others, key=lambda each: free.get(each.node_id, 0.0))
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        strategy = affinity(best.node_id, soft=False)
        num_cpus = min(num_cpus, math.floor(free.get(best.node_id, 0.0)))  # rather share CPUs than wait for a machine
    groups = {"requests": REQUESTS, "ping": 1}
    actor = ray.remote(concurrency_groups=groups)(NodeHost).options(
        num_cpus=num_cpus,
        resources=dict(options.resources) or None,
        scheduling_strategy=strategy,
        runtime_env=None if options.runtime_env is None else dict(options.runtime_env),
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=CONTROLS,
    )
    return actor.remote()


def _free_cpus(ray: Any) -> dict[str, float]:
    """Return the CPUs that are not reserved, by machine."""
    with contextlib.suppress(Exception):  # not a public API of every version
        per_node = import_module("ray._private.state").available_resources_per_node()
        return {node_id: float(resources.get("CPU", 0.0)) for node_id, resources in per_node.items()}
    return {each.node_id: float(each.num_cpus) for each in machines(ray)}


def kill(ray: Any, actor: Any) -> None:
    """Kill an actor, if Ray still runs."""
    with contextlib.suppress(Exception):  # the cluster may be gone
        ray.kill(actor, no_restart=True)
