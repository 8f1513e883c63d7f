"""Merges the infos of many envs into one dict, as Gymnasium's vector envs do, when the dict is first read.

For each key there is an array [num, ...] and, under "_key", the mask [num] of the rows that have it. The type of the
first value under a key decides the type of the array. A Python or NumPy number gives an array of its type, and an array
gives an array of its dtype and shape. Dicts are merged recursively. All other values give an object array. "final_obs"
is always an object array.

A value that cannot be merged is omitted from its row. The entry "omitted" of that row has the reasons, as a tuple of
BadOutput errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.errors import BadOutput

OMITTED = "omitted"
MAX_DICT_DEPTH = 64
MAX_DICTS = 65_536
_FINAL_OBS = "final_obs"
_NUMBERS = (int, float, bool)
_UNREAD: Any = object()
_FILLING = (  # the methods of LazyInfo that fill it first
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__",
    "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem",
    "setdefault", "update", "values",
)  # fmt: skip

_UNFIT = (TypeError, ValueError, OverflowError)  # NumPy raises these for a value that does not fit into an array

Cell = tuple[int, Mapping[Any, Any]]  # first row, and the dict with the value
Place = tuple[str, Any]


def omission_error(leaf: str, env_id: int, why: str) -> BadOutput:
    """Return the error for a value that is omitted from the merged infos."""
    return BadOutput(f"{leaf} of env {env_id} {why}", env_id=env_id, leaf=leaf, phase="info")


def merge(
    payloads: Iterable[tuple[int, Mapping[Any, Any]]],
    num: int,
    *,
    rows_each: int | None = None,
    env_ids: Sequence[int] | NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return the infos of `num` rows as one dict.

    Args:
        payloads: (first row, info) in the order of the rows. A row may come more than once. With SAME_STEP autoreset,
            {"final_obs": ..., "final_info": ...} comes first, and then the info of the reset.
        num: how many rows the batch has.
        rows_each: for batched envs, the number of rows of each env. Their infos are already merged, with arrays
            [rows_each, ...] and masks. None for other envs, which have one row each.
        env_ids: the env of each row, for messages; None if env ids are row numbers.
    Raises:
        BadOutput: the value of an env does not fit into the array for the value of the first env.
    """
    merge = _Merge(num, rows_each, env_ids)
    merged = merge.merge_dicts(payloads, "info")
    merge.add_omissions(merged)
    return merged


