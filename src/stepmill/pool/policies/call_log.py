"""The calls that a replay repeats, and where in an env's episodes each was made.

The pool state logs actions and results. Here is what else changes an env: `call` and `set_attr`, each with its place.

    construction ─ call ─ reset ─ step ─ call ─ step ─┊─ call      ┊ the newest result received
                   place 0        place 2                place 3: after the command under way
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stepmill import _native
from stepmill.backends.base import Future
from stepmill.worker.calls import SETTING
from stepmill.worker.messages import Request, RequestKind, Value, dump

_LOOKS = 4  # at calls that had no reply yet, with each that is added


@dataclass(eq=False, slots=True)
class LoggedCall:
    """One call of one env.

    Attributes:
        name: of the method or attribute, or the very function that was given: loaded anew it would be another.
        payload: of the request, for this env alone, pickled: the caller may change the arguments afterwards.
        episode, place: after so many commands of that episode, which may be the one under way then.
        future, position: holds the outcome, and where in it; None once the outcome is known, since a reply may be large.
        has_raised: whether the env raised; None as long as that is not known.
    """

    kind: RequestKind
    name: object
    payload: bytes
    episode: int
    place: int
    future: Future | None
    position: int
    has_raised: bool | None = None

    def update(self) -> bool:
        """Take what is needed of the reply, if it is here; return whether it is known that the call did not happen."""
        if self.future is None:
            return False
        outcomes = self.future.peek()
        if outcomes is None:
            return self.future.has_failed
        self.has_raised = not isinstance(outcomes[self.position], Value)
        self.future = None
        return False

    def replaces(self, old: LoggedCall) -> bool:
        """Whether nothing is left of an older call. Until this one is known to have been done, something may be."""
        is_setting = self.kind is old.kind and self.kind in SETTING
        is_there = (self.episode, self.place) == (old.episode, old.place)
        return is_setting and is_there and self.has_raised is False and self.name == old.name


@dataclass(frozen=True)
class EpisodePosition:
    """Where an env object stands, as `log_place` of the pool state says.

    Attributes:
        episode, length: the episode, and how many of its results were received; `length_before`: of the one before.
        is_pending: whether a command of it is under way.
        is_between: whether that command begins an episode, or it waits for one that does.
        is_staged: whether its next episode was begun ahead of its time.
    """

    episode: int
    length: int
    length_before: int
    is_pending: bool
    is_between: bool
    is_staged: bool

    @classmethod
    def of(cls, state: _native.Ledger, server: int) -> EpisodePosition:
        """Return the position of an env object now."""
        return cls(*state.log_place(server))

    @property
    def next_place(self) -> int:
        """The place of a call that is made now."""
        return self.length + 1 if self.is_pending or self.is_staged else self.length

    @property
    def first(self) -> int:
        """Up to which place calls come before the part to be replayed: a reset that is under way, or the episode's."""
        return self.length if self.is_between else 0

    @property
    def is_reset_ahead(self) -> bool:
        """Whether a reset is under way or staged: calls with a place come after it."""
        return self.is_between and (self.is_pending or self.is_staged)

    def place(self, call: LoggedCall) -> int:
        """Return after how many commands of the episode a call comes; 0 is before its reset."""
        if call.episode == self.episode:
            return call.place
        # Made while the command was under way that has begun this episode.
        return 1 if call.episode == self.episode - 1 and call.place > self.length_before else 0


class CallLog:
    """The calls and settings that each env object was given since it was constructed, within a bound of memory."""

    def __init__(self, num_servers: int, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._calls: list[list[LoggedCall]] = [[] for _ in range(num_servers)]
        self._open: deque[tuple[int, LoggedCall]] = deque()  # calls whose reply was not here yet
        self._lost: set[int] = set()
        self.size_bytes = 0

    def is_whole(self, server: int) -> bool:
        """Whether all calls of the object are here."""
        return server not in self._lost

    def calls_of(self, server: int) -> Sequence[LoggedCall]:
        """Return the object's calls, in order, but for those that are known not to have happened."""
        for call in list(self._calls[server]):
            self._update(server, call)
        return list(self._calls[server])

    def placed(self, state: _native.Ledger, server: int) -> tuple[EpisodePosition, list[tuple[int, LoggedCall]]]:
        """Return where the object stands, and its calls with their places there."""
        position = EpisodePosition.of(state, server)
        return position, [(position.place(call), call) for call in self.calls_of(server)]

    def add(self, server: int, request: Request, future: Future | None, position: int, at: tuple[int, int]) -> None:
        """Add a call of one env object, made at this (episode, place)."""
        if not self.is_whole(server):
            return
        try:
            payload = dump(_payload_of_one(request, position))
        except Exception:  # in a thread a call may take what cannot be kept
            self.lose(server)
            return
        self._add(server, LoggedCall(request.kind, _name_of(request), payload, *at, future, position))
        if self.size_bytes > self._limit_bytes:
            self.lose(server)

    def _add(self, server: int, call: LoggedCall) -> None:
        for _ in range(min(len(self._open), _LOOKS)):
            self._look(*self._open.popleft())
        calls = self._calls[server]
        if len(calls) > 1:
            self._update(server, calls[-1])
        if len(calls) > 1 and calls[-1].replaces(calls[-2]):
            self.size_bytes -= len(calls.pop(-2).payload)
        calls.append(call)
        self.size_bytes += len(call.payload)
        self._look(server, call)

    def _look(self, server: int, call: LoggedCall) -> None:
        self._update(server, call)
        if call.future is not None:
            self._open.append((server, call))

    def _update(self, server: int, call: LoggedCall) -> None:
        if not call.update():
            return
        call.future = None
        if call in self._calls[server]:  # and was not replaced before that was known
            self._calls[server].remove(call)
            self.size_bytes -= len(call.payload)

    def lose(self, server: int) -> None:
        """Forget an object's calls for good: it cannot be replayed any more."""
        self.clear(server)
        self._lost.add(server)

    def clear(self, server: int) -> None:
        """Forget the calls of an object that is about to be replaced by another, which is not to be given them."""
        self.size_bytes -= sum(len(call.payload) for call in self._calls[server])
        self._calls[server].clear()
        self._open = deque(entry for entry in self._open if entry[0] != server)
        self._lost.discard(server)


def _name_of(request: Request) -> object:
    name = request.payload[0] if isinstance(request.payload, tuple) else ""
    if request.kind in SETTING or isinstance(name, str):
        return name
    return getattr(name, "__qualname__", type(name).__name__)  # for error texts alone


def _payload_of_one(request: Request, position: int) -> object:
    if request.kind in SETTING and isinstance(request.payload, tuple):
        name, values = request.payload
        return (name, (values[position],))
    return request.payload
