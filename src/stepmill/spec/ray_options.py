"""`RayOptions`: how a pool uses a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepmill.spec.errors import UsageError

HOSTS = ("process", "thread", "kernel")
REPLACEMENTS = ("spread", "wait", "raise")


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Where the workers of a pool with backend="ray" run.

    Attributes:
        address: of the cluster, as for `ray.init`. None uses the cluster that this program is connected to, or the one in
            RAY_ADDRESS, or starts Ray on this machine.
        num_nodes: number of actors, each of which runs an equal part of the workers. None is one per machine of the cluster.
        num_cpus: CPUs that each actor reserves. None is the number of its workers, or of the machine's CPUs if it has fewer.
        resources: custom resources that each actor reserves.
        strategy: Ray's scheduling strategy of the actors: "SPREAD", "DEFAULT" or a strategy object, for example of a
            placement group.
        runtime_env: Ray's runtime environment of the actors.
        host: "process", "thread" or "kernel": which backend runs the envs on each node. With "kernel", each env_fn is a kernel, as
            for backend="kernel", each node is one worker, and num_workers is the number of threads of all nodes.
        node_timeout_s: a node that does not answer for this long is given up: its actor is killed, and its workers count as
            dead. More than the longest time that a machine may be stopped or cut off.
        replacement: what follows if Ray has no machine for the successor of a lost node. A warning says what is missing, and
            node_timeout_s later "spread" divides the workers among the machines that are left and have `resources`, without
            reserving anything; "raise" raises WorkerDied. "wait" waits for a machine, and repeats the warning now and then.
    """

    address: str | None = None
    num_nodes: int | None = None
    num_cpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: object = "SPREAD"
    runtime_env: Mapping[str, object] | None = None
    host: str = "process"
    node_timeout_s: float = 10.0
    replacement: str = "spread"

    def __post_init__(self) -> None:
        if self.num_nodes is not None and (isinstance(self.num_nodes, bool) or self.num_nodes < 1):
            raise UsageError(f"num_nodes={self.num_nodes!r} must be a whole number, 1 or more, or None")
        if self.host not in HOSTS:
            raise UsageError(f"host={self.host!r} is not one of {', '.join(map(repr, HOSTS))}")
        if self.replacement not in REPLACEMENTS:
            raise UsageError(f"replacement={self.replacement!r} is not one of {', '.join(map(repr, REPLACEMENTS))}")
        if not self.node_timeout_s > 0:
            raise UsageError(f"node_timeout_s={self.node_timeout_s!r} must be a number of seconds above 0")
        if self.num_cpus is not None and self.num_cpus < 0:
            raise UsageError(f"num_cpus={self.num_cpus!r} must be 0 or more, or None")


def hosts_kernels(given: object) -> bool:
    """Return whether the nodes of a value of the option `ray` run kernels."""
    return isinstance(given, RayOptions) and given.host == "kernel"


def check_ray(given: object, *, is_chosen: bool, is_forked: bool) -> None:
    """Check the option `ray`.

    Args:
        given: its value.
        is_chosen: whether the backend is "ray".
        is_forked: whether the context is "fork".
    Raises:
        UsageError: it is not a RayOptions, or does not go with the other options.
    """
    if given is not None and not isinstance(given, RayOptions):
        raise UsageError(f"ray={given!r} is a {type(given).__name__}; give stepmill.RayOptions(...)")
    if given is not None and not is_chosen:
        raise UsageError("the option ray is only for backend='ray'; give backend='ray', or leave it out")
    if is_chosen and is_forked:
        raise UsageError(
            "backend='ray' cannot fork this program on other machines; use context='forkserver' or 'spawn'"
        )
