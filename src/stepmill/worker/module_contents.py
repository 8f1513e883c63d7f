"""Reads the contents of modules in a worker, to compare them with those of the learner's program.

A fresh worker itself imports modules. It does not have changes that the program made to a module after the import, such
as `config.LIMIT = 99` or a patched method.

    worker   read_contents() ──► Ready ──► learner   backends/module_differences.py

Only modules that the worker has imported are compared, and the comparison imports nothing. These are all modules of the
user, and the modules of installed packages that define the classes of the envs. Of installed packages, only code and
constants in capitals are compared, because packages may change other values while they are used. Names that begin with
an underscore are not compared.
"""

from __future__ import annotations

import functools
import itertools
import os
import site
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

MAX_ENTRIES = 600  # names compared per worker, in at most 2 ms
_MAX_TEXT = 60
_MAX_ITEMS = 100  # longer containers are not compared; in other containers the limit is a tenth of this
# The limit for strings and bytes, and for the bits of integers: Python refuses to write 4300 digits.
_MAX_LENGTH = 10_000
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# By name: an env may need no pathlib, whose import takes 2 % of the start of a starter.
_PATHS = ("PosixPath", "PurePosixPath")
_CONTAINERS = (tuple, list, dict, set, frozenset)
_MAX_WRAPPERS = 30
_OWN_PACKAGE = __name__.partition(".")[0]


class Entry(NamedTuple):
    """The content of one name in a module: a checksum, and a text for messages."""

    checksum: int
    text: str


Contents = Mapping[str, Mapping[str, Entry]]  # by module, and by name, which may be "Class.attribute"


def read_contents(left_out: Collection[str] = (), envs: Iterable[object] = ()) -> dict[str, dict[str, Entry]]:
    """Return the contents of the user's modules that this process has imported, except the modules `left_out`.

    The result also has the modules of packages that define the classes of `envs`, of their wrappers and of their bases.
    """
    contents: dict[str, dict[str, Entry]] = {}
    num_left = MAX_ENTRIES
    found = [name for name, module in list(sys.modules.items()) if is_users(name, names_of(module))]
    for name in dict.fromkeys((*found, *_packages_of(envs))):
        if name not in left_out and num_left > 0:
            entries = entries_of(names_of(sys.modules.get(name)), num_left)
            contents[name] = {key: entry for key, entry in entries if entry is not None}
            num_left -= len(contents[name])
    return contents


def _packages_of(envs: Iterable[object]) -> Iterator[str]:
    """Yield the names of installed packages and of their modules that define the classes of envs, of wrappers and of bases."""
    layers = dict.fromkeys(type(layer) for env in envs for layer in _layers_of(env))
    for each in dict.fromkeys(base for layer in layers for base in layer.__mro__):
        name = vars(each).get("__module__")
        if type(name) is str and _has_source(name, names_of(sys.modules.get(name))):
            yield from (name, name.partition(".")[0])  # the package itself has functions such as gymnasium.make


def _layers_of(env: object) -> Iterator[object]:
    """Yield an env and the envs that it wraps, without running their code."""
    for _ in range(_MAX_WRAPPERS):
        yield env
        try:
            attributes = object.__getattribute__(env, "__dict__")
        except AttributeError:
            return
        env = attributes.get("env", attributes.get("_env"))


def unchanged(contents: Contents, before: Contents) -> dict[str, dict[str, Entry]]:
    """Return `contents` without the names that had another content before."""
    return {
        name: {key: entry for key, entry in entries.items() if before.get(name, {}).get(key, entry) == entry}
        for name, entries in contents.items()
    }


def names_of(module: object) -> dict[str, Any]:
    """Return the names of a module without running its code. Modules may load themselves when an attribute is read."""
    if not issubclass(type(module), ModuleType):
        return {}
    found: dict[str, Any] = ModuleType.__getattribute__(cast("ModuleType", module), "__dict__")
    return found


def is_users(name: str, names: Mapping[str, object]) -> bool:
    """Return whether a module is the user's, with a source file outside the folders of Python and installed packages."""
    path = str(names.get("__file__"))
    return _has_source(name, names) and "site-packages" not in path and not path.startswith(_installed_folders())


