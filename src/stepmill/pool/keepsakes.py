"""What the user has set on envs, to be set again on those that are built anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from stepmill.pool.start import Running
from stepmill.worker.calls import set_payload
from stepmill.worker.messages import Request, RequestKind, WorkerReport

Name: TypeAlias = "str | Callable[[Any, Any], object]"
"""Of an attribute, or a function that sets something."""


class Keepsakes:
    """The newest value, per env object, of everything set by a request. Holds no pool.

    A value is known by the kind of its request and a name: an attribute, a property, the options that resets keep.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._values: dict[tuple[RequestKind, Name], dict[int, Any]] = {}

    def note(self, kind: RequestKind, name: Name, ids: Sequence[int], column: Sequence[Any]) -> dict[int, Any]:
        """Remember the newest value of one thing, per env object (its server); return those that were known before."""
        values = self._values.setdefault((kind, name), {})
        before = {env_id: values[env_id] for env_id in ids if env_id in values}
        values.update(zip(ids, column, strict=True))
        return before

    def take_back(self, kind: RequestKind, name: Name, ids: Sequence[int], before: dict[int, Any]) -> None:
        """Remember again what `note` returned, for env objects that did not take the newest value."""
        values = self._values[kind, name]
        for env_id in ids:
            values.pop(env_id, None)
        values.update({env_id: before[env_id] for env_id in ids if env_id in before})

    def values_of(self, env_id: int) -> dict[Name, Any]:
        """Return the attributes that are set on an env, by name, and what functions have set, by function."""
        return {
            name: values[env_id]
            for (kind, name), values in self._values.items()
            if kind is RequestKind.SET_ATTR and env_id in values
        }

    def orders(self, env_ids: Sequence[int]) -> list[Request]:
        """Return what sets everything again on envs of one worker, in the order of old."""
        orders = []
        for (kind, name), values in list(self._values.items()):
            owned = [env_id for env_id in env_ids if env_id in values]
            if owned:
                payload = set_payload(name, [values[env_id] for env_id in owned])
                servers = tuple(self._running.seats[server][1] for server in owned)
                orders.append(Request(0, kind, servers, (0,) * len(owned), payload))
        return orders

    def is_replayed(self, env_id: int) -> bool:
        """Whether the env's calls are logged, and repeated when it is built anew."""
        return self._running.recovery.is_replayed(env_id)

    def began(self, report: WorkerReport) -> None:
        """Take note of a new worker's process."""
        self._running.pids[report.worker] = report.pid