class _Merge:
    """Merges one batch of infos, key by key. A place is a pair (leaf, key) of the path of a dict and one of its keys."""

    def __init__(self, num: int, rows_each: int | None, env_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        self._num = num
        self._rows_each = rows_each
        self._env_ids = env_ids
        self._omissions: list[tuple[int, BadOutput]] = []  # by first row

    def merge_dicts(self, infos: Iterable[Cell], leaf: str) -> dict[Any, Any]:
        """Merge these dicts, whose path is `leaf`."""
        is_batched = self._rows_each is not None
        cells_of: dict[Any, list[Cell]] = {}
        for cell in infos:
            for key in cell[1]:
                if is_batched and _is_mask(cell[1], key):
                    continue
                if key in cells_of:
                    cells_of[key].append(cell)
                else:
                    cells_of[key] = [cell]
        merged: dict[Any, Any] = {}
        for key, cells in cells_of.items():
            if isinstance(key, str) and key[:1] == "_" and key[1:] in cells_of:
                why = f"is omitted: {key!r} is the mask of {key[1:]!r} in merged infos; give it another name"
                self._omit(cells, (leaf, key), why)
                continue
            if key != _FINAL_OBS and any([isinstance(info[key], dict) for _, info in cells]):  # noqa: C419 - faster
                column = self._merge_nested(cells, (leaf, key))
            else:
                column = self._merge_values(cells, (leaf, key))
            if cells:
                name = f"_{key}"
                merged[key], merged[name] = column, self._mask_of(cells, (leaf, key), merged.get(name))
        return merged

    def add_omissions(self, merged: dict[Any, Any]) -> None:
        """Add the errors of omitted values to `merged`, each in its row, after those that the envs' own infos have."""
        for row, error in self._omissions:
            if OMITTED not in merged:
                merged[OMITTED], merged[f"_{OMITTED}"] = np.full(self._num, None, object), np.zeros(self._num, np.bool_)
            for place in range(row, row + (self._rows_each or 1)):
                merged[OMITTED][place] = (*(merged[OMITTED][place] or ()), error)
                merged[f"_{OMITTED}"][place] = True

    def _merge_nested(self, cells: list[Cell], place: Place) -> Any:
        """Merge the values of a key, some of which are dicts. Remove values that are omitted from `cells`."""
        leaf, key = place
        rejected = [cell for cell in cells if isinstance(cell[1][key], dict) and is_too_deep(cell[1][key])]
        if rejected:
            self._omit(rejected, place, "contains itself, or too many or too deeply nested dicts; give flatter infos")
            cells[:] = [cell for cell in cells if id(cell) not in map(id, rejected)]
            if not cells:
                return None
        nested = [(row, info[key]) for row, info in cells if isinstance(info[key], dict)]
        if len(nested) == len(cells):
            return self.merge_dicts(nested, f"{leaf}[{key!r}]")
        # Only empty dicts may be among other values; they are ignored.
        is_first_nested = isinstance(cells[0][1][key], dict)
        for row, info in cells:
            if isinstance(info[key], dict) != is_first_nested and (is_first_nested or info[key]):
                self._raise_unfit((row, info[key]), place, "a dict and another type under one key")
        return self._merge_values([cell for cell in cells if not isinstance(cell[1][key], dict)], place)

    def _merge_values(self, cells: Sequence[Cell], place: Place) -> Any:
        if self._rows_each is not None:
            return self._merge_rows(cells, place, self._rows_each)
        key = place[1]
        column = _new_column(key, cells[0][1][key], self._num)
        row = 0
        info: Mapping[Any, Any] = {}
        try:
            for row, info in cells:
                column[row] = info[key]
        except _UNFIT as exc:
            self._raise_unfit((row, info[key]), place, exc)
        return column

    def _merge_rows(self, cells: Sequence[Cell], place: Place, rows_each: int) -> Any:
        """Merge the values of batched envs, which have an array each."""
        key = place[1]
        column: NDArray[Any] | None = None
        for row, info in cells:
            try:
                values = _as_rows(key, info[key], rows_each)
                if column is None:
                    is_object = values.dtype == object
                    shape = (self._num, *values.shape[1:])
                    column = np.full(self._num, None, object) if is_object else np.zeros(shape, values.dtype)
                column[row : row + rows_each] = values
            except _UnfitError as unfit:
                self._raise_unfit((row, unfit.value), place, unfit.reason, unfit.wanted)
            except _UNFIT as exc:
                self._raise_unfit((row, info[key]), place, exc)
        return column

    def _mask_of(self, cells: Sequence[Cell], place: Place, mask: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        mask = np.zeros(self._num, dtype=np.bool_) if mask is None else mask
        if self._rows_each is None:
            for row, _ in cells:
                mask[row] = True
            return mask
        for row, info in cells:
            name = f"_{place[1]}"
            try:
                mask[row : row + self._rows_each] = info.get(name, True)
            except _UNFIT as exc:
                self._raise_unfit((row, info[name]), (place[0], name), exc)
        return mask

    def _omit(self, cells: Sequence[Cell], place: Place, why: str) -> None:
        leaf = f"{place[0]}[{place[1]!r}]"
        self._omissions += [(row, omission_error(leaf, self._env_of(row), why)) for row, _ in cells]

    def _env_of(self, row: int) -> int:
        return row if self._env_ids is None else int(self._env_ids[row])

    def _raise_unfit(self, cell: tuple[int, Any], place: Place, reason: Any, wanted: str = "") -> NoReturn:
        row, value = cell
        leaf, env_id = f"{place[0]}[{place[1]!r}]", self._env_of(row)
        wanted = wanted or "that of the first env with that key"
        raise BadOutput(
            f"{leaf} of env {env_id} is a {type(value).__name__} that does not fit {wanted} ({reason}); use one type and "
            "shape in all envs, or read the value with call()",
            env_id=env_id,
            leaf=leaf,
            phase="info",
        ) from (reason if isinstance(reason, Exception) else None)


def _new_column(key: Any, value: Any, num: int) -> NDArray[Any]:
    if key == _FINAL_OBS:
        return np.full(num, None, dtype=object)
    if type(value) in _NUMBERS or isinstance(value, np.number):
        return np.zeros(num, dtype=type(value))
    if isinstance(value, np.ndarray):
        return np.zeros((num, *value.shape), dtype=value.dtype)
    return np.full(num, None, dtype=object)


class _UnfitError(Exception):
    def __init__(self, value: object, reason: str, wanted: str) -> None:
        super().__init__(value, reason, wanted)
        self.value, self.reason, self.wanted = value, reason, wanted


def _is_mask(info: Mapping[Any, Any], key: object) -> bool:
    return isinstance(key, str) and key.startswith("_") and key[1:] in info


def is_too_deep(value: dict[Any, Any]) -> bool:
    """Return whether a dict contains itself, or too many or too deeply nested dicts to be merged."""
    num_dicts = 0
    open_dicts = [(value, 1)]
    while open_dicts:
        found, depth = open_dicts.pop()
        num_dicts += 1
        if depth > MAX_DICT_DEPTH or num_dicts > MAX_DICTS:
            return True
        open_dicts += [(child, depth + 1) for child in found.values() if isinstance(child, dict)]
    return False


def _as_rows(key: object, value: object, num_rows: int) -> NDArray[Any]:
    """Return the value of a batched env as an array [num_rows, ...]. A value without rows is repeated for every row.

    Last observations become an array of objects, one per row. The env itself returns such an array, but an episode that
    was cut short has the observations of all rows in the structure of the space.
    """
    if key == _FINAL_OBS and not (isinstance(value, np.ndarray) and value.dtype == object):
        split = np.full(num_rows, None, dtype=object)
        for row in range(num_rows):
            split[row] = _row_of(value, row, num_rows)
        return split
    if isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == num_rows:
        return value
    is_by_row = isinstance(value, (list, tuple)) and len(value) == num_rows and key != OMITTED
    values: Any = value if is_by_row else [value] * num_rows
    column = np.full(num_rows, None, dtype=object)
    for place, single in enumerate(values):
        column[place] = single
    return column


def _row_of(obs: Any, row: int, num_rows: int) -> Any:
    """Return one row of an observation of several rows."""
    if isinstance(obs, dict):
        return {name: _row_of(child, row, num_rows) for name, child in obs.items()}
    if isinstance(obs, np.ndarray):
        if obs.shape[:1] != (num_rows,):
            raise _UnfitError(obs, f"an array of shape {obs.shape}", f"the env's {num_rows} rows")
        return obs[row]
    if isinstance(obs, tuple) and hasattr(obs, "_fields"):
        return type(obs)(*(_row_of(child, row, num_rows) for child in obs))
    return tuple(_row_of(child, row, num_rows) for child in obs) if isinstance(obs, tuple) else obs


def _filling(name: str) -> Callable[..., Any]:
    """Return the method of dict with this name, which fills the info first."""
    plain = getattr(dict, name)

    @functools.wraps(plain)
    def method(self: LazyInfo, *args: Any, **kwargs: Any) -> Any:
        if self._load is not None:
            self._fill()
        return plain(self, *args, **kwargs)

    return method


InfoRows = list[tuple[int, Any]]


def rows_of(info: Mapping[str, Any], rows: Sequence[int] | None = None) -> InfoRows:
    """Return the infos of a batch one by one, as the envs returned them. The merged info is not decoded.

    Args:
        info: the info of a batch, or a copy of it, also a pickled one. It must not have been modified. The infos of a copy also
            have the statistics of episodes that the pool has added, and their numbers are NumPy's.
        rows: the rows whose infos are wanted; None means all.
    Returns:
        (row, info) for each row that has an info. Values that cannot be read are omitted, and info["omitted"] has the
        reasons as a tuple of BadOutput errors. With SAME_STEP autoreset, a row whose episode ended has two infos. The
        first is {"final_obs": ..., "final_info": ...}.
    """
    if isinstance(info, LazyInfo):
        return [] if info._rows is None else info._rows(rows)
    return _rows_of_merged(info, rows) if info else []


def _rows_of_merged(info: Mapping[str, Any], rows: Sequence[int] | None) -> InfoRows:
    """Return the infos of a plain dict: one without masks, as kernels write it, or a copy of a merged info, with masks."""
    has_masks = any(_is_mask(info, key) for key in info)
    found: InfoRows = []
    for row in _all_rows(info) if rows is None else rows:
        own = _info_of_row(info, row)
        finals = {key: own.pop(key) for key in (_FINAL_OBS, "final_info") if key in own}
        found += [(row, finals)] * bool(finals)
        found += [(row, own)] * bool(own or finals or not has_masks)
    return found


def _all_rows(info: Mapping[str, Any]) -> range:
    column: Any = info
    while isinstance(column, Mapping):
        column = next(iter(column.values()))
    return range(len(column))


def add_fixed(own: InfoRows, fixed: Mapping[str, Any], rows: Sequence[int] | None) -> InfoRows:
    """Add the parts of infos that have a fixed size to the last info of each row.

    Args:
        own: (row, info) of the envs whose infos have other parts.
        fixed: arrays [B, ...] of all rows, as kernels write them, or dicts of such arrays.
        rows: see `rows_of`.
    """
    infos_of: dict[int, list[Any]] = {}
    for row, info in own:
        infos_of.setdefault(row, []).append(info)
    found: InfoRows = []
    for row in _all_rows(fixed) if rows is None else rows:
        *finals, last = infos_of.get(row, ({},))
        found += [(row, final) for final in finals]
        found.append((row, {**_info_of_row(fixed, row), **last}))
    return found


def _info_of_row(merged: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the info of one row, without the keys that its mask excludes."""
    found: dict[str, Any] = {}
    for key, column in merged.items():
        mask = merged.get(f"_{key}")
        if _is_mask(merged, key) or (mask is not None and not mask[row]):
            continue
        item = _info_of_row(column, row) if isinstance(column, Mapping) else column[row]
        found[key] = bool(item) if isinstance(item, np.bool_) else item
    return found


class LazyInfo(dict[str, Any]):
    """A dict that is filled at its first use: reading, writing, comparing, copying, printing or pickling.

    Until then it has one hidden key. Otherwise C code that checks the size of a dict first, such as json, would treat
    it as empty. It is pickled and copied as a plain dict.
    """

    __slots__ = ("_load", "_rows")

    def __init__(
        self, load: Callable[[], Mapping[str, Any]], rows: Callable[[Sequence[int] | None], InfoRows] | None = None
    ) -> None:
        """`load` returns the merged info. `rows` returns the result of `rows_of` for some rows."""
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
        # In this order, Ctrl-C may come at any point, because the next use fills the dict again.
        dict.update(self, loaded)
        dict.pop(self, _UNREAD, None)
        self._load = None

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return dict, (dict(self),)

    __hash__ = None
    fromkeys = dict.fromkeys


for _name in _FILLING:
    setattr(LazyInfo, _name, _filling(_name))