def _has_source(name: str, names: Mapping[str, object]) -> bool:
    """Return whether a module comes from a file of the user or of an installed package, and not of Python or stepmill."""
    path = names.get("__file__")
    if type(path) is not str or name == "__main__" or name.partition(".")[0] == _OWN_PACKAGE:
        return False
    return "site-packages" in path or not path.startswith(_installed_folders()[0])


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    # sysconfig is not used, because loading its tables takes each worker milliseconds.
    extensions = [entry for entry in sys.path if type(entry) is str and entry.endswith("lib-dynload")]
    return (os.path.dirname(os.__file__), *extensions, *getattr(site, "getsitepackages", list)(), "<")


def entries_of(names: Mapping[str, Any], limit: int) -> Iterator[tuple[str, Entry | None]]:
    """Yield the names of a module with their contents. None is a content that cannot be compared."""
    has_plain_code = type(names.get("__loader__")) is SourceFileLoader  # import hooks, such as pytest's, rewrite code
    is_own = is_users(str(names.get("__name__")), names)
    yield "__file__", plain_entry(names.get("__file__"))
    for name, value in itertools.islice(_names_and_attributes(names), limit):
        code = code_of(value)
        if code is not None:
            yield name, Entry(_code_checksum(code), f"the function {code.__qualname__}") if has_plain_code else None
        else:
            is_compared = not name.rpartition(".")[2].startswith("_") and (is_own or name.isupper())
            yield name, plain_entry(value) if is_compared else None


def _names_and_attributes(names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in list(names.items()):
        if issubclass(type(value), type) and vars(value).get("__module__") == names.get("__name__"):
            yield from ((f"{name}.{attribute}", item) for attribute, item in list(vars(value).items()))
        elif not name.startswith("__"):
            yield name, value


def code_of(value: object) -> FunctionType | None:
    inner = value.__func__ if type(value) in (classmethod, staticmethod) else value  # type: ignore[attr-defined]
    return inner if type(inner) is FunctionType else None


def plain_entry(value: object) -> Entry | None:
    text = _plain_text(value)
    if text is None:
        return None
    shown = text if _is_plain(type(value)) else repr(value)
    shown = shown if len(shown) <= _MAX_TEXT else shown[: _MAX_TEXT - 4] + " ..."
    return Entry(zlib.crc32(text.encode("utf-8", "surrogatepass")), shown)


def _is_plain(kind: type) -> bool:
    return kind in _PLAIN or (kind.__name__ in _PATHS and kind.__module__.partition(".")[0] == "pathlib")


def _plain_text(value: object, max_items: int = _MAX_ITEMS) -> str | None:
    """Return a text that is equal for equal plain values in all processes, or None if the value is not plain."""
    kind = type(value)
    if _is_plain(kind):
        length = len(value) if isinstance(value, (str, bytes)) else value.bit_length() if isinstance(value, int) else 0
        return None if length > _MAX_LENGTH else repr(value)
    if kind not in _CONTAINERS or not 0 < len(value) <= max_items:  # type: ignore[arg-type]
        return None  # an empty container is often a registry or a cache that is filled later
    items: Iterable[object] = value  # type: ignore[assignment]
    if isinstance(value, dict):
        items = [each for item in value.items() for each in item]
    texts = [_plain_text(item, max_items // 10) for item in items]
    known = [text for text in texts if text is not None]
    if len(known) < len(texts):
        return None
    return f"{kind.__name__}({', '.join(sorted(known) if kind in (set, frozenset) else known)})"


def _code_checksum(function: FunctionType) -> int:
    checksum = _checksum_of(function.__code__, 0)
    for default in function.__defaults__ or ():
        checksum = zlib.crc32(str(_plain_text(default)).encode("utf-8", "surrogatepass"), checksum)
    return checksum


def _checksum_of(code: CodeType, checksum: int) -> int:
    """Return a checksum of code that does not depend on its lines."""
    inner = [each for each in code.co_consts if type(each) is CodeType]
    # A set of constants has another order in each process.
    others = [each for each in code.co_consts if type(each) not in (CodeType, frozenset)]
    checksum = zlib.crc32(code.co_code, checksum)
    checksum = zlib.crc32(repr((code.co_names, others)).encode("utf-8", "surrogatepass"), checksum)
    for each in inner:
        checksum = _checksum_of(each, checksum)
    return checksum
