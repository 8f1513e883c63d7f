"""A Ray cluster of several machines that are processes of this one."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

from tests.harness.hangs import HANG_GUARD_S

NODE_CPUS = 4


@contextlib.contextmanager
def running_cluster(num_machines: int = 2) -> Iterator[Any]:
    """Start a cluster, connect this process to it, and end it."""
    for name in ("RAY_DEDUP_LOGS", "RAY_USAGE_STATS_ENABLED"):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("RAY_health_check_period_ms", "1000")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": NODE_CPUS, "include_dashboard": False, "object_store_memory": 200 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(num_machines - 1):
                add_machine(cluster)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_machine(cluster: Any, **arguments: Any) -> Any:
    """Add a machine to a cluster; `arguments` are Ray's."""
    return cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=100 << 20, **arguments)


def remove_machine(cluster: Any, machine: Any) -> None:
    """Remove a machine, and wait until Ray starts no more actors there."""
    import ray

    cluster.remove_node(machine, allow_graceful=False)
    until = time.monotonic() + HANG_GUARD_S
    while any(node["Alive"] and node["NodeID"] == machine.node_id for node in ray.nodes()):
        assert time.monotonic() < until, "Ray has not noticed the loss of a machine"
        os.sched_yield()
