"""Checks of the values of single options, of types that are no numbers.

Each function returns the value in its final type, or raises UsageError.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping

from stepmill.spec.errors import UsageError


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
        f"worker_init={value!r} must be a function without arguments, or None; functools.partial(function, ...) gives it some"
    )


def checked_cores(value: object) -> tuple[int, ...] | None:
    """Return the numbers of cores, or None."""
    if value is None:
        return None
    try:
        cores = tuple(operator.index(core) for core in value)  # type: ignore[attr-defined]  # that is the check
    except TypeError:
        cores = ()
    if not cores or len(set(cores)) != len(cores) or min(cores) < 0:
        raise UsageError(f"affinity={value!r} must be a list of different core numbers, or None for all cores")
    return cores


def checked_environment(value: object) -> dict[str, str]:
    """Return environment variables."""
    is_valid = isinstance(value, Mapping) and all(
        isinstance(name, str) and name and "=" not in name and isinstance(text, str) for name, text in value.items()
    )
    if not isinstance(value, Mapping) or not is_valid:
        raise UsageError(f"worker_env={value!r} must map names of environment variables to strings")
    return dict(value)
