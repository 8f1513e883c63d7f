"""Episodes that are played again, and the calls that were made in between.

The ledger logs actions and results. Here is what else changes an env: `call` and `set_attr`, each with its place.

    construction ─ call ─ reset ─ step ─ call ─ step ─┊─ call      ┊ the newest result received
                   place 0        place 2                place 3: after what is under way
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stepmill import _native
from stepmill.backends.base import Backend, Future
from stepmill.spec.errors import StepmillError
from stepmill.spec.options import PoolOptions
from stepmill.worker.calls import CHANGING, SETTING
from stepmill.worker.messages import Request, RequestKind, Value, WorkerPlan, dump, load

_REPLAYED, _REPLAY_FAULT = -1, -2  # what Ledger.replay returns beside a step
_LOOKS = 4  # at calls that had no reply yet, with each that is made
FAILED_BETWEEN = "it raised in between"  # which need not happen again


@dataclass(eq=False, slots=True)
class _Call:
    """One call of one env.

    Attributes:
        name: of the method or attribute, or the very function that was given: loaded anew it would be another.
        payload: of the request, for this env alone, pickled: the caller may change the arguments afterwards.
        episode, place: after so many commands of that episode, which may be the one under way then.
        future, position: whose outcome it is, and which of them; None once that is known, as a reply may be large.
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

    def settle(self) -> bool:
        """Take what is needed of the reply, if it is here; return whether it is known that the call did not happen."""
        if self.future is None:
            return False
        outcomes = self.future.peek()
        if outcomes is None:
            return self.future.has_failed
        self.has_raised = not isinstance(outcomes[self.position], Value)
        self.future = None
        return False


class CallLog:
    """The calls and attributes that each env object (server) was given since it was constructed, within a bound of memory."""

    def __init__(self, num_servers: int) -> None:
        self._calls: list[list[_Call]] = [[] for _ in range(num_servers)]
        self._open: deque[tuple[int, _Call]] = deque()  # whose reply was not here yet
        self._lost: set[int] = set()
        self.size_bytes = 0

    def is_whole(self, server: int) -> bool:
        """Whether all calls of the object are here."""
        return server not in self._lost

    def of(self, server: int) -> Sequence[_Call]:
        """Return the object's calls, in order, but for those that are known not to have happened."""
        for call in list(self._calls[server]):
            self._settle(server, call)
        return list(self._calls[server])

    def note(self, server: int, call: _Call) -> None:
        """Add a call. Of an attribute that was set again at the same place, what it was set to before is let go."""
        for _ in range(min(len(self._open), _LOOKS)):
            self._look(*self._open.popleft())
        calls = self._calls[server]
        if len(calls) > 1:
            self._settle(server, calls[-1])
        if len(calls) > 1 and _replaces(calls[-1], calls[-2]):
            self.size_bytes -= len(calls.pop(-2).payload)
        calls.append(call)
        self.size_bytes += len(call.payload)
        self._look(server, call)

    def _look(self, server: int, call: _Call) -> None:
        self._settle(server, call)
        if call.future is not None:
            self._open.append((server, call))

    def _settle(self, server: int, call: _Call) -> None:
        if not call.settle():
            return
        call.future = None
        if call in self._calls[server]:  # and was not replaced before that was known
            self._calls[server].remove(call)
            self.size_bytes -= len(call.payload)

    def lose(self, server: int) -> None:
        """Forget an object's calls for good: it cannot be played again any more."""
        self.begin_anew(server)
        self._lost.add(server)

    def begin_anew(self, server: int) -> None:
        """Forget the calls of an object that is about to be replaced by another, which is not to be given them."""
        self.size_bytes -= sum(len(call.payload) for call in self._calls[server])
        self._calls[server].clear()
        self._open = deque(entry for entry in self._open if entry[0] != server)
        self._lost.discard(server)


def _replaces(new: _Call, old: _Call) -> bool:
    """Whether nothing is left of an older call. Until the newer is known to have been done, something may be."""
    is_same = new.kind is old.kind and new.kind in SETTING and (new.episode, new.place) == (old.episode, old.place)
    return is_same and new.has_raised is False and new.name == old.name


class _DiffersError(Exception):
    """A call does not do again what it did."""


