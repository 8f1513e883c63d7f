"""The values that actor methods take and return, besides the arrays of commands and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepmill.spec.errors import StepmillError
from stepmill.worker.messages import Reply, Request, WorkerReport, WorkerSettings


@dataclass(frozen=True)
class NodePlan:
    """What one node runs. Workers and servers are numbered within the node, in the order of their numbers in the pool.

    Attributes:
        env_ids: by worker of the node, the env_ids of its envs in the pool.
        builds: by worker, its Build message as bytes.
        settings: of the workers.
        host: the backend that runs the envs: "process", "thread" or "kernel".
        num_threads: how many threads run the envs of a kernel.
        limits: arguments of the reaper that watches the workers: time limits in seconds.
        sys_path: of the pool's program.
    """

    env_ids: tuple[tuple[int, ...], ...]
    builds: tuple[bytes, ...]
    settings: WorkerSettings
    host: str
    num_threads: int
    limits: Mapping[str, Any]
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class NodeStarted:
    """All workers of a node have built their envs.

    Attributes:
        reports: by worker, numbered within the node.
        address: of the machine, for messages.
        pid: of the actor's process.
        node_id: Ray's id of the machine.
    """

    reports: tuple[WorkerReport, ...]
    address: str
    pid: int
    node_id: str


@dataclass(frozen=True)
class NodeCall:
    """Requests to workers of a node, by worker of the node. `number` is unique within the pool."""

    number: int
    requests: Mapping[int, Request]


@dataclass(frozen=True)
class Exchanged:
    """The answer of a node to one message.

    Attributes:
        results: a message for PoolRelay.publish_results.
        exit_codes: by dead worker of the node, its exit code or the negative number of a signal, or None.
    """

    results: Any
    exit_codes: Mapping[int, int | None]


@dataclass(frozen=True)
class Raised:
    """An error of stepmill that a method of a node raised. As a value, because Ray wraps exceptions."""

    error: StepmillError


Replies = Mapping[int, "Reply | StepmillError"]
"""By worker of the node, the reply to a request, or why there is none; under -1 why no request was sent."""
