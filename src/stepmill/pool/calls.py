"""The slow side of a pool: methods and attributes of envs, and rendering."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill import _native, timers
from stepmill.backends.base import Future
from stepmill.pool.arguments import check_ids
from stepmill.pool.capsules import Call
from stepmill.pool.keepsakes import Keepsakes, Name
from stepmill.pool.properties import PoolProperties
from stepmill.pool.start import Running
from stepmill.pool.timers import read_timers
from stepmill.spec.errors import EnvError, StepmillError, UsageError, WorkerDied, join_errors
from stepmill.spec.options import OnFault, PoolOptions
from stepmill.worker.calls import SETTING, call_payload, set_payload
from stepmill.worker.messages import Outcome, Record, Request, RequestKind, Value
from stepmill.worker.records import env_error

EnvIds = Sequence[int] | NDArray[np.integer[Any]]


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


class PoolCalls:
    """The part of `Pool` that makes slow requests. A request to an env runs after the commands sent to it before."""

    num_envs: int
    options: PoolOptions
    _num_spares: int
    _running: Running
    _ledger: _native.Ledger
    _keepsakes: Keepsakes
    _request_ids: itertools.count[int]

    def call(
        self, name: str | Callable[..., Any], *args: Any, env_ids: EnvIds | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call a method of envs, through wrappers; an attribute that is no method is returned.

        Args:
            name: of the method; or a function, which is called in the worker with the env, outermost wrapper and all, as
                its first argument.
            *args, **kwargs: for every env; they travel by cloudpickle.
            env_ids: which envs; None is all.
        Returns:
            One result per env.
        """
        return self.call_async(name, *args, env_ids=env_ids, **kwargs).result()

    def call_async(
        self, name: str | Callable[..., Any], *args: Any, env_ids: EnvIds | None = None, **kwargs: Any
    ) -> PoolFuture:
        """Begin a `call`; the future's `result()` gives its results."""
        payload = call_payload(name, args, kwargs)
        return self._request(RequestKind.CALL, self._named(env_ids), lambda places: payload)

    def get_attr(self, name: str | Callable[[Any], Any], *, env_ids: EnvIds | None = None) -> tuple[Any, ...]:
        """Return an attribute of envs, through wrappers, one per env.

        Instead of a name, a function that is called in the worker with the env, and only reads: unlike what `call` does, it
        is not repeated when an episode is played again.
        """
        return self._request(RequestKind.GET_ATTR, self._named(env_ids), lambda places: name).result()

    def set_attr(self, name: Name, values: Any, *, env_ids: EnvIds | None = None) -> None:
        """Set an attribute of envs, on the wrapper that has it. Envs that are built anew are given its newest value.

        Args:
            name: of the attribute; or a function, which is called in the worker with the env, outermost wrapper and all,
                and its value, for what takes more than an attribute. Give the same function object each time.
            values: a list or tuple has one value per env; anything else is for all, spares too.
            env_ids: which envs; None is all. A value of its own stays with the env object, whichever env that serves;
                a list for all may have one more value for each spare.
        """
        self._set(RequestKind.SET_ATTR, name, values, env_ids)

    @property
    def properties(self) -> PoolProperties:
        """Named values that envs are given beside the data: `set(name, value)`, `get(name)`, `list()`."""
        return PoolProperties(partial(self._set, RequestKind.SET_PROPERTY), self._read_properties)

    def timers(self) -> timers.Tree:
        """Return the calling thread's timers, with those of all workers added up under "workers"; see `stepmill.timers`."""
        return read_timers(self._running, self._request_ids)

    def render(self, env_ids: EnvIds | None = None) -> tuple[Any, ...]:
        """Return what each env's `render` gives, one per env."""
        return self._request(RequestKind.RENDER, self._named(env_ids), lambda places: None).result()

    def _set(self, kind: RequestKind, name: Name, values: Any, env_ids: EnvIds | None) -> None:
        ids = self._named(env_ids)
        is_common = not isinstance(values, (list, tuple))
        if env_ids is None and (is_common or len(values) > len(ids)):
            ids += range(self.num_envs, self.num_envs + self._num_spares)
        column = [values] * len(ids) if is_common else list(values)
        if len(column) != len(ids):
            raise UsageError(
                f"{name!r} is to be set to {len(column)} values on {len(ids)} envs; give one per env, or one for all"
            )
        servers = [self._server_of(env_id) for env_id in ids]
        before = self._keepsakes.note(kind, name, servers, column)
        try:
            future = self._request(kind, ids, lambda places: set_payload(name, [column[place] for place in places]))
        except BaseException:  # sent to none
            self._keepsakes.take_back(kind, name, servers, before)
            raise
        try:
            future.result()
        except StepmillError:
            self._keepsakes.take_back(kind, name, [servers[place] for place in future.refused()], before)
            raise

    def _read_properties(self, env_ids: EnvIds | None) -> tuple[dict[str, Any], ...]:
        return self._request(RequestKind.GET_PROPERTIES, self._named(env_ids), lambda places: None).result()

    def _named(self, env_ids: EnvIds | None) -> list[int]:
        ids = list(range(self.num_envs)) if env_ids is None else [int(env_id) for env_id in env_ids]
        check_ids(ids, self.num_envs, self._num_spares)
        return ids

    def _server_of(self, env_id: int) -> int:
        return self._ledger.server_of(env_id)

    def _request(self, kind: RequestKind, ids: Sequence[int], payload_for: Any) -> PoolFuture:
        running = self._running
        errors = running.recovery.bring_back(self._ledger.worker_of(env_id) for env_id in ids)
        if errors:
            raise join_errors(errors)
        servers = [self._server_of(env_id) for env_id in ids]
        places_of: dict[int, list[int]] = {}
        for place in range(len(ids)):
            places_of.setdefault(running.seats[servers[place]][0], []).append(place)
        requests = {
            worker: Request(
                id=next(self._request_ids),
                kind=kind,
                servers=tuple(running.seats[servers[place]][1] for place in places),
                after=tuple(self._ledger.ticket_of_server(servers[place]) for place in places),
                payload=payload_for(places),
            )
            for worker, places in places_of.items()
        }
        parts = [(future, places_of[future.worker]) for future in running.backend.call(requests)]
        if running.recovery.replays is not None:
            for future, places in parts:
                running.recovery.replays.note(self._ledger, [servers[place] for place in places], future)
        on_death, on_error = running.recovery.restarts.witness(), self._capsule_keeper(kind, ids, payload_for)
        # Under this policy the next step tells of the death, and who comes then is given what was set.
        is_kept = kind in SETTING and self.options.on_fault is OnFault.TRUNCATE
        return PoolFuture(ids, parts, on_death, on_error, died_of=self._ledger.died_in_request, is_kept=is_kept)

    def _capsule_keeper(
        self, kind: RequestKind, ids: Sequence[int], payload_for: Callable[[Sequence[int]], object]
    ) -> Callable[[EnvError, int], StepmillError]:
        """Return what writes a crash capsule of what an env raises in this request; reading an attribute needs none."""
        desk = self._running.recovery.capsules
        if kind is RequestKind.GET_ATTR or not desk.is_wanted:
            return lambda error, place: error
        places = [desk.place_of(env_id) for env_id in ids]

        def keep(error: EnvError, place: int) -> StepmillError:
            return desk.keep_call(error, ids[place], Call(kind, payload_for([place]), places[place]))

        return keep
