"""Connects to a Ray cluster, and makes the actors of a pool. Ray is imported when it is first used."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from stepmill.backends.ray.node_host import NodeHost
from stepmill.spec.errors import UsageError, WorkerDied, needs_extra
from stepmill.spec.notices import warn
from stepmill.spec.ray_options import RayOptions

CONTROLS = 8  # how many starts, restarts and ends of workers run at the same time
WARN_S = 5.0  # how long a successor of a lost node waits for a machine before the first warning
CHECK_S = 0.5  # the time between two calls of `PlaceSearch.shared_machines`


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster. `available` has the resources that are not reserved."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    available: Mapping[str, float]

    @property
    def num_cpus(self) -> int:
        """The number of its CPUs."""
        return int(self.resources["CPU"])


def require_ray() -> Any:
    """Return the module `ray`.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    with needs_extra("ray", "ray", ImportError):
        return import_module("ray")


def connect() -> Any:
    """Connect this program to the cluster unless it is connected; return the module `ray`.

    Raises:
        UsageError: there is no cluster.
    """
    ray = require_ray()
    if ray.is_initialized():
        return ray
    try:
        ray.init(log_to_driver=False, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as exc:
        raise UsageError(
            f"there is no Ray cluster at {os.environ.get('RAY_ADDRESS', 'this machine')}: {exc}; start one with `ray start "
            "--head`, or unset RAY_ADDRESS"
        ) from exc
    return ray


def machines(ray: Any) -> list[Machine]:
    """Return the living machines of the cluster that have CPUs. Those with the most free CPUs come first."""
    free: Any = getattr(import_module("ray._private.state"), "available_resources_per_node", dict)()  # not public
    found = [
        Machine(node["NodeID"], node["NodeManagerAddress"], total, free.get(node["NodeID"], total))
        for node in ray.nodes()
        if (total := node["Resources"]).get("CPU", 0) >= 1 and node["Alive"]
    ]
    return sorted(found, key=lambda each: each.available.get("CPU", 0.0), reverse=True)


def count_cpus(options: RayOptions) -> int:
    """Return how many workers the nodes of a pool have CPUs for.

    Raises:
        UsageError: the cluster has no CPUs.
    """
    found = sorted((each.num_cpus for each in machines(connect())), reverse=True)
    if not found:
        raise UsageError("the Ray cluster has no machine with CPUs; add one with `ray start --address=...`")
    return sum(found[: options.num_nodes])


def count_nodes(ray: Any, options: RayOptions, num_workers: int) -> int:
    """Return how many actors share this number of workers."""
    return min(options.num_nodes or max(len(machines(ray)), 1), num_workers)


def demand_of(ray: Any, options: RayOptions, num_wanted: int) -> dict[str, float]:
    """Return what the actor of a node reserves, by resource. Its workers can use `num_wanted` CPUs."""
    largest = max((each.num_cpus for each in machines(ray)), default=num_wanted)
    return {"CPU": min(num_wanted, largest), **options.resources}


def placed(
    ray: Any, options: RayOptions, demand: Mapping[str, float], avoid: Collection[str] = (), machine: str | None = None
) -> dict[str, Any]:
    """Return the options of Ray for an actor that reserves `demand`.

    The actor runs only on the `machine` with this id, if one is given, and not on those to `avoid` if another one has
    room. With replacement="spread" it waits for another one until its workers are divided, because for a minute Ray may
    regard a machine that does not answer as one with room.
    """
    strategy = options.strategy
    if machine is None:
        other = _machine_besides(ray, options, avoid)
        if other is not None and (options.replacement == "spread" or _has_room(other, demand)):
            machine = other.node_id
    if machine is not None:
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        strategy = affinity(machine, soft=False)
    return {
        "num_cpus": demand.get("CPU", 0),
        "resources": {name: amount for name, amount in demand.items() if name != "CPU"} or None,
        "scheduling_strategy": strategy,
    }


def _machine_besides(ray: Any, options: RayOptions, avoid: Collection[str]) -> Machine | None:
    """Return the machine with the most free CPUs, except those to avoid; None if there are none, or Ray must choose."""
    if not avoid or not isinstance(options.strategy, str) or options.resources.keys() - {"CPU"}:
        return None
    return next((each for each in machines(ray) if each.node_id not in avoid), None)


def _has_room(machine: Machine, demand: Mapping[str, float]) -> bool:
    return machine.available.get("CPU", 0.0) >= demand.get("CPU", 0.0)


def make_actor(ray: Any, placing: Mapping[str, Any]) -> Any:
    """Start the actor of one node with the options from `placed`, and return its handle at once."""
    actor = ray.remote(concurrency_groups={"ping": 1})(NodeHost)
    return actor.options(**placing, max_restarts=0, max_task_retries=0, max_concurrency=CONTROLS).remote()


def is_waiting(ray: Any, demand: Mapping[str, float]) -> bool:
    """Whether an actor with this demand waits for a machine with room. An actor whose process is starting does not."""
    status = import_module("ray.autoscaler.v2.sdk").get_cluster_status(ray.get_runtime_context().gcs_address)
    shapes = [count.bundle for each in status.resource_demands.ray_task_actor_demand for count in each.bundles_by_count]
    # In a placement group, resources are named CPU_group_ID, and there is one more of them.
    waiting = [
        {name.partition("_group_")[0]: shape[name] for name in shape if "bundle_group_" not in name} for shape in shapes
    ]
    return {name: amount for name, amount in demand.items() if amount} in waiting


class PlaceSearch:
    """The wait of a successor for a machine. `gave_up_at` is when replacement="raise" ended it, and 0.0 before."""

    def __init__(
        self,
        ray: Any,
        options: RayOptions,
        demand: Mapping[str, float],
        lost: WorkerDied,
        env_ids: Sequence[int],
        avoid: Collection[str] = (),
    ) -> None:
        """`demand` and `avoid` are as for `placed`. `lost` is the error to raise. `env_ids` are those of the node."""
        self._ray, self._options, self._demand, self._lost, self._avoid = ray, options, demand, lost, avoid
        self._node = f"{lost.node}, which ran envs {list(env_ids)}"
        self._began, self._due_s, self._has_warned = time.monotonic(), WARN_S, False
        other = _machine_besides(ray, options, avoid)
        # Ray does not list actors that wait for a given machine. One that has room and starts slowly counts as waiting.
        self._waits_besides = options.replacement == "spread" and other is not None and not _has_room(other, demand)
        self.gave_up_at = 0.0

    def shared_machines(self) -> list[str]:
        """Return the ids of the machines among which to divide the workers now. There are none while there may be room.

        Raises:
            WorkerDied: replacement="raise", and no machine has had room in time.
        """
        choice, limit_s = self._options.replacement, self._options.node_timeout_s
        waited_s = time.monotonic() - self._began
        if waited_s < self._due_s or not (self._waits_besides or is_waiting(self._ray, self._demand)):
            return []
        if self._has_warned and choice == "raise":
            self.gave_up_at = time.monotonic()
            raise self.error(self._lost)
        shared, follows = [], "its envs wait for a machine"
        if self._has_warned and choice == "spread":
            wanted, found = {**self._options.resources, "CPU": 0.0}, machines(self._ray)
            found = [each for each in found if all(each.resources.get(name, 0.0) >= wanted[name] for name in wanted)]
            shared = [each.node_id for each in found if each.node_id not in self._avoid]
        elif choice != "wait":
            follows += f"; {limit_s:g} s from now replacement={choice!r} takes effect"
        if shared:
            follows = "its envs now run on machines that are left, without reserved CPUs"
        self._due_s, self._has_warned = (2 * waited_s if self._has_warned else waited_s + limit_s), True
        warn(f"{self._missing()}; {follows}")
        return shared

    def error(self, lost: WorkerDied) -> WorkerDied:
        """Add the missing resources of the successor to the error of a lost worker, and return the error."""
        lost.message += f"; {self._missing()}; add a machine and reset them, or use replacement='spread'"
        lost.args, lost.is_final = (lost.message,), True
        return lost

    def _missing(self) -> str:
        needs = ", ".join(f"{amount:g} {name}" for name, amount in self._demand.items())
        left = "; ".join(
            ", ".join([each.address, *(f"{each.available.get(name, 0.0):g} {name} free" for name in self._demand)])
            for each in machines(self._ray)
        )
        return f"no machine has room for the successor of {self._node}, which needs {needs} (left: {left or 'none'})"


def kill(ray: Any, actor: Any) -> None:
    """Kill an actor if Ray still runs."""
    with contextlib.suppress(Exception):  # the cluster may have ended
        ray.kill(actor, no_restart=True)
