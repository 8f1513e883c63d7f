"""What rebuilt envs get again: the newest settings of the user or, in a replay, all calls at their places in the episodes.

The pool state logs actions and results. The call log has the other requests that change an env, `call` and `set_attr`:

    construction ─ call ─ reset ─ step ─ call ─ step ─┊─ call      ┊ the newest received result
                   place 0        place 2                place 3: after the pending command
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stepmill.backends.base import Future
from stepmill.pool.events import ServerView
from stepmill.worker.calls import SETTING_KINDS, set_payload
from stepmill.worker.messages import Request, RequestKind, Value, dump, load

Name: TypeAlias = "str | Callable[[Any, Any], object]"
"""The name of an attribute, or a function that sets something."""

_MISSING = object()
_NUM_CHECKS = 4  # how many calls without a reply are checked for each call that is added


@dataclass(eq=False, slots=True)
class LoggedCall:
    """One call of one env.

    Attributes:
        name: the name of the method or attribute, or the function object itself, because a pickled copy is not equal to
            it.
        payload: the payload of the request for this env alone, pickled, because the caller may change the arguments
            later.
        episode, place: the call comes after this many commands of this episode, including the pending command.
        future, position: the future of the outcome, and the index of the outcome in it. The future is None once the
            outcome is known, so that the reply is freed.
        has_raised: whether the env raised an exception; None while this is not known.
    """

    kind: RequestKind
    name: object
    payload: bytes
    episode: int
    place: int
    future: Future | None
    position: int
    has_raised: bool | None = None

    def saved(self) -> dict[str, Any]:
        """Return what `CallLog.restore` needs. The payload is loaded, because plain values are saved without pickle."""
        self.update()
        names = ("episode", "place", "has_raised")
        return {"kind": int(self.kind), "payload": load(self.payload), **{name: getattr(self, name) for name in names}}

    def place_in(self, view: ServerView) -> int:
        """Return after how many commands of the episode the call was made. 0 means before the reset."""
        if self.episode == view.episode:
            return self.place
        # The call was made while the command that began this episode was pending.
        return 1 if self.episode == view.episode - 1 and self.place > view.length_before else 0

    def is_repeatable(self, view: ServerView) -> bool:
        """Return whether a new object is in the same state when the call is repeated on it.

        This is not so for a method that was called in an earlier episode: it is repeated before the reset of this one,
        without the steps that preceded it.
        """
        is_before_all = (self.episode, self.place) <= (0, 0)
        return self.kind is not RequestKind.CALL or is_before_all or self.place_in(view) > view.first_place

    def update(self) -> bool:
        """Store the outcome if the reply has arrived. Return True if the call certainly did not happen."""
        if self.future is None:
            return False
        outcomes = self.future.peek()
        if outcomes is None and not self.future.has_failed:
            return False
        self.future = None
        if outcomes is not None:
            self.has_raised = not isinstance(outcomes[self.position], Value)
        return outcomes is None

    def replaces(self, old: LoggedCall) -> bool:
        """Return whether this call has replaced the effect of an older one, and is known to have succeeded."""
        is_setting = self.kind is old.kind and self.kind in SETTING_KINDS
        is_there = (self.episode, self.place) == (old.episode, old.place)
        return is_setting and is_there and self.has_raised is False and self.name == old.name


class CallLog:
    """The calls and settings that each env object has got since it was constructed, up to a limit of memory."""

    def __init__(self, num_servers: int, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._calls: list[list[LoggedCall]] = [[] for _ in range(num_servers)]
        self._open: deque[tuple[int, LoggedCall]] = deque()  # calls without a reply yet
        self._incomplete: set[int] = set()
        self.size_bytes = 0

    def is_whole(self, server: int) -> bool:
        """Return whether the log has all calls of the object."""
        return server not in self._incomplete

    def calls_of(self, server: int) -> Sequence[LoggedCall]:
        """Return the object's calls in order, without those that are known not to have happened."""
        for call in list(self._calls[server]):
            self._update(server, call)
        return list(self._calls[server])

    def placed(self, view: ServerView) -> list[tuple[int, LoggedCall]]:
        """Return the calls of an env object with their places in its episode."""
        calls = self.calls_of(view.server)
        return [(call.place_in(view), call) for call in calls] if calls else []

    def add(self, server: int, request: Request, future: Future | None, position: int, at: tuple[int, int]) -> None:
        """Add a call of one env object, made at this (episode, place)."""
        if not self.is_whole(server):
            return
        try:
            payload = dump(_payload_of_one(request, position))
        except Exception:  # a call of an env in a thread may have arguments that cannot be pickled
            self.mark_incomplete(server)
            return
        self._add(server, LoggedCall(request.kind, _name_of(request), payload, *at, future, position))
        if self.size_bytes > self._limit_bytes:
            self.mark_incomplete(server)

    def _add(self, server: int, call: LoggedCall) -> None:
        for _ in range(min(len(self._open), _NUM_CHECKS)):
            self._check_reply(*self._open.popleft())
        calls = self._calls[server]
        if len(calls) > 1:
            self._update(server, calls[-1])
        if len(calls) > 1 and calls[-1].replaces(calls[-2]):
            self.size_bytes -= len(calls.pop(-2).payload)
        calls.append(call)
        self.size_bytes += len(call.payload)
        self._check_reply(server, call)

    def _check_reply(self, server: int, call: LoggedCall) -> None:
        self._update(server, call)
        if call.future is not None:
            self._open.append((server, call))

    def _update(self, server: int, call: LoggedCall) -> None:
        if not call.update():
            return
        if call in self._calls[server]:  # if not, a later call has replaced it
            self._calls[server].remove(call)
            self.size_bytes -= len(call.payload)

    def restore(self, server: int, saved: Sequence[Mapping[str, Any]]) -> None:
        """Replace the calls of an object by saved ones."""
        self.clear(server)
        for each in saved:
            kind, payload = RequestKind(each["kind"]), each["payload"]
            name = _name_of(Request(0, kind, (), (), payload))
            call = LoggedCall(kind, name, dump(payload), each["episode"], each["place"], None, 0, each["has_raised"])
            self._calls[server].append(call)
            self.size_bytes += len(call.payload)

    def mark_incomplete(self, server: int) -> None:
        """Clear the calls of an object for good, so that it can no longer be replayed."""
        self.clear(server)
        self._incomplete.add(server)

    def clear(self, server: int) -> None:
        """Clear the calls of an object that is about to be replaced. The new object does not get them."""
        self.size_bytes -= sum(len(call.payload) for call in self._calls[server])
        self._calls[server].clear()
        self._open = deque(entry for entry in self._open if entry[0] != server)
        self._incomplete.discard(server)


def _name_of(request: Request) -> object:
    name = request.payload[0] if isinstance(request.payload, tuple) else ""
    if request.kind in SETTING_KINDS or isinstance(name, str):
        return name
    return getattr(name, "__qualname__", type(name).__name__)  # only for error texts


def _payload_of_one(request: Request, position: int) -> object:
    if request.kind in SETTING_KINDS and isinstance(request.payload, tuple):
        name, values = request.payload
        return (name, (values[position],))
    return request.payload


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

    def saved(self, server: int) -> list[tuple[int, Name, Any]]:
        """Return the settings of a server as (kind of request, name, value)."""
        return [(int(kind), name, own[server]) for (kind, name), own in self._values.items() if server in own]

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
