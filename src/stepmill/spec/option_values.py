"""Checks of the values of single options.

Each function returns the value in its final type, or raises UsageError.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

from stepmill.spec.errors import UsageError

_Choice = TypeVar("_Choice", bound=Enum)
_OR_NONE = ("", ", or None")  # the second if None is allowed

Environment: TypeAlias = "Mapping[str, str] | Sequence[Mapping[str, str]] | Callable[[int], Mapping[str, str]]"
"""Environment variables of all workers; or a list, of which worker w has item w modulo its length; or a function of w."""

Cores: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | Callable[[int], Sequence[int] | None] | None"
"""Numbers of cores, given in the same ways."""


def plain(value: object) -> object:
    """Return the value of an enum's member, which the user can type. Return other values unchanged."""
    return value.value if isinstance(value, Enum) else value


def checked_choice(name: str, value: object, choices: type[_Choice]) -> _Choice:
    """Return the member of the enum `choices` for a member, its value, or a member of another enum with the same value."""
    try:
        return choices(plain(value))
    except ValueError:
        return cast("_Choice", checked_word(name, plain(value), [each.value for each in choices]))


def checked_word(name: str, value: object, words: Collection[object]) -> str:
    """Return one of some words."""
    if value in words:
        return cast("str", value)
    raise UsageError(f"{name}={value!r} is not one of {', '.join(map(repr, words))}")


def checked_count(name: str, value: SupportsIndex | None, smallest: int, *, may_be_none: bool) -> int | None:
    """Return a whole number."""
    if value is None and may_be_none:
        return None
    try:
        count = None if value is None or isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < smallest:
        raise UsageError(f"{name}={value!r} must be a whole number, {smallest} or more{_OR_NONE[may_be_none]}")
    return count


def checked_amount(name: str, value: SupportsFloat | None, *, may_be_zero: bool, may_be_none: bool) -> float | None:
    """Return a number of seconds, or of the unit with which the name ends."""
    if value is None and may_be_none:
        return None
    try:
        amount = math.nan if value is None or isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        amount = math.nan
    if not math.isfinite(amount) or amount < 0 or (amount == 0 and not may_be_zero):
        unit = "microseconds" if name.endswith("_us") else "seconds"
        bound = "0 or more" if may_be_zero else "more than 0"
        raise UsageError(f"{name}={value!r} must be a number of {unit}, {bound}{_OR_NONE[may_be_none]}")
    return amount


def checked_switch(name: str, value: object, *, may_be_none: bool) -> bool | None:
    """Return a bool."""
    if isinstance(value, bool) or (value is None and may_be_none):
        return value
    import numpy as np  # imported here, so that the help of the command line does not wait for it

    if isinstance(value, np.bool_):
        return bool(value)
    raise UsageError(f"{name}={value!r} must be True or False{_OR_NONE[may_be_none]}")


def checked_folder(value: object) -> str | None:
    """Return the path of the folder for crash capsules, or None."""
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if path is None or (isinstance(path, str) and path and "\0" not in path):
        return path
    raise UsageError(f"crash_dir={value!r} must be the path of a folder, or None for no crash capsules")


def checked_function(value: object) -> Callable[[], object] | None:
    """Return the function that workers call first, or None."""
    if value is None or callable(value):
        return value
    raise UsageError(
        f"workers.init={value!r} must be a function without arguments, or None; functools.partial(function, ...) binds arguments"
    )


def checked_cores(value: object) -> Cores:
    """Return the numbers of cores, for all workers or for each, or the function that returns them, or None."""
    if value is None or callable(value):
        return value
    items = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else []
    if items and all(isinstance(item, Iterable) for item in items):
        return tuple(cast("tuple[int, ...]", checked_cores(item)) for item in items)
    try:
        cores = tuple(operator.index(core) for core in items)
    except TypeError:
        cores = ()
    if not cores or len(set(cores)) != len(cores) or min(cores) < 0:
        raise UsageError(
            f"workers.affinity={value!r} must be a list of different core numbers, a list of such lists, one per worker, a function that "
            "returns the list of a worker, or None for all cores"
        )
    return cores


def checked_environment(value: object) -> Environment:
    """Return environment variables, for all workers or for each, or the function that returns them."""
    if callable(value):
        return cast("Environment", value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
        return tuple(cast("dict[str, str]", checked_environment(item)) for item in value)
    is_valid = isinstance(value, Mapping) and all(
        isinstance(name, str) and name and "=" not in name and isinstance(text, str) for name, text in value.items()
    )
    if not isinstance(value, Mapping) or not is_valid:
        raise UsageError(
            f"workers.env={value!r} must map names of environment variables to strings, or be a list of such mappings, one per "
            "worker, or a function that returns that of a worker"
        )
    return dict(value)


def environment_of(value: Environment, worker: int) -> dict[str, str]:
    """Return the variables of this worker only, without those of all workers."""
    if isinstance(value, Mapping):
        return {}
    own = value(worker) if callable(value) else value[worker % len(value)]
    return cast("dict[str, str]", checked_environment(own))


def cores_of(value: Cores, worker: int) -> tuple[int, ...] | None:
    """Return the cores that a worker may use. None means all."""
    if callable(value):
        value = checked_cores(value(worker))
    if value is None or isinstance(value[0], int):  # type: ignore[index]  # no function
        return cast("tuple[int, ...] | None", value)
    return cast("tuple[int, ...]", value[worker % len(value)])  # type: ignore[arg-type,index]


def common_cores(value: Cores) -> tuple[int, ...] | None:
    """Return the cores that all workers may use together, or None if they are not known before the start."""
    if value is None or callable(value):
        return None
    return tuple(dict.fromkeys(core for item in value for core in ((item,) if isinstance(item, int) else item)))
