"""Turns the payloads of results, which are the parts outside arrays, into the info of a batch when it is first read.

A value that cannot be read is a fault of its env and affects no other value. It is omitted, `info["omitted"]` names it
in the row of its env, and the logger "stepmill" logs it once.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from opcode import opmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.infos import MAX_DICTS, OMITTED, InfoRows, LazyInfo, add_fixed, is_too_deep, merge, omission_error
from stepmill.spec.errors import BadOutput, EngineBug
from stepmill.spec.options import AutoresetMode, OnFault, PoolOptions, RetryIn
from stepmill.worker.error_records import describe_error
from stepmill.worker.messages import ErrorRecord, load

# (first row, payload, fault, objects). The payload is bytes, or a str that says why there are none, or None. The fault
# is the "fault" entry of an episode that was cut short, or None. The objects are those of this process to which the
# bytes refer, or None.
Payload = tuple[int, "bytes | str | None", "dict[str, str] | None", "list[object] | None"]
Episodes = tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]  # returns, lengths, and which ended
Info = Mapping[Any, Any]

_PLAIN_KEYS = (str, int, bool, float, bytes, type(None), np.str_)

_RAISE = opmap["RAISE_VARARGS"]
_log = logging.getLogger("stepmill")
_OVERWRITTEN = "its memory was overwritten, by its worker or by native code in one of the worker's envs"


def reserved_keys(options: PoolOptions, *, is_batched: bool) -> frozenset[str]:
    """Return the keys of infos that the pool uses with these options. Values of envs under these keys are omitted.

    Batched envs reset themselves, and set "final_obs" and "final_info" themselves.
    """
    names = {OMITTED}
    is_raised = (options.on_fault, options.restarts.on_raise or OnFault.RAISE) == (OnFault.RAISE, OnFault.RAISE)
    if not is_raised or (options.resets.retries and options.resets.retry_in is RetryIn.NEW):
        names.add("fault")
    if options.autoreset_mode is AutoresetMode.SAME_STEP and not is_batched:
        names |= {"final_obs", "final_info"}
    return frozenset(names)


class InfoParts(NamedTuple):
    """The infos of one batch, as native code passes them."""

    payloads: Sequence[Payload]
    finals: Sequence[tuple[int, object]]
    episodes: Episodes | None
    num_rows: int
    env_ids: NDArray[np.int64] | None  # the env of each row; None if env ids are row numbers
    fixed: dict[str, Any]


class InfoMaker:
    """Makes the infos of the batches of one pool. It does not refer to the pool, so that no cycle keeps the pool alive."""

    def __init__(self, rows_each: int | None, reserved: frozenset[str] = frozenset((OMITTED,))) -> None:
        self._rows_each = rows_each
        self._reserved = reserved
        self._logged: set[tuple[int | None, str]] = set()

    def make(self, *batch: Any) -> dict[str, Any]:
        """Return the info of a batch, which is decoded when it is first read. Native code passes the fields of `InfoParts`."""
        parts, known = InfoParts(*batch), list[InfoRows]()

        def read() -> InfoRows:
            if not known:  # once, because reading runs code of the user's classes
                known.append(list(self._rows(parts)))
            return known[0]

        return LazyInfo(lambda: self._merged(parts, read()), lambda rows: self._select(parts, read(), rows))

    def _select(self, batch: InfoParts, read: InfoRows, rows: Sequence[int] | None) -> InfoRows:
        """Return the infos of some rows, or of all, as `rows_of` does."""
        wanted = None if rows is None else set(rows)
        own = [(row, {**info}) for row, info in read if wanted is None or row in wanted]
        # The infos of a batched env are already merged, and include the parts of fixed size.
        return add_fixed(own, batch.fixed, rows) if batch.fixed and self._rows_each is None else own

    def _merged(self, batch: InfoParts, read: InfoRows) -> dict[str, Any]:
        merged = merge(read, batch.num_rows, rows_each=self._rows_each, env_ids=batch.env_ids)
        if OMITTED in merged:
            self._log_new(merged[OMITTED])
        if batch.episodes is not None:
            _add_episodes(merged, *batch.episodes)
        return {**batch.fixed, **merged}

    def _rows(self, batch: InfoParts) -> Iterator[tuple[int, dict[Any, Any]]]:
        finals = dict(batch.finals)
        reader = _Reader()
        for row, payload, fault, objects in batch.payloads:
            info: dict[Any, Any] = {}
            final_info: dict[Any, Any] | None = None
            if payload is not None:
                values = reader.read(payload, objects)
                info, final_info = values[0], values[1] if len(values) == 2 else None
                has_failed = reader.has_failed or _has_odd_key(info)
                if has_failed or not self._reserved.isdisjoint(info) or final_info is not None:
                    env_id = self._env_of(batch, row)
                    info = self._checked(info, "info", env_id)
                    final_info = None if final_info is None else self._checked(final_info, "final_info", env_id)
            if fault is not None:
                if row not in finals:
                    info = {**info, "fault": fault}
                final_info = {"fault": fault}
            if row in finals:
                yield row, {"final_obs": finals[row], "final_info": final_info}
            yield row, info

    def _env_of(self, batch: InfoParts, row: int) -> int:
        return row // (self._rows_each or 1) if batch.env_ids is None else int(batch.env_ids[row])

    def _checked(self, info: dict[Any, Any] | _Unreadable, leaf: str, env_id: int) -> dict[Any, Any]:
        """Return an info without values that cannot be read, and without values under reserved keys."""
        omissions: list[BadOutput] = []
        info = _without_unreadable(info, leaf, env_id, omissions)
        for key in sorted(self._reserved.intersection(info)):
            why = f"is omitted: the pool uses the key {key!r} of infos; give it another name"
            omissions.append(omission_error(f"{leaf}[{key!r}]", env_id, why))
        if not omissions:
            return info
        self._log_new([omissions])
        return {**{key: value for key, value in info.items() if key not in self._reserved}, OMITTED: tuple(omissions)}

    def _log_new(self, rows: Sequence[Sequence[BadOutput] | None]) -> None:
        """Log each of these errors, unless the same leaf of the same env was logged before."""
        for error in (error for errors in rows for error in errors or ()):
            if (error.env_id, error.leaf) not in self._logged:
                self._logged.add((error.env_id, error.leaf))
                _log.warning("%s", error.message, exc_info=error.__cause__)
            if error.__cause__ is not None:
                error.__cause__.__traceback__ = None  # its frames would keep their local objects alive


def _add_episodes(
    merged: dict[str, Any], returns: NDArray[np.float64], lengths: NDArray[np.int64], ended: NDArray[np.bool_]
) -> None:
    """Add the return and the length of each episode that ended, under the names of Gymnasium's RecordEpisodeStatistics.

    A return has the shape of the env's reward, which is one number per agent if there are agents. Rows whose env has
    its own "episode" keep it. If that is not a dict, nothing is added.
    """
    own = merged.setdefault("episode", {})
    if not isinstance(own, dict):
        return
    mask = merged.setdefault("_episode", np.zeros(len(ended), np.bool_))
    rows = ended & ~mask
    for key, values in (("r", returns), ("l", lengths)):
        before = own.get(key, np.zeros_like(values))
        fits = isinstance(before, np.ndarray) and before.shape == values.shape and before.dtype.kind in "biuf"
        if fits:
            in_shape = rows.reshape(rows.shape + (1,) * (values.ndim - 1))
            own[key] = np.where(in_shape, values, before)
            own[f"_{key}"] = own.get(f"_{key}", False) | rows
    merged["_episode"] = mask | rows


# ---- values that cannot be read ---------------------------------------------------------------------------------------


class _Unreadable:
    """Replaces a value whose pickle cannot be loaded."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class _Reader:
    """Reads the payloads of one batch. `has_failed` is True if a value of the last payload cannot be read."""

    def __init__(self) -> None:
        self.has_failed = False

    def read(self, payload: bytes | str, objects: list[object] | None) -> Sequence[Any]:
        """Return the info, and the final info if there is one, with `_Unreadable` in place of values that cannot be read."""
        self.has_failed = False
        try:
            values = _native.decode_all(payload, self._load, objects)  # type: ignore[arg-type]  # of a str below
        except BaseException as error:
            return (self._unreadable(error, payload),)
        is_whole = len(values) in (1, 2) and isinstance(values[0], (dict, _Unreadable))
        if is_whole and (len(values) == 1 or isinstance(values[1], (dict, _Unreadable))):
            return values
        self.has_failed = True
        return (_Unreadable(EngineBug(_OVERWRITTEN)),)

    def _load(self, data: bytes) -> object:
        try:
            return load(data)
        except BaseException as error:
            return self._unreadable(error)

    def _unreadable(self, error: BaseException, payload: bytes | str = b"") -> _Unreadable:
        if is_of_caller(error):
            raise error
        self.has_failed = True
        return _Unreadable(EngineBug(payload) if isinstance(payload, str) else error)


