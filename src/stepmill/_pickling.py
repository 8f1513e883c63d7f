"""Pickles functions and classes of users with cloudpickle, so that tracebacks show the lines of what is defined in a script."""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType

import cloudpickle


def dumps(value: object) -> bytes:
    """Return a value as bytes that `cloudpickle.loads` reads in a process that can import stepmill."""
    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _reduce_code(code: CodeType) -> tuple[Callable[..., CodeType], tuple[object, ...]]:
    """Keep the name of the file, which cloudpickle 3.1.3 replaces."""
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _make_code, (code.co_filename, make, *args)


def _make_code(filename: str, make: Callable[..., CodeType], *args: object) -> CodeType:
    return make(*args).replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
