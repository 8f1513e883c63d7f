"""`RayOptions`: how a pool uses a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepmill.spec.records import Record, amount, checked, count, word


@dataclass(frozen=True, kw_only=True)
class RayOptions(Record):
    """Options for backend="ray".

    The workers run in the cluster to which this program is connected (`ray.init`). If there is none, they run in the
    cluster of RAY_ADDRESS. Without that, a cluster is started on this machine.

    Attributes:
        num_nodes: the number of actors, each of which runs an equal part of the workers. None means one per machine of
            the cluster.
        resources: the resources that each actor reserves. They are "CPU" and custom resources. The default of "CPU" is
            one for each worker of the actor, or all CPUs of its machine if there are fewer.
        strategy: Ray's scheduling strategy for the actors: "SPREAD", "DEFAULT" or a strategy object, for example that
            of a placement group.
        host: the backend that runs the envs on each node, "process", "thread" or "kernel". With "kernel", each env_fn
            is a kernel, as for backend="kernel", each node is one worker, and num_workers is the number of threads of
            all nodes.
        node_timeout_s: if a node does not answer for this many seconds, its actor is killed, and its workers count as
            dead. Use a value above the longest time for which a machine may be stopped or disconnected.
        replacement: what to do if Ray has no machine for the successor of a lost node. A warning says what is missing. After
            node_timeout_s, "spread" divides the workers among the remaining machines that have `resources`, without
            reserving anything, and "raise" raises WorkerDied. "wait" waits for a machine, and repeats the warning from time to time.
    """

    _option = "ray"
    _gone = {
        "address": "call ray.init(address=...) before, or set RAY_ADDRESS",
        "num_cpus": "give it in resources: resources={'CPU': ...}",
        "runtime_env": "call ray.init(runtime_env=...) before",
    }

    num_nodes: int | None = count(None, 1)
    resources: Mapping[str, float] = checked({}, lambda _, value: value)
    strategy: object = checked("SPREAD", lambda _, value: value)
    host: str = word("process", ("process", "thread", "kernel"))
    node_timeout_s: float = amount(10.0)
    replacement: str = word("spread", ("spread", "wait", "raise"))


def hosts_kernels(given: RayOptions) -> bool:
    """Return whether the nodes run kernels."""
    return given.host == "kernel"
