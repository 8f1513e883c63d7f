"""`RayOptions`: how a pool uses a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stepmill.spec.errors import UsageError
from stepmill.spec.records import Record, amount, checked, count, word

HOSTS = ("process", "thread", "kernel")
REPLACEMENTS = ("spread", "wait", "raise")


def _checked_cpus(name: str, value: float | None) -> float | None:
    if value is not None and value < 0:
        raise UsageError(f"{name}={value!r} must be 0 or more, or None")
    return value


@dataclass(frozen=True, kw_only=True)
class RayOptions(Record):
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

    _option = "ray"

    address: str | None = checked(None, lambda _, value: value)
    num_nodes: int | None = count(None, 1)
    num_cpus: float | None = checked(None, _checked_cpus)
    resources: Mapping[str, float] = checked({}, lambda _, value: value)
    strategy: object = checked("SPREAD", lambda _, value: value)
    runtime_env: Mapping[str, object] | None = checked(None, lambda _, value: value)
    host: str = word("process", HOSTS)
    node_timeout_s: float = amount(10.0)
    replacement: str = word("spread", REPLACEMENTS)


def hosts_kernels(given: RayOptions) -> bool:
    """Return whether the nodes run kernels."""
    return given.host == "kernel"


def check_ray(given: RayOptions, *, is_chosen: bool, is_forked: bool) -> None:
    """Check the option `ray` together with the others.

    Args:
        given: its value.
        is_chosen: whether the backend is "ray".
        is_forked: whether the context is "fork".
    Raises:
        UsageError: it does not go with the other options.
    """
    if given != RayOptions() and not is_chosen:
        raise UsageError("the option ray is only for backend='ray'; give backend='ray', or leave it out")
    if is_chosen and is_forked:
        raise UsageError(
            "backend='ray' cannot fork this program on other machines; use context='forkserver' or 'spawn'"
        )