def _without_unreadable(
    value: dict[Any, Any] | _Unreadable, leaf: str, env_id: int, omissions: list[BadOutput]
) -> dict[Any, Any]:
    """Return a dict without unreadable values, without values that contain one, and without keys that dicts cannot find.

    Add an error to `omissions` for each.
    """
    if isinstance(value, _Unreadable):
        omissions.append(_unreadable(leaf, env_id, value))
        return {}
    readable = {}
    for key, item in value.items():
        problem = None if type(key) in _PLAIN_KEYS else _find_problem(key, value)
        if problem is not None:
            why = f"is omitted from {leaf}: {problem}; give keys that are strings or numbers"
            omissions.append(omission_error(f"a key of type {type(key).__name__}", env_id, why))
            continue
        place = f"{leaf}[{key!r}]"
        unreadable = _find_unreadable(key) or (None if type(item) is dict else _find_unreadable(item))
        if unreadable is not None:
            omissions.append(_unreadable(place if not isinstance(key, _Unreadable) else leaf, env_id, unreadable))
        else:
            is_readable = type(item) is not dict or is_too_deep(item)  # merging refuses dicts that are too deep
            readable[key] = item if is_readable else _without_unreadable(item, place, env_id, omissions)
    return readable


def _has_odd_key(info: object) -> bool:
    """Return whether a dict, or a dict in it, has a key whose class may be the user's."""
    dicts = [info] if type(info) is dict else []
    for found in itertools.islice(dicts, MAX_DICTS):  # merging refuses more
        if not all(type(key) in _PLAIN_KEYS for key in found):
            return True
        dicts += [item for item in found.values() if type(item) is dict]
    return False


