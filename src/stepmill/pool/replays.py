"""Episodes that are played again, and the calls that were made in between.

The ledger logs actions and results. Here is what else changes an env: `call` and `set_attr`, each with its place.

    construction ─ call ─ reset ─ step ─ call ─ step ─┊─ call      ┊ the newest result received
                   place 0        place 2                place 3: after what is under way
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from stepmill import _native
from stepmill.backends.base import Backend, Future
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import PoolOptions
from stepmill.worker.messages import Request, RequestKind, Value, WorkerPlan, dump, load

_REPLAYED, _REPLAY_FAULT = -1, -2  # what Ledger.replay returns beside a step
_SETTERS = (RequestKind.SET_ATTR, RequestKind.SET_PROPERTY, RequestKind.KEEP_OPTIONS)
_LOGGED = (RequestKind.CALL, *_SETTERS)


@dataclass
class _Call:
    """One call of one env.

    Attributes:
        payload: of the request, for this env alone, pickled: the caller may change the arguments afterwards.
        episode, place: after so many commands of that episode, which may be the one under way then.
        future, position: whose outcome it is, and which of them.
    """

    kind: RequestKind
    payload: bytes
    episode: int
    place: int
    future: Future
    position: int

    @property
    def name(self) -> str:
        payload = load(self.payload)
        return str(payload[0]) if isinstance(payload, tuple) else ""


class CallLog:
    """The calls and attributes that each env was given since it was constructed, within a bound of memory."""

    def __init__(self, num_envs: int) -> None:
        self._calls: list[list[_Call]] = [[] for _ in range(num_envs)]
        self._lost: set[int] = set()
        self.size_bytes = 0

    def is_whole(self, env_id: int) -> bool:
        """Whether all calls of the env are here."""
        return env_id not in self._lost

    def of(self, env_id: int) -> Sequence[_Call]:
        """Return the env's calls, in order, but for those that are known not to have happened."""
        return [call for call in self._calls[env_id] if not call.future.has_failed]

    def note(self, env_id: int, call: _Call) -> None:
        """Add a call. An attribute that is set again at the same place replaces what it was set to before."""
        calls = self._calls[env_id]
        if calls and _replaces(call, calls[-1]):
            self.size_bytes -= len(calls.pop().payload)
        calls.append(call)
        self.size_bytes += len(call.payload)

    def lose(self, env_id: int) -> None:
        """Forget an env's calls for good: it cannot be played again any more."""
        self.size_bytes -= sum(len(call.payload) for call in self._calls[env_id])
        self._calls[env_id].clear()
        self._lost.add(env_id)


def _replaces(new: _Call, old: _Call) -> bool:
    is_same = new.kind is old.kind and new.kind in _SETTERS and (new.episode, new.place) == (old.episode, old.place)
    return is_same and new.name == old.name


class _DiffersError(Exception):
    """A call does not do again what it did."""


@dataclass(frozen=True)
class _Stand:
    """Where an env stands, as `Ledger.log_place` says: the episode, how many of its results were received, and so on."""

    episode: int
    length: int
    length_before: int
    is_pending: bool
    is_between: bool

    def place(self, call: _Call) -> int:
        """After how many commands of the episode a call comes; 0 is before its reset."""
        if call.episode == self.episode:
            return call.place
        # Made while the command was under way that has begun this episode.
        return 1 if call.episode == self.episode - 1 and call.place > self.length_before else 0


