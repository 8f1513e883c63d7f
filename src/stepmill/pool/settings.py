"""Stores the settings to re-apply to rebuilt envs: attributes, properties and reset options that the user has set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from stepmill.worker.calls import set_payload
from stepmill.worker.messages import Request, RequestKind

Name: TypeAlias = "str | Callable[[Any, Any], object]"
"""The name of an attribute, or a function that sets something."""

_MISSING = object()


class AppliedSettings:
    """The newest values that the user has set on the envs of one worker.

    The key of a value is the kind of its request, a name, and the server that has it.
    """

    def __init__(self, lanes: Iterable[Sequence[int]]) -> None:
        """`lanes` has the servers of each lane of the worker."""
        self._places = {server: (lane, place) for lane, own in enumerate(lanes) for place, server in enumerate(own)}
        self._values: dict[tuple[RequestKind, Name], dict[int, Any]] = {}

    def put(self, kind: RequestKind, name: Name, server: int, value: Any) -> object:
        """Store a value, and return the previous one, for `put_back`."""
        values = self._values.setdefault((kind, name), {})
        before = values.get(server, _MISSING)
        values[server] = value
        return before

    def put_back(self, kind: RequestKind, name: Name, server: int, before: object) -> None:
        """Store the value that `put` returned, because the env did not accept the newer value."""
        values = self._values[kind, name]
        if before is _MISSING:
            values.pop(server, None)
        else:
            values[server] = before

    def attributes_of(self, server: int) -> dict[Name, Any]:
        """Return the attributes that were set on a server. The keys are names, or the functions that set them."""
        return {
            name: values[server]
            for (kind, name), values in self._values.items()
            if kind is RequestKind.SET_ATTR and server in values
        }

    def reset_options_of(self, server: int) -> Any:
        """Return the options that a reset of a server without options gets; None if none are stored."""
        return self._values.get((RequestKind.SET_RESET_OPTIONS, "options"), {}).get(server)

    def requests(self, servers: Sequence[int]) -> list[Request]:
        """Return requests that re-apply all settings of these servers, in the order in which they were first set."""
        requests = []
        for (kind, name), values in list(self._values.items()):
            owned: dict[int, list[int]] = {}  # by lane
            for server in servers:
                if server in values:
                    owned.setdefault(self._places[server][0], []).append(server)
            for lane, own in owned.items():
                payload = set_payload(name, [values[server] for server in own])
                places = tuple(self._places[server][1] for server in own)
                requests.append(Request(0, kind, places, (0,) * len(own), payload, lane))
        return requests
