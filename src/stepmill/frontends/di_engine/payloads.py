"""What an `EnvSupervisor` is asked, and what it answers: DI-engine's payloads."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ChildType(Enum):
    """What an env runs in; ding's own enum will do as well."""

    PROCESS = "process"
    THREAD = "thread"


@dataclass
class SendPayload:
    """What one env is asked to do."""

    proc_id: int
    req_id: str = field(default_factory=lambda: uuid.uuid1().hex)
    method: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class RecvPayload:
    """What came of it: `data`, or `err` and, for a step, an abnormal timestep as `data`."""

    proc_id: int
    req_id: str | None = None
    method: str | None = None
    data: Any = None
    err: Exception | None = None
    extra: Any = None