class Replays:
    """Brings envs back to where the user believes they are: from construction on, or from the last reset."""

    def __init__(self, plans: Sequence[WorkerPlan], backend: Backend, options: PoolOptions) -> None:
        seats = {env_id: (plan.worker, place) for plan in plans for place, env_id in enumerate(plan.env_ids)}
        self._seats = [seats[server] for server in range(len(seats))]
        self._has_spares = options.spare_envs > 0
        self._backend = backend
        self._limit_bytes = options.replay_log_bytes
        self._ids = itertools.count(-1, -1)  # of our own requests; those of the user count upwards
        self.log = CallLog(len(self._seats))

    def note(self, ledger: _native.Ledger, env_ids: Sequence[int], future: Future) -> None:
        """Log a request that was sent for these envs, if it may change them."""
        request = future.request
        if request.kind not in _LOGGED:
            return
        for position, env_id in enumerate(env_ids):
            if self._has_spares:  # ids are of servers here: whom they serve changes
                if request.kind is RequestKind.CALL:
                    self.log.lose(env_id)
                continue
            if not self.log.is_whole(env_id):
                continue
            stand = _Stand(*ledger.log_place(env_id))
            place = stand.length + 1 if stand.is_pending else stand.length
            try:
                payload = dump(_payload_of_one(request, position))
            except Exception:  # in a thread a call may take what cannot be kept
                self.log.lose(env_id)
                continue
            self.log.note(env_id, _Call(request.kind, payload, stand.episode, place, future, position))
            if self.log.size_bytes + ledger.log_bytes() > self._limit_bytes:
                self.log.lose(env_id)

    def play(self, ledger: _native.Ledger, env_id: int, *, is_new: bool) -> str | None:
        """Play an env's episode again; return why that is not possible, or None if it was, or its worker has died again.

        Args:
            ledger: of the pool.
            env_id: which env.
            is_new: its object was built anew, so that calls from before the episode are repeated, too.
        """
        worker = ledger.worker_of(env_id)
        try:
            reason = self._play(ledger, env_id, is_new=is_new)
        except _DiffersError as difference:
            reason = str(difference)
        except StepmillError as error:
            reason = f"a call could not be repeated: {error.message}"
        return None if ledger.is_dead(worker) else reason

    def _play(self, ledger: _native.Ledger, env_id: int, *, is_new: bool) -> str | None:
        if not self.log.is_whole(ledger.server_of(env_id)):
            if self._has_spares:
                return "its object was called, and with spare_envs calls are not repeated"
            return "its calls are more than replay_log_bytes hold, or cannot be pickled"
        stand = _Stand(*ledger.log_place(env_id))
        is_logged = not stand.is_between and ledger.can_replay(env_id)
        placed = [(stand.place(call), call) for call in self.log.of(env_id)]
        first = 0 if is_logged else stand.length
        for place, call in placed:
            is_undone = is_logged and call.kind in _SETTERS  # set to something else later on
            if place <= first and (is_new or is_undone):
                self._repeat(env_id, call)
        if stand.is_between and not stand.is_pending:
            return None  # the next reset finds it as it was
        if not stand.is_between and not is_logged:
            return "its log is not whole: too long, cut short before, or with actions of no fixed size"
        reason = self._play_log(ledger, env_id, [(place, call) for place, call in placed if place > first])
        if reason is None:
            for place, call in placed:
                if place > stand.length:  # it came after what is under way again
                    self._send(env_id, call, ledger.ticket_of(env_id))
        return reason

    def _play_log(self, ledger: _native.Ledger, env_id: int, placed: Sequence[tuple[int, _Call]]) -> str | None:
        def between(commands: int, ticket: int) -> None:
            for place, call in placed:
                if place == commands:
                    self._repeat(env_id, call, ticket)

        outcome = ledger.replay(env_id, sorted({place for place, _ in placed}), between)
        if outcome == _REPLAYED:
            return None
        return "it raised in between" if outcome == _REPLAY_FAULT else f"step {outcome} gave another result than before"

    def _repeat(self, env_id: int, call: _Call, ticket: int = 0) -> None:
        outcome = self._send(env_id, call, ticket).result()[0]
        then = call.future.peek()
        if then is not None and isinstance(outcome, Value) is not isinstance(then[call.position], Value):
            raise _DiffersError(f"{call.name!r} of it raised, or no longer did, when it was called again")

    def _send(self, env_id: int, call: _Call, ticket: int) -> Future:
        worker, server = self._seats[env_id]
        request = Request(next(self._ids), call.kind, (server,), (ticket,), load(call.payload))
        return self._backend.call(worker, request)


def _payload_of_one(request: Request, position: int) -> object:
    if request.kind in _SETTERS and isinstance(request.payload, tuple):
        name, values = request.payload
        return (name, (values[position],))
    return request.payload
