"""Requests to envs (calls, attributes, properties, rendering), and their futures.

A request runs between two steps of an env.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepmill.backends.base import Future, traits_of
from stepmill.pool.arguments import checked_ids
from stepmill.pool.call_log import Name
from stepmill.pool.crash_reporter import PositionedCall
from stepmill.pool.events import FaultKind, Remedy, ServerView
from stepmill.pool.faults import LATE, late_call_error
from stepmill.pool.start import PoolRuntime
from stepmill.pool.workers import WorkerState
from stepmill.spec.errors import ClosedPoolError, StepmillError, UsageError, WorkerDied, join_errors
from stepmill.spec.options import PoolOptions
from stepmill.worker.calls import SETTING_KINDS, set_payload
from stepmill.worker.env_host import REQUEST_COUNTER_MASK
from stepmill.worker.error_records import env_error
from stepmill.worker.messages import ErrorRecord, Request, RequestKind, Value, dump, load
from stepmill.worker.signals import defer_signals


@dataclass(frozen=True)
class EnvCall:
    """A request to some envs.

    Attributes:
        kind: the kind of the request.
        env_ids: the envs that get the request. An index of this tuple is called a place.
        payload_for: `payload_for(places)` returns the payload for the envs at these places.
        positions: for each place, the position of the env when the call was made. Empty if no capsule is wanted.
    """

    kind: RequestKind
    env_ids: tuple[int, ...]
    payload_for: Callable[[Sequence[int]], object]
    positions: Sequence[object]


@dataclass(frozen=True, eq=False)
class SentPart:
    """The part of a call that was sent to one lane.

    Attributes:
        future: the reply of the lane.
        places: the places of the call that the reply is for.
        generation: how often the worker had been restarted when the request was sent.
        num_requests: how many requests had been sent to the lane then, including this one; or fewer, if others were sent at the same time.
    """

    future: Future
    places: Sequence[int]
    generation: int
    num_requests: int


class PoolFuture:
    """The result of a call of several envs, as `Pool.call_async` returns it.

    The results of several futures may be requested in any order. `result` may be called more than once.

    Attributes:
        env_ids: the envs that are called.
    """

    def __init__(self, requests: EnvRequests, call: EnvCall, parts: Sequence[SentPart]) -> None:
        """Only `EnvRequests` makes futures."""
        self.env_ids = call.env_ids
        self._requests = requests
        self._call = call
        self._parts = list(parts)
        self._errors: dict[int, StepmillError] = {}
        self._unserved: set[SentPart] = set()  # parts that a dead worker did not read, to be sent to its successor

    @property
    def is_done(self) -> bool:
        """Whether all replies have arrived, so that `result` returns or raises an error without waiting.

        If a worker has died, `result` may send its requests again, and then waits for the new replies.
        """
        return all(part.future.is_done for part in self._parts)

    def _watch(self, callback: Callable[[], object]) -> SentPart | None:
        """Watch the first part that is not done, as `Future.watch` does, and return it. `result(0)` then may repeat the call.

        If it is to be sent to a rebuilt env, nothing announces that. This then returns None: call `result(0)` after a while.
        """
        part = next((part for part in self._parts if part in self._unserved or not part.future.is_done), self._parts[0])
        if part in self._unserved:
            return None
        part.future.watch(callback)
        return part

    def result(self, timeout_s: float | None = None) -> tuple[Any, ...]:
        """Wait for the replies, and return one value per env, in the order of `env_ids`.

        Args:
            timeout_s: seconds from now. None waits until `workers.call_timeout_s` after the call was made.
        Raises:
            EnvError: an env raised an exception. The errors of other envs are in `others`.
            EnvTimeout: a reply has not arrived in time. Nothing is lost, and `result` may be called again.
            WorkerDied: a worker died during the call, and its result is lost.
            ClosedPoolError: the pool was closed before the replies arrived.
        """
        values: list[Any] = [None] * len(self.env_ids)
        errors: list[StepmillError] = []
        at = 0
        while at < len(self._parts):
            part = self._parts[at]
            try:
                outcomes = part.future.result(timeout_s)
            except WorkerDied as error:
                if self._is_unserved(part):
                    self._parts[at : at + 1] = self._requests.repeat(self._call, part, timeout_s)
                elif self._requests.is_left_to_successor(self._call, part):
                    at += 1
                else:
                    self._requests.recovery.report_death_in_call(error, part.generation)
                    raise
                continue
            at += 1
            self._requests.workers.record_replies(part.future.lane, part.num_requests)
            for place, outcome in zip(part.places, outcomes, strict=True):
                if isinstance(outcome, Value):
                    values[place] = outcome.value
                else:
                    errors.append(self._error_of(outcome, place))
        if errors:
            raise join_errors(errors)
        return tuple(values)

    def _is_unserved(self, part: SentPart) -> bool:
        """Return whether a part is to be sent to the successor of its worker, which died before it read the part.

        This is asked for all later parts of the worker, too: after its restart, nothing says which of them were read.
        """
        if part not in self._unserved and self._requests.may_repeat(part):
            later = self._parts[self._parts.index(part) :]
            self._unserved.update(
                each for each in later if each.future.worker == part.future.worker and self._requests.may_repeat(each)
            )
        return part in self._unserved

    def failed_places(self) -> list[int]:
        """Return the places of the envs that did not do the request.

        These are envs that raised an exception, whose worker died in the request, or that were not called.
        """
        failed: list[int] = []
        for part in self._parts:
            outcomes = part.future.peek()
            if outcomes is not None:
                failed += [
                    place
                    for place, outcome in zip(part.places, outcomes, strict=True)
                    if not isinstance(outcome, Value)
                ]
            elif part in self._unserved or (part.future.has_failed and self._requests.died_in_request(part)):
                failed += part.places
        return failed

    def _error_of(self, record: ErrorRecord, place: int) -> StepmillError:
        if place not in self._errors:
            self._errors[place] = self._requests.make_error(record, self._call, place)
        return self._errors[place].with_traceback(None)


class EnvRequests:
    """Sends requests to the envs of a pool. A request runs after the commands that were sent to its env before."""

    def __init__(self, runtime: PoolRuntime, options: PoolOptions, *, num_envs: int) -> None:
        self.ids = itertools.count(1)
        self._backend, self._is_inline = runtime.backend, traits_of(runtime.backend).is_inline
        self._revival = runtime.revival
        self.recovery = runtime.revival.recovery
        self.workers = self.recovery.workers
        self._server_locations = runtime.server_locations
        self._num_envs = num_envs
        self._num_spares = options.resets.spare_envs
        self.num_servers = num_envs + self._num_spares
        self._call_timeout_s = options.workers.call_timeout_s

    def checked_ids(self, env_ids: Any) -> list[int]:
        """Return these env ids as ints, or all if `env_ids` is None. Ids from num_envs on are those of spares."""
        if env_ids is None:
            return list(range(self._num_envs))
        return checked_ids(env_ids, self._num_envs, self._num_spares)

    def send(self, kind: RequestKind, env_ids: Any, payload: object, timeout_s: float | None = None) -> PoolFuture:
        """Send the same request to these envs.

        Before, wait at most `timeout_s` until the envs are rebuilt. None is `workers.call_timeout_s`.
        """
        return self._send(kind, self.checked_ids(env_ids), lambda places: payload, timeout_s)

    def send_each(
        self, kind: RequestKind, values: Mapping[int, object], payload_of: Callable[[Sequence[object]], object]
    ) -> PoolFuture:
        """Send a request to the envs of `values`, with a value for each. `payload_of(values)` makes the payload for some."""
        ids = list(values)
        return self._send(kind, ids, lambda places: payload_of([values[ids[place]] for place in places]))

    def set(self, kind: RequestKind, name: Name, values: Any, env_ids: Any) -> None:
        """Set an attribute, a property or reset options on these envs, and store the values for rebuilt envs.

        `values` is a list or tuple with one value per env, or one value for all.
        """
        ids = self.checked_ids(env_ids)
        is_common = not isinstance(values, (list, tuple))
        if env_ids is None and (is_common or len(values) > len(ids)):
            ids += range(self._num_envs, self._num_envs + self._num_spares)
        column = [values] * len(ids) if is_common else list(values)
        if len(column) != len(ids):
            raise UsageError(
                f"got {len(column)} values of {name!r} for {len(ids)} envs; give one per env, or one for all"
            )
        workers = self.workers
        servers = [view.server for view in workers.state.view(env_ids=ids)]
        settings = [workers.settings_of(server) for server in servers]
        kept: Any = column
        if workers.can_restart_living:
            with contextlib.suppress(Exception):  # what cannot be copied is re-applied as it is then
                kept = load(dump(column))  # the caller may change a value later
        before = [settings[at].put(kind, name, server, kept[at]) for at, server in enumerate(servers)]

        def put_back(places: Iterable[int]) -> None:
            for at in places:
                settings[at].put_back(kind, name, servers[at], before[at])

        try:
            future = self._send(kind, ids, lambda places: set_payload(name, [column[place] for place in places]))
        except BaseException:  # no request was sent
            put_back(range(len(ids)))
            raise
        try:
            future.result()
        except StepmillError:
            put_back(future.failed_places())
            raise

    def _send(
        self,
        kind: RequestKind,
        ids: Sequence[int],
        payload_for: Callable[[Sequence[int]], object],
        timeout_s: float | None = None,
    ) -> PoolFuture:
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        self._wait_ready(self.workers.workers_of(ids).values(), timeout_s)
        # Reading an attribute needs no capsule.
        has_capsule = self.recovery.crash_reporter.is_wanted and kind is not RequestKind.GET_ATTR
        positions = [self.recovery.crash_reporter.position_of(env_id) for env_id in ids] if has_capsule else ()
        call = EnvCall(kind, tuple(ids), payload_for, positions)
        return PoolFuture(self, call, self._post(call, range(len(ids))))

    def _wait_ready(self, workers: Iterable[int], timeout_s: float | None) -> None:
        owners = set(workers)
        self._revival.wait_until_rebuilt(owners, timeout_s)
        if any(fault.worker in owners for fault in self.recovery.news.faults):
            self.recovery.news.raise_errors(is_receiving=False)
        self.recovery.news.warn()

    def _post(self, call: EnvCall, places: Sequence[int]) -> list[SentPart]:
        """Send a request to each lane of the envs at these places."""
        workers, replays = self.workers, self.recovery.replays
        found: list[ServerView] = workers.state.view(env_ids=[call.env_ids[place] for place in places])
        views = dict(zip(places, found, strict=True))
        places_of: dict[int, list[int]] = {}
        for place, view in views.items():
            places_of.setdefault(self._server_locations[view.server].lane, []).append(place)
        requests = {}
        for lane, own in places_of.items():
            servers = tuple([self._server_locations[views[place].server].local_index for place in own])
            after = tuple([views[place].ticket for place in own])
            requests[lane] = Request(next(self.ids), call.kind, servers, after, call.payload_for(own))
        parts = []
        # A call that is posted is also logged. Inline envs run in `call`, and a signal must interrupt them.
        with contextlib.nullcontext() if self._is_inline else defer_signals():
            for future in self._backend.call(requests):
                own, generation = places_of[future.lane], workers.records[future.worker].generation
                num_requests = (views[own[0]].num_requests + 1) & REQUEST_COUNTER_MASK
                parts.append(SentPart(future, own, generation, num_requests))
                replays.add_request([views[place].server for place in own], future)
        return parts

    # ---- the outcome of a part --------------------------------------------------------------------------------------

    def is_left_to_successor(self, call: EnvCall, part: SentPart) -> bool:
        """Return whether a part is a setting that a dead worker did not apply and that its successor applies.

        The next step reports the death.
        """
        is_kept = call.kind in SETTING_KINDS and self.recovery.remedy is Remedy.CUT
        return is_kept and not self.died_in_request(part)

    def may_repeat(self, part: SentPart) -> bool:
        """Return whether a part of a dead worker may be sent to its successor, as if the worker had not died.

        This is the case if the policy replays deaths, the worker died before it read the request, and no command was sent
        to these envs since.
        """
        if self.recovery.remedy is not Remedy.KEEP or self.died_in_request(part):
            return False
        record = self.workers.check_process(part.future.worker)
        if record.state is not WorkerState.DEAD_UNREPORTED or record.generation != part.generation:
            return False
        return tuple(view.ticket for view in self._views_of(part)) == part.future.request.after

    def died_in_request(self, part: SentPart) -> bool:
        """Return whether the lane of a part, whose worker has died, may have begun a request. True if the pool is closed."""
        try:
            return self._views_of(part)[0].is_lane_in_request
        except ClosedPoolError:
            return True

    def _views_of(self, part: SentPart) -> list[ServerView]:
        workers, future = self.workers, part.future
        servers = workers.records[future.worker].plan.lanes[future.lane]
        return workers.state.view([servers[local] for local in future.request.servers])

    def repeat(self, call: EnvCall, part: SentPart, timeout_s: float | None) -> list[SentPart]:
        """Wait for the successor of a dead worker, and send a part to it again."""
        self._wait_ready([part.future.worker], self._call_timeout_s if timeout_s is None else timeout_s)
        return self._post(call, part.places)

    def make_error(self, record: ErrorRecord, call: EnvCall, place: int) -> StepmillError:
        """Return the error of an env that raised an exception. Write a crash capsule if one is wanted."""
        env_id = call.env_ids[place]
        if record["type"] in LATE:
            return late_call_error(record, env_id)
        error = env_error(record, env_id)
        if not call.positions:
            return error
        one = PositionedCall(call.kind, call.payload_for([place]), call.positions[place])
        return self.recovery.crash_reporter.report_fault(error, env_id, FaultKind.RAISED, one)


SetColumn = Callable[[str, Any, Any], None]
ReadAll = Callable[[Any], "tuple[dict[str, Any], ...]"]


class PoolProperties:
    """The properties of a pool's envs. `pool.properties` is such an object.

    A property is a named value that is not part of the data, such as a parameter of a simulation. The worker passes it
    to the method `set_property(name, value)` of an env or of one of its wrappers. If there is no such method, the worker
    stores it in the dict `env.unwrapped.properties`. The change takes effect after the commands that were sent to the
    env before it, and before those that are sent after it. Rebuilt envs get their properties again.
    """

    def __init__(self, set_column: SetColumn, read_all: ReadAll) -> None:
        self._set_column = set_column
        self._read_all = read_all

    def set(self, name: str, value: Any, *, env_ids: Sequence[int] | None = None) -> None:
        """Set a property of envs.

        Args:
            name: the name of the property.
            value: a list or tuple with one value per env, or one value of another type for all envs.
            env_ids: which envs; None means all.
        Raises:
            UsageError: `name` is not a string, or the number of values is wrong.
            EnvError: the `set_property` of an env raised an exception.
        """
        if not isinstance(name, str):
            raise UsageError(f"the name of a property must be a string, not the {type(name).__name__} {name!r}")
        self._set_column(name, value, env_ids)

    def get(self, name: str, *, env_ids: Sequence[int] | None = None) -> tuple[Any, ...]:
        """Return the values of a property, one per env, in the order of `env_ids`.

        Args:
            name: the name of the property.
            env_ids: which envs; None means all.
        Raises:
            UsageError: an env has no property of this name.
        """
        columns = self._read_all(env_ids)
        ids = range(len(columns)) if env_ids is None else env_ids
        missing = [int(env_id) for env_id, column in zip(ids, columns, strict=True) if name not in column]
        if missing:
            raise UsageError(
                f"envs {missing} have no property {name!r}; set it first; properties.list() names those that exist"
            )
        return tuple(column[name] for column in columns)

    def list(self, *, env_ids: Sequence[int] | None = None) -> list[str]:
        """Return the names of the properties that at least one of these envs has, sorted."""
        return sorted({name for column in self._read_all(env_ids) for name in column})

    def read(self, *, env_ids: Sequence[int] | None = None) -> tuple[dict[str, Any], ...]:
        """Return a copy of all properties, as one dict from name to value per env, in the order of `env_ids`."""
        return self._read_all(env_ids)
