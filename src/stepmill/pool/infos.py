"""Infos of many envs as one dict, as Gymnasium's vector envs merge them, and not before somebody looks.

For each key there is an array [num, ...] and, under "_key", the mask [num] of the rows that have it. The first value
under a key decides: a Python or NumPy number gives an array of its type, an array gives an array of its dtype and
shape, a dict is merged in its turn, anything else gives an object array. "final_obs" is always an object array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import BadOutput

_FINAL_OBS = "final_obs"
_NUMBERS = (int, float, bool)
_UNREAD: Any = object()


def merge(
    payloads: Iterable[tuple[int, Mapping[Any, Any]]],
    num: int,
    *,
    rows_each: int | None = None,
    env_ids: Sequence[int] | NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return the infos of `num` rows as one dict.

    Args:
        payloads: (first row, info) in the order of the rows. A row may come more than once: with SAME_STEP autoreset
            first {"final_obs": ..., "final_info": ...}, then the info of the reset.
        num: how many rows the batch has.
        rows_each: None for ordinary envs, which have one row each; for batched envs the number of rows of each, whose
            infos are merged ones themselves, with arrays [rows_each, ...] and masks.
        env_ids: the env of each row, for messages; None if they are the rows' numbers.
    Raises:
        BadOutput: an env's value does not fit the array that the first env began.
    """
    merged: dict[str, Any] = {}
    row = 0
    try:
        for row, info in payloads:
            if rows_each is None:
                _add_row(merged, info, row, num)
            else:
                _add_rows(merged, info, slice(row, row + rows_each), num)
    except _UnfitError as unfit:
        env_id = row if env_ids is None else int(env_ids[row])
        raise BadOutput(
            f"info[{unfit.key!r}] of env {env_id} is a {type(unfit.value).__name__} that does not fit {unfit.wanted} "
            f"({unfit.reason}); let all envs give one type and shape under a key, or read it with call()",
            env_id=env_id,
            leaf=f"info[{unfit.key!r}]",
            phase="info",
        ) from unfit.__cause__
    except RecursionError:
        env_id = row if env_ids is None else int(env_ids[row])
        raise BadOutput(
            f"the info of env {env_id} is nested too deep, or contains itself; give flatter infos",
            env_id=env_id,
            leaf="info",
            phase="info",
        ) from None
    return merged


class _UnfitError(Exception):
    def __init__(
        self, key: object, value: object, reason: object, wanted: str = "what the first env with that key gave"
    ) -> None:
        super().__init__(key, value, reason, wanted)
        self.key, self.value, self.reason, self.wanted = key, value, reason, wanted


def _add_row(merged: dict[Any, Any], info: Mapping[Any, Any], row: int, num: int) -> None:
    for key, value in info.items():
        if isinstance(value, dict) and key != _FINAL_OBS:
            column = _inner(merged, key, value)
            if value:
                _add_row(column, value, row, num)
        else:
            column = merged[key] if key in merged else _new_column(key, value, num)
            _put(column, row, key, value)
        mask = _mask_of(merged, key, num)
        mask[row] = True
        merged[key], merged[f"_{key}"] = column, mask


def _add_rows(merged: dict[Any, Any], info: Mapping[Any, Any], rows: slice, num: int) -> None:
    for key, value in info.items():
        if _is_mask(info, key):
            continue
        if isinstance(value, dict) and key != _FINAL_OBS:
            column = _inner(merged, key, value)
            if value:
                _add_rows(column, value, rows, num)
        else:
            values = _as_rows(key, value, rows.stop - rows.start)
            if key in merged:
                column = merged[key]
            elif values.dtype == object:
                column = np.full(num, None, dtype=object)
            else:
                column = np.zeros((num, *values.shape[1:]), dtype=values.dtype)
            _put(column, rows, key, values)
        mask = _mask_of(merged, key, num)
        _put(mask, rows, f"_{key}", info.get(f"_{key}", True))
        merged[key], merged[f"_{key}"] = column, mask


def _is_mask(info: Mapping[Any, Any], key: object) -> bool:
    return isinstance(key, str) and key.startswith("_") and key[1:] in info


def _as_rows(key: object, value: object, num_rows: int) -> NDArray[Any]:
    """Return a batched env's value as an array [num_rows, ...]; what is none is given to every row as it is.

    The last observations are an array of objects, one for each row. The env itself gives such a one; an episode that was cut
    short has the observation of all rows, in the structure of its space.
    """
    if key == _FINAL_OBS and not (isinstance(value, np.ndarray) and value.dtype == object):
        split = np.full(num_rows, None, dtype=object)
        for row in range(num_rows):
            split[row] = _row_of(key, value, row, num_rows)
        return split
    if isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == num_rows:
        return value
    values = value if isinstance(value, (list, tuple)) and len(value) == num_rows else [value] * num_rows
    column = np.full(num_rows, None, dtype=object)
    for place, single in enumerate(values):
        column[place] = single
    return column


