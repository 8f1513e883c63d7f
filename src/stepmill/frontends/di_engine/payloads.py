"""The requests and replies of an `EnvSupervisor`, with the fields of DI-engine's payloads."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ChildType(Enum):
    """Where envs run; members of DI-engine's enum of that name are accepted, too."""

    PROCESS = "process"
    THREAD = "thread"


@dataclass
class SendPayload:
    """A request to one env."""

    proc_id: int
    req_id: str = field(default_factory=lambda: uuid.uuid1().hex)
    method: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecvPayload:
    """The reply to a request: `data`, or `err` and, for a step, an abnormal timestep as `data`."""

    proc_id: int
    req_id: str | None = None
    method: str | None = None
    data: Any = None
    err: Exception | None = None
    extra: Any = None
