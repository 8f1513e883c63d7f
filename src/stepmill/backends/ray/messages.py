"""The messages between a pool and its nodes, except the arrays of commands and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stepmill.spec.errors import StepmillError
from stepmill.worker.messages import Reply, Request, WorkerReport, WorkerSettings


@dataclass(frozen=True)
class NodePlan:
    """The workers of one node. They and their servers are numbered within the node, in the order of the pool's numbers.

    Attributes:
        env_ids: by worker of the node, the env_ids of its envs in the pool.
        builds: by worker, its Build message as bytes.
        settings: the settings of the workers.
        host: the backend that runs the envs: "process", "thread" or "kernel".
        num_threads: how many threads run the envs of a kernel.
        limits: arguments of the reaper that watches the workers: time limits in seconds.
        sys_path: the sys.path of the pool's program.
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
        reports: the reports by worker, numbered within the node.
        address: the address of the machine, for messages.
        pid: the pid of the actor's process.
        node_id: Ray's id of the machine.
    """

    reports: tuple[WorkerReport, ...]
    address: str
    pid: int
    node_id: str


Replies = Mapping[int, "Reply | StepmillError"]
"""For each worker of a node, the reply to its request, or the error for which there is none. The key -1 has the error if none was sent."""


@dataclass(frozen=True)
class NodeCall:
    """Requests to workers of a node, by worker of the node. `number` is unique within the pool."""

    number: int
    requests: Mapping[int, Request]


class Exchange(NamedTuple):
    """The header of a message of commands. The node answers each exchange as soon as it has results.

    Attributes:
        number: the number of the exchange, from 1 on, in the order of sending. If one arrives twice, the node sends the
            same answer again.
        call: requests that come after these commands, and before those of the next exchange; an answer has the replies.
        acknowledged: the number up to which the pool has the answers of all exchanges.
        is_for_all: whether to wait, for a short time, until all commands are done.
    """

    number: int
    call: NodeCall | None
    acknowledged: int
    is_for_all: bool


class Answer(NamedTuple):
    """The header of a message of results.

    Attributes:
        number: the number of the exchange.
        exit_codes: by dead worker of the node, its exit code or the negative number of a signal, or None.
        error: why the node is unusable, or None.
        replies: the replies to calls, by number of the call. The results include all that the workers did before.
    """

    number: int
    exit_codes: Mapping[int, int | None]
    error: str | None
    replies: Mapping[int, Replies]


@dataclass(frozen=True)
class Raised:
    """An error of stepmill that a method of a node raised. As a value, because Ray wraps exceptions."""

    error: StepmillError