def _row_of(key: object, obs: Any, row: int, num_rows: int) -> Any:
    """Return one row of an observation of several."""
    if isinstance(obs, dict):
        return {name: _row_of(key, child, row, num_rows) for name, child in obs.items()}
    if isinstance(obs, np.ndarray):
        if obs.shape[:1] != (num_rows,):
            raise _UnfitError(key, obs, f"an array of shape {obs.shape}", f"the env's {num_rows} rows")
        return obs[row]
    if isinstance(obs, tuple) and hasattr(obs, "_fields"):
        return type(obs)(*(_row_of(key, child, row, num_rows) for child in obs))
    return tuple(_row_of(key, child, row, num_rows) for child in obs) if isinstance(obs, tuple) else obs


def _inner(merged: dict[Any, Any], key: object, value: dict[Any, Any]) -> Any:
    """Return the dict under a key that a dict is merged into."""
    column = merged.get(key, {})
    if value and not isinstance(column, dict):
        raise _UnfitError(key, value, "no dict")
    return column


def _new_column(key: object, value: object, num: int) -> NDArray[Any]:
    if key == _FINAL_OBS:
        return np.full(num, None, dtype=object)
    if type(value) in _NUMBERS or isinstance(value, np.number):
        return np.zeros(num, dtype=type(value))
    if isinstance(value, np.ndarray):
        return np.zeros((num, *value.shape), dtype=value.dtype)
    return np.full(num, None, dtype=object)


def _mask_of(merged: dict[Any, Any], key: object, num: int) -> Any:
    mask = merged.get(f"_{key}")
    return np.zeros(num, dtype=np.bool_) if mask is None else mask


def _put(column: Any, rows: int | slice, key: object, value: object) -> None:
    try:
        column[rows] = value
    except (TypeError, ValueError, OverflowError) as exc:
        raise _UnfitError(key, value, exc) from exc


def _filling(name: str) -> Callable[..., Any]:
    """Return dict's method of that name, which reads the info first."""
    plain = getattr(dict, name)

    @functools.wraps(plain)
    def method(self: LazyInfo, *args: Any, **kwargs: Any) -> Any:
        if self._load is not None:
            self._fill()
        return plain(self, *args, **kwargs)

    return method


InfoRows = list[tuple[int, Any]]


def rows_of(info: Mapping[str, Any]) -> InfoRows:
    """Return the infos of a batch as the envs gave them, one by one and not merged. The merged one stays unread.

    Args:
        info: of a batch, untouched.
    Returns:
        (row, info) for each row that has one; in place of an info that cannot be loaded, the exception. With SAME_STEP
        autoreset a row that ended has two: first {"final_obs": ..., "final_info": ...}.
    """
    return info._rows() if isinstance(info, LazyInfo) and info._rows is not None else []


class LazyInfo(dict[str, Any]):
    """A dict that is made when it is first looked at: read, written, compared, copied, printed or pickled.

    Until then it holds one secret key, so that C code which asks a dict for its size before anything else, as json
    does, does not take it for empty. It pickles and copies as a plain dict.
    """

    __slots__ = ("_load", "_rows")

    def __init__(self, load: Callable[[], Mapping[str, Any]], rows: Callable[[], InfoRows] | None = None) -> None:
        """`load` makes the merged info, `rows` what `rows_of` returns."""
        if not callable(load):
            raise TypeError(f"LazyInfo takes the function that makes the info, not a {type(load).__name__}")
        self._load: Callable[[], Mapping[str, Any]] | None = load
        self._rows = rows
        dict.__setitem__(self, _UNREAD, None)

    def _fill(self) -> None:
        load = self._load
        if load is None:
            return
        loaded = load()
        self._load = None
        dict.clear(self)
        dict.update(self, loaded)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return dict, (dict(self),)

    __hash__ = None
    fromkeys = dict.fromkeys
    __contains__ = _filling("__contains__")
    __delitem__ = _filling("__delitem__")
    __eq__ = _filling("__eq__")
    __getitem__ = _filling("__getitem__")
    __ior__ = _filling("__ior__")
    __iter__ = _filling("__iter__")
    __len__ = _filling("__len__")
    __ne__ = _filling("__ne__")
    __or__ = _filling("__or__")
    __repr__ = _filling("__repr__")
    __reversed__ = _filling("__reversed__")
    __ror__ = _filling("__ror__")
    __setitem__ = _filling("__setitem__")
    clear = _filling("clear")
    copy = _filling("copy")
    get = _filling("get")
    items = _filling("items")
    keys = _filling("keys")
    pop = _filling("pop")
    popitem = _filling("popitem")
    setdefault = _filling("setdefault")
    update = _filling("update")
    values = _filling("values")
