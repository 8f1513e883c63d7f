"""Converts values to JSON and back, for files: numbers, text, containers, arrays, and names of classes and functions.

    {"@": "object", "name": "module:qualname"}               a class or a function, by its name
    {"@": "call", "name": …, "args": […], "kwargs": {…}}     the result of calling it: dataclasses, named tuples, enums
    {"@": "partial", …}                                      the same as a functools.partial, which is not called
    {"@": "tuple", "items": […]}
    {"@": "dict", "items": [[key, value], …]}
    {"@": "array", "dtype": …, "values": […]}
    {"@": "bytes", "hex": …}

Only `from_plain` runs code: it imports the names and makes the calls.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

MAX_ARRAY_BYTES = 65_536
MAX_DEPTH = 32
_TAG = "@"
_NAMING = ("object", "call", "partial")  # the kinds of values that name an object to import
_MODULE_AND_NAME = re.compile(r"([A-Za-z_][\w.]*):[\w.<>/-]+")


class NotPlain(ValueError):
    """A value cannot be converted to or from JSON. The text says why."""


def to_plain(value: object, depth: int = 0) -> Any:
    """Return a value as JSON.

    Raises:
        NotPlain: the value or a part of it cannot be converted.
    """
    if depth > MAX_DEPTH:
        raise NotPlain("it is nested too deeply")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is bytes:
        return {_TAG: "bytes", "hex": value.hex()}
    if type(value) is list:
        return [to_plain(item, depth + 1) for item in value]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": [to_plain(item, depth + 1) for item in value]}
    if type(value) is dict:
        return _plain_dict(value, depth)
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain_array(np.asarray(value), is_scalar=isinstance(value, np.generic))
    if isinstance(value, type) or not _is_record(value):
        return {_TAG: "object", "name": name_of(value)}
    return _plain_record(value, depth)


def _plain_dict(value: Mapping[object, object], depth: int) -> Any:
    if all(isinstance(key, str) for key in value) and _TAG not in value:
        return {key: to_plain(item, depth + 1) for key, item in value.items()}
    items = [[to_plain(key, depth + 1), to_plain(item, depth + 1)] for key, item in value.items()]
    return {_TAG: "dict", "items": items}


def _plain_array(value: np.ndarray[Any, Any], *, is_scalar: bool) -> Any:
    if value.dtype.kind not in "biufU" or value.nbytes > MAX_ARRAY_BYTES:
        raise NotPlain(f"it holds an array of {value.nbytes} bytes of {value.dtype}")
    shape = list(value.shape)
    return {
        _TAG: "array",
        "dtype": value.dtype.str,
        "shape": shape,
        "values": value.ravel().tolist(),
        "scalar": is_scalar,
    }


def _is_record(value: object) -> bool:
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return isinstance(value, (partial, Enum)) or is_named or is_dataclass(value)


def _plain_record(value: Any, depth: int) -> Any:
    kwargs: dict[str, object] = {}
    args: tuple[object, ...] = ()
    target: object = type(value)
    if isinstance(value, partial):
        target, args, kwargs = value.func, value.args, dict(value.keywords)
    elif isinstance(value, Enum):
        args = (value.value,)
    elif isinstance(value, tuple):
        args = tuple(value)
    else:
        kwargs = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    return {
        _TAG: "partial" if isinstance(value, partial) else "call",
        "name": name_of(target),
        "args": [to_plain(item, depth + 1) for item in args],
        "kwargs": {key: to_plain(item, depth + 1) for key, item in kwargs.items()},
    }


def name_of(value: object) -> str:
    """Return the name by which a class or a function can be imported, as "module:qualname".

    Raises:
        NotPlain: the class or function cannot be imported by name.
    """
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str):
        raise NotPlain(f"a {type(value).__name__} cannot be imported by name")
    if module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None) or "the program itself"
        raise NotPlain(f"{qualname} is defined in {script}, which was run as a script and cannot be imported")
    if "<" in qualname:
        raise NotPlain(f"{qualname} of module {module} is a closure or a lambda")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise NotPlain(f"{module}:{qualname} names another object")
    return f"{module}:{qualname}"


def calls_in(plain: object) -> list[str]:
    """Return all calls and imports that `from_plain` would make, as text with the arguments. Each occurs once.

    A call within the arguments of another call is shown only there.
    """
    texts: dict[str, None] = {}

    def collect(node: object) -> None:
        if isinstance(node, dict) and node.get(_TAG) in _NAMING:
            texts[_text_of(node)] = None
            return
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        for child in children:
            collect(child)

    collect(plain)
    return list(texts)


def modules_in(plain: object) -> list[str]:
    """Return the modules that a value would import, sorted.

    These are the modules of classes and functions, and the module in a text such as "module:Env-v1" or in an entry point,
    because Gymnasium imports it.
    """
    modules: set[str] = set()

    def collect(node: object) -> None:
        if isinstance(node, str):
            found = _MODULE_AND_NAME.fullmatch(node)
            modules.update((found[1],) if found else ())
        elif isinstance(node, list):
            for item in node:
                collect(item)
        elif isinstance(node, dict):
            for key, item in node.items():
                collect(key)
                collect(item)

    collect(plain)
    return sorted(modules)


def _text_of(node: object) -> str:
    """Return the Python expression for a value in the form of `to_plain`, with names as "module:qualname"."""
    if isinstance(node, list):
        return f"[{', '.join(_text_of(item) for item in node)}]"
    if not isinstance(node, dict):
        return repr(node)
    kind = node.get(_TAG)
    name = node.get("name")
    if kind == "object":
        return str(name)
    if kind in ("call", "partial"):
        args, kwargs = node.get("args"), node.get("kwargs")
        given = [_text_of(item) for item in args] if isinstance(args, list) else [repr(args)]
        given += (
            [f"{key}={_text_of(item)}" for key, item in kwargs.items()] if isinstance(kwargs, dict) else [repr(kwargs)]
        )
        return f"{name}({', '.join(given)})"
    if kind == "tuple" and isinstance(node.get("items"), list):
        return f"({', '.join(_text_of(item) for item in node['items'])})"
    return "{" + ", ".join(f"{key!r}: {_text_of(item)}" for key, item in node.items()) + "}"


def from_plain(plain: Any) -> Any:
    """Return the value that `to_plain` converted. This imports modules and calls functions; use it only for trusted files.

    Raises:
        NotPlain: `to_plain` does not make such a value.
        Exception: an import or a call raised an exception.
    """
    if isinstance(plain, list):
        return [from_plain(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {key: from_plain(item) for key, item in plain.items()}
    make = _MAKERS.get(plain[_TAG]) if isinstance(plain[_TAG], str) else None
    if make is None:
        raise NotPlain(f"{plain[_TAG]!r} is not a kind of value")
    try:
        return make(plain)
    except KeyError as exc:
        raise NotPlain(f"a value of kind {plain[_TAG]!r} lacks {exc}") from exc


def _make_array(plain: Mapping[str, Any]) -> Any:
    array = np.array(plain["values"], np.dtype(plain["dtype"])).reshape(plain["shape"])
    return array[()] if plain["scalar"] else array


def _make_partial(plain: Mapping[str, Any]) -> Callable[[], Any]:
    arguments = {key: from_plain(item) for key, item in plain["kwargs"].items()}
    return partial(load_name(plain["name"]), *(from_plain(item) for item in plain["args"]), **arguments)


def load_name(name: str) -> Any:
    """Import a module, and return the class or function that "module:qualname" names."""
    module, _, qualname = name.partition(":")
    found: Any = import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


_MAKERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "tuple": lambda plain: tuple(from_plain(item) for item in plain["items"]),
    "dict": lambda plain: {from_plain(key): from_plain(item) for key, item in plain["items"]},
    "array": _make_array,
    "bytes": lambda plain: bytes.fromhex(plain["hex"]),
    "object": lambda plain: load_name(plain["name"]),
    "call": lambda plain: _make_partial(plain)(),
    "partial": _make_partial,
}