def _find_problem(key: object, info: dict[Any, Any]) -> str | None:
    """Return why dicts cannot find a key, or None. A key is compared with those of other envs, and written as text."""
    try:
        is_equal = bool(key == key) and bool(key != "") and key in info
        is_found = is_equal and hash(key) == hash(key) and f"_{key}{key!r}" != ""
    except BaseException as error:
        if is_of_caller(error):
            raise
        return _text_of(error)
    return None if is_found else "its hash changes, or it does not equal itself"


def _unreadable(leaf: str, env_id: int, value: _Unreadable) -> BadOutput:
    why = f"cannot be read here: {_text_of(value.cause)}; give plain values, or classes that this process can unpickle"
    error = omission_error(leaf, env_id, why)
    error.__cause__ = value.cause
    return error


def _find_unreadable(value: object) -> _Unreadable | None:
    if isinstance(value, _Unreadable):
        return value
    if type(value) in (list, tuple, dict):  # made by the codec, which makes no cycles
        items: Any = value.values() if isinstance(value, dict) else value
        return next((found for item in items if (found := _find_unreadable(item)) is not None), None)
    return None


def describe_unreadable(error: BaseException) -> ErrorRecord:
    """Return the record of the fault of an env whose observation cannot be read. Native code calls this.

    Raises:
        BaseException: `error`, if the env did not cause it.
    """
    if is_of_caller(error):
        raise error
    return describe_error(error, "output of step")


def _text_of(error: BaseException) -> str:
    record = describe_error(error, "info")
    return f"{record['type']}: {record['message']}" if record["message"] else record["type"]


def is_of_caller(error: BaseException) -> bool:
    """Return whether an exception while a value was read is out of memory or of a signal handler, so that the caller gets it.

    Reading runs code of the user's classes, which may raise any exception, including KeyboardInterrupt and SystemExit. Python's own
    handler of Ctrl-C is native: it has no frame, and the newest frame does not raise.
    """
    if isinstance(error, MemoryError):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run only in the main thread
    if not isinstance(error, KeyboardInterrupt):
        return _native.is_from_signal(error)
    newest = error.__traceback__
    while newest is not None and newest.tb_next is not None:
        newest = newest.tb_next
    is_raised = newest is not None and newest.tb_frame.f_code.co_code[newest.tb_lasti] == _RAISE
    return not is_raised or _native.is_from_signal(Exception().with_traceback(error.__traceback__))