@dataclass(frozen=True)
class _Stand:
    """Where an env object stands, as `Ledger.log_place` says: the episode, how many of its results were received, and so on."""

    episode: int
    length: int
    length_before: int
    is_pending: bool
    is_between: bool
    is_staged: bool

    @property
    def next_place(self) -> int:
        """The place of a call that is made now."""
        return self.length + 1 if self.is_pending or self.is_staged else self.length

    @property
    def first(self) -> int:
        """Up to which place calls come before what is to be played again: a reset that is under way, or else the episode's."""
        return self.length if self.is_between else 0

    @property
    def is_waiting(self) -> bool:
        """Whether no result of it is under way, nor has any of its episode been received."""
        return self.is_between and not self.is_pending

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
        self._plans = plans
        self._backend = backend
        self._limit_bytes = options.replay_log_bytes
        self._ids = itertools.count(-1, -1)  # of our own requests; those of the user count upwards
        self._made: set[int] = set()  # calls (by id) that the object which is played now was given
        self.log = CallLog(len(self._seats))

    def note(self, ledger: _native.Ledger, servers: Sequence[int], future: Future) -> None:
        """Log a request that was sent for these env objects, if it may change them."""
        request = future.request
        if request.kind not in CHANGING:
            return
        for position, server in enumerate(servers):
            stand = _Stand(*ledger.log_place(server))
            self._add(server, request, future, position, (stand.episode, stand.next_place))
        self._share_memory(ledger)

    def begin_anew(self, ledger: _native.Ledger, worker: int, orders: Sequence[Request]) -> None:
        """A worker's envs are about to be built anew, and not to be played again: they are given these orders alone."""
        servers = self._plans[worker].env_ids
        for server in servers:
            self.log.begin_anew(server)
        for order in orders:
            for position, place in enumerate(order.servers):
                self._add(servers[place], order, None, position, (-1, 0))
        self._share_memory(ledger)

    def _add(self, server: int, request: Request, future: Future | None, position: int, at: tuple[int, int]) -> None:
        if not self.log.is_whole(server):
            return
        try:
            payload = dump(_payload_of_one(request, position))
        except Exception:  # in a thread a call may take what cannot be kept
            self.log.lose(server)
            return
        self.log.note(server, _Call(request.kind, _name_of(request), payload, *at, future, position))
        if self.log.size_bytes > self._limit_bytes // 2:
            self.log.lose(server)

    def _share_memory(self, ledger: _native.Ledger) -> None:
        """Leave to the episodes' logs what the calls do not take."""
        ledger.limit_logs(max(self._limit_bytes - self.log.size_bytes, 0))

    def recall(self, ledger: _native.Ledger, worker: int) -> dict[int, str]:
        """Give the env objects of a new worker that play no episode now the calls that they were given.

        Comes before anything else is done with that worker.

        Returns:
            Those for which that cannot be done, with the reason.
        """
        failures = {}
        for server in self._plans[worker].env_ids:
            stand = _Stand(*ledger.log_place(server))
            if not stand.is_waiting:
                continue
            try:
                self._recall(ledger, server, stand)
            except (_DiffersError, StepmillError) as failure:
                failures[server] = _words_of(failure)
        return {} if ledger.is_dead(worker) else failures

    def _recall(self, ledger: _native.Ledger, server: int, stand: _Stand) -> None:
        if not self.log.is_whole(server):
            raise _DiffersError(_NOT_WHOLE)
        _, placed = self._placed(ledger, server)
        for place, call in placed:
            if place == 0 or not stand.is_staged:
                self._repeat(server, call)
        if not stand.is_staged:
            return
        ledger.stage_again(server)
        for place, call in placed:
            if place > 0:
                self._send(server, call, ledger.ticket_of_server(server))

    def has_marks(self, ledger: _native.Ledger, env_id: int) -> bool:
        """Whether an env that lives on was given calls or attributes since its episode began, which no reset takes back."""
        stand, placed = self._placed(ledger, ledger.server_of(env_id))
        return any(place > stand.first for place, _ in placed)

    def wait_for_calls(self, worker: int) -> None:
        """Wait for the calls that a worker's envs still have to answer: who made them need not hear of its replacement."""
        calls = [call for server in self._plans[worker].env_ids for call in self.log.of(server)]
        for future in [call.future for call in calls if call.future is not None]:
            with contextlib.suppress(StepmillError):
                future.result()

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
        except (_DiffersError, StepmillError) as failure:
            reason = _words_of(failure)
        return None if ledger.is_dead(worker) else reason

    def _play(self, ledger: _native.Ledger, env_id: int, *, is_new: bool) -> str | None:
        server = ledger.server_of(env_id)
        stand, placed = self._placed(ledger, server)
        if stand.is_waiting:
            return None  # `recall` was there, and the next reset finds it as it was
        if not self.log.is_whole(server):
            return _NOT_WHOLE
        if not stand.is_between and not ledger.can_replay(env_id):
            return "its log is not whole: too long, cut short before, or with actions of no fixed size"
        since = [call for place, call in placed if place > stand.first]
        if not is_new and any(call.kind is RequestKind.CALL for call in since) and not stand.is_between:
            return "it was called since its episode began, and lives on: only a worker process can be replaced"
        for place, call in placed:
            is_undone = not stand.is_between and call.kind in SETTING  # set to something else later on
            if place <= stand.first and (is_new or is_undone):
                self._repeat(server, call)
        if not is_new and stand.is_between:
            for call in since:  # the object had them before the reset that is given again
                call.place = stand.length
            placed = []
        reason = self._play_log(ledger, env_id, [(place, call) for place, call in placed if place > stand.first])
        if reason is None:
            for place, call in placed:
                if place > stand.length:  # it came after what is under way again
                    self._send(server, call, ledger.ticket_of(env_id))
        return reason

    def _placed(self, ledger: _native.Ledger, server: int) -> tuple[_Stand, list[tuple[int, _Call]]]:
        stand = _Stand(*ledger.log_place(server))
        return stand, [(stand.place(call), call) for call in self.log.of(server)]

    def _play_log(self, ledger: _native.Ledger, env_id: int, placed: Sequence[tuple[int, _Call]]) -> str | None:
        server = ledger.server_of(env_id)

        def between(commands: int, ticket: int) -> None:
            for place, call in placed:
                if place == commands:
                    self._repeat(server, call, ticket)

        outcome = ledger.replay(env_id, sorted({place for place, _ in placed}), between)
        if outcome == _REPLAYED:
            return None
        return FAILED_BETWEEN if outcome == _REPLAY_FAULT else f"step {outcome} gave another result than before"

    def begin(self) -> None:
        """The next object has been given no call yet."""
        self._made.clear()

    def make_rest(self, server: int) -> None:
        """Give an object whose episode cannot be played again those calls that it lacks: they are in its log.

        Then what comes after this episode can be played again.
        """
        for call in self.log.of(server):
            if id(call) not in self._made:
                with contextlib.suppress(_DiffersError, StepmillError):
                    self._repeat(server, call)

    def _repeat(self, server: int, call: _Call, ticket: int = 0) -> None:
        self._made.add(id(call))
        outcome = self._send(server, call, ticket).result()[0]
        call.settle()
        if call.has_raised is not None and isinstance(outcome, Value) is call.has_raised:
            raise _DiffersError(f"{call.name!r} of it raised, or no longer did, when it was called again")

    def _send(self, server: int, call: _Call, ticket: int) -> Future:
        worker, place = self._seats[server]
        request = Request(next(self._ids), call.kind, (place,), (ticket,), load(call.payload))
        return self._backend.call({worker: request})[0]


_NOT_WHOLE = "its calls are more than half of replay_log_bytes holds, or cannot be pickled"


def _words_of(failure: _DiffersError | StepmillError) -> str:
    return f"a call could not be repeated: {failure.message}" if isinstance(failure, StepmillError) else str(failure)


def _name_of(request: Request) -> object:
    name = request.payload[0] if isinstance(request.payload, tuple) else ""
    if request.kind in SETTING or isinstance(name, str):
        return name
    return getattr(name, "__qualname__", type(name).__name__)  # that is for words alone: what it holds need not be kept


def _payload_of_one(request: Request, position: int) -> object:
    if request.kind in SETTING and isinstance(request.payload, tuple):
        name, values = request.payload
        return (name, (values[position],))
    return request.payload
