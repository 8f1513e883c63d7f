"""The slow side of a pool: requests to envs (calls, attributes, properties, rendering) and their futures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from stepmill.backends.base import Backend, Future
from stepmill.pool.arguments import check_ids
from stepmill.pool.capsules import Call
from stepmill.pool.fault_handler import FaultHandler
from stepmill.pool.settings import Name
from stepmill.spec.errors import EnvError, StepmillError, UsageError, WorkerDied, join_errors
from stepmill.spec.options import OnFault, PoolOptions
from stepmill.worker.calls import SETTING, set_payload
from stepmill.worker.messages import Outcome, Record, Request, RequestKind, Value
from stepmill.worker.records import env_error


class PoolFuture:
    """The result of a call on several envs. Resolve futures in any order, as often as you like."""

    def __init__(
        self,
        env_ids: Sequence[int],
        parts: Sequence[tuple[Future, Sequence[int]]],
        on_death: Callable[[WorkerDied], None] = lambda error: None,
        on_error: Callable[[EnvError, int], StepmillError] = lambda error, place: error,
        *,
        died_of: Callable[[int], bool] = lambda worker: True,
        is_kept: bool = False,
    ) -> None:
        """`parts`: a worker's future, and the places in `env_ids` that it answers for.

        `on_death` hears of a death that is told, and may word it anew, `on_error` of what an env raised, once, with its place.
        `died_of` says whether a worker that is dead has died of its part, and not before it came to that. If not, and
        `is_kept`, then what was to be done is done to its successor, and its death need not be told here.
        """
        self.env_ids = tuple(env_ids)
        self._parts = tuple(parts)
        self._on_death = on_death
        self._on_error = on_error
        self._died_of = died_of
        self._is_kept = is_kept
        self._errors: dict[int, StepmillError] = {}

    @property
    def is_done(self) -> bool:
        """Whether `result` returns or raises at once, as far as is known now."""
        return all(future.is_done for future, _ in self._parts)

    def result(self, timeout_s: float | None = None) -> tuple[Any, ...]:
        """Return one value per env, in the order of the envs that were named; wait for them.

        Args:
            timeout_s: seconds from now; None is `call_timeout_s` from when the call was made.
        Raises:
            EnvError: an env raised; the faults of other envs are in `others`.
            EnvTimeout: not done yet. Nothing is lost: ask again.
            WorkerDied: a worker is gone, and with it the answer.
        """
        values: list[Any] = [None] * len(self.env_ids)
        errors: list[StepmillError] = []
        for future, places in self._parts:
            if self._is_kept and self._died_before(future, timeout_s):
                continue
            for place, outcome in zip(places, self._outcomes(future, timeout_s), strict=True):
                if isinstance(outcome, Value):
                    values[place] = outcome.value
                else:
                    errors.append(self._error_of(outcome, place))
        if errors:
            raise join_errors(errors)
        return tuple(values)

    def refused(self) -> list[int]:
        """Return the places of the envs that are known not to have done it: they raised, or their worker died of it."""
        refused = []
        for future, places in self._parts:
            outcomes = future.peek()
            if outcomes is not None:
                refused += [
                    place for place, outcome in zip(places, outcomes, strict=True) if not isinstance(outcome, Value)
                ]
            elif future.has_failed and self._died_of(future.worker):
                refused += places
        return refused

    def _died_before(self, future: Future, timeout_s: float | None) -> bool:
        try:
            future.result(timeout_s)
        except WorkerDied:
            return not self._died_of(future.worker)
        return False

    def _error_of(self, record: Record, place: int) -> StepmillError:
        if place not in self._errors:
            self._errors[place] = self._on_error(env_error(record, self.env_ids[place]), place)
        return self._errors[place].with_traceback(None)

    def _outcomes(self, future: Future, timeout_s: float | None) -> tuple[Outcome, ...]:
        try:
            return future.result(timeout_s)
        except WorkerDied as error:
            self._on_death(error)
            raise


class EnvRequests:
    """Sends requests to the envs of a pool. A request to an env runs after the commands sent to it before."""

    def __init__(
        self,
        backend: Backend,
        faults: FaultHandler,
        locations: Sequence[tuple[int, int]],
        options: PoolOptions,
        *,
        num_envs: int,
    ) -> None:
        """`locations`: of every env object, its worker and its position there."""
        self.ids = itertools.count(1)
        self._backend = backend
        self._faults = faults
        self._locations = locations
        self._num_envs = num_envs
        self._num_spares = options.spare_envs
        self._call_timeout_s = options.call_timeout_s
        # Under this policy the next step reports the death, and the successor is given what was set.
        self._keeps_settings = options.on_fault is OnFault.TRUNCATE

    def checked_ids(self, env_ids: Any) -> list[int]:
        """Return the named envs, or all; those from num_envs on are spares."""
        ids = list(range(self._num_envs)) if env_ids is None else [int(env_id) for env_id in env_ids]
        check_ids(ids, self._num_envs, self._num_spares)
        return ids

    def send(self, kind: RequestKind, env_ids: Any, payload: object) -> PoolFuture:
        """Send the same request to the named envs."""
        return self._send(kind, self.checked_ids(env_ids), lambda places: payload)

    def set(self, kind: RequestKind, name: Name, values: Any, env_ids: Any) -> None:
        """Set something on the named envs, one value each or one for all, and remember it for rebuilt envs."""
        ids = self.checked_ids(env_ids)
        is_common = not isinstance(values, (list, tuple))
        if env_ids is None and (is_common or len(values) > len(ids)):
            ids += range(self._num_envs, self._num_envs + self._num_spares)
        column = [values] * len(ids) if is_common else list(values)
        if len(column) != len(ids):
            raise UsageError(
                f"{name!r} is to be set to {len(column)} values on {len(ids)} envs; give one per env, or one for all"
            )
        workers = self._faults.workers
        servers = [workers.state.server_of(env_id) for env_id in ids]
        before = workers.put_settings(kind, name, servers, column)
        try:
            future = self._send(kind, ids, lambda places: set_payload(name, [column[place] for place in places]))
        except BaseException:  # sent to none
            workers.put_back_settings(kind, name, servers, before)
            raise
        try:
            future.result()
        except StepmillError:
            refused = future.refused()
            workers.put_back_settings(kind, name, [servers[at] for at in refused], [before[at] for at in refused])
            raise

    def _send(
        self, kind: RequestKind, ids: Sequence[int], payload_for: Callable[[Sequence[int]], object]
    ) -> PoolFuture:
        faults, workers, state = self._faults, self._faults.workers, self._faults.workers.state
        faults.before_call((state.worker_of(env_id) for env_id in ids), self._call_timeout_s)
        faults.raise_errors()
        servers = [state.server_of(env_id) for env_id in ids]
        places_of: dict[int, list[int]] = {}
        for place, server in enumerate(servers):
            places_of.setdefault(self._locations[server][0], []).append(place)
        requests = {
            worker: Request(
                id=next(self.ids),
                kind=kind,
                servers=tuple(self._locations[servers[place]][1] for place in places),
                after=tuple(state.ticket_of_server(servers[place]) for place in places),
                payload=payload_for(places),
            )
            for worker, places in places_of.items()
        }
        parts = [(future, places_of[future.worker]) for future in self._backend.call(requests)]
        if faults.replayer is not None:
            for future, places in parts:
                faults.replayer.add_request([servers[place] for place in places], future)
        on_death, on_error = workers.death_callback(), self._capsule_writer(kind, ids, payload_for)
        is_kept = kind in SETTING and self._keeps_settings
        return PoolFuture(ids, parts, on_death, on_error, died_of=state.died_in_request, is_kept=is_kept)

    def _capsule_writer(
        self, kind: RequestKind, ids: Sequence[int], payload_for: Callable[[Sequence[int]], object]
    ) -> Callable[[EnvError, int], StepmillError]:
        """Return what writes a crash capsule of what an env raises in this request; reading an attribute needs none."""
        capsules = self._faults.capsules
        if kind is RequestKind.GET_ATTR or not capsules.is_wanted:
            return lambda error, place: error
        places = [capsules.place_of(env_id) for env_id in ids]

        def write(error: EnvError, place: int) -> StepmillError:
            return capsules.keep_call(error, ids[place], Call(kind, payload_for([place]), places[place]))

        return write
