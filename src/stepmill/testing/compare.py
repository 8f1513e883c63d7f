"""Strict comparison of nested data: types, dtypes, shapes, structures and bytes. It reports the first difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def find_difference(left: object, right: object, where: str = "it") -> str | None:
    """Return where and how two nested values differ, or None if they are equal to the last bit.

    A NaN equals a NaN of the same bits. The order of dicts is ignored, and a subclass of dict equals a dict. A NumPy scalar
    equals neither a 0-d array nor a Python number.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return _differ_as_mappings(left, right, where)
    if type(left) is not type(right):
        return f"{where}: {type(left).__name__} {left!r} versus {type(right).__name__} {right!r}"
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return _differ_as_arrays(left, right, where)
    if isinstance(left, np.generic) and isinstance(right, np.generic):
        return None if left.tobytes() == right.tobytes() else f"{where}: {left!r} versus {right!r}"
    if isinstance(left, str | bytes):
        return None if left == right else f"{where}: {left!r} versus {right!r}"
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        return _differ_as_sequences(left, right, where)
    same = left == right or (left != left and right != right)
    return None if same else f"{where}: {left!r} versus {right!r}"


def _differ_as_mappings(left: Mapping[object, object], right: Mapping[object, object], where: str) -> str | None:
    if set(left) != set(right):
        unmatched = sorted(map(repr, set(left) ^ set(right)))
        return f"{where}: keys {', '.join(unmatched)} are on one side only"
    for key in left:
        difference = find_difference(left[key], right[key], f"{where}[{key!r}]")
        if difference:
            return difference
    return None


def _differ_as_sequences(left: Sequence[object], right: Sequence[object], where: str) -> str | None:
    if len(left) != len(right):
        return f"{where}: length {len(left)} versus {len(right)}"
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        difference = find_difference(one, other, f"{where}[{index}]")
        if difference:
            return difference
    return None


def _differ_as_arrays(left: np.ndarray, right: np.ndarray, where: str) -> str | None:
    if left.dtype != right.dtype:
        return f"{where}: dtype {left.dtype.str} versus {right.dtype.str}"
    if left.shape != right.shape:
        return f"{where}: shape {left.shape} versus {right.shape}"
    if left.dtype.hasobject:
        return _differ_as_sequences(left.ravel().tolist(), right.ravel().tolist(), where)
    if left.tobytes() == right.tobytes():
        return None
    return f"{where}: {left!r} versus {right!r}"
