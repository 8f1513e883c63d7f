"""Compares the user's modules in a worker with those of the learner's program.

A fresh worker imports modules itself. What the program changed in a module after the import, such as `config.LIMIT = 99` or a
patched method, is not in the worker.

    worker   read_contents() ──► Ready ──► learner   find_differences()

Only modules that the worker has imported are compared, and nothing is imported for it. Modules of the standard library and of
installed packages are left out, as are names that begin with an underscore, since modules use these for caches and flags.
"""

from __future__ import annotations

import functools
import itertools
import os
import site
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

MAX_ENTRIES = 600  # names compared per worker, in at most 2 ms
_MAX_TEXT = 60
_MAX_ITEMS = 100  # longer containers are not compared, nor those within others that have more than a tenth of it
_MAX_LENGTH = 10_000  # of strings and bytes
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PATHS = (
    "PosixPath",
    "PurePosixPath",
)  # by name: an env may need no pathlib, whose import takes 2 % of the start of a starter
_CONTAINERS = (tuple, list, dict, set, frozenset)
_FUNCTIONS = (FunctionType, classmethod, staticmethod)
_OWN_PACKAGE = __name__.partition(".")[0]


class Entry(NamedTuple):
    """The content of one name in a module: a checksum, and a text for messages."""

    checksum: int
    text: str


Contents = Mapping[str, Mapping[str, Entry]]  # by module and name; a name may be "Class.attribute"


@dataclass(frozen=True)
class Difference:
    """A name whose content in the workers differs from that in the program."""

    name: str
    in_program: str
    in_workers: str

    def __str__(self) -> str:
        if self.in_program == self.in_workers:
            return f"{self.name} (other code or content)"
        return f"{self.name} ({self.in_program} in the program, {self.in_workers} in the workers)"


def read_contents(left_out: Collection[str] = ()) -> dict[str, dict[str, Entry]]:
    """Return the contents of the user's modules that this process has imported, except those of the names `left_out`."""
    contents: dict[str, dict[str, Entry]] = {}
    num_left = MAX_ENTRIES
    for name, module in list(sys.modules.items()):
        names = names_of(module)
        if name not in left_out and num_left > 0 and _is_users(name, names):
            contents[name] = {key: entry for key, entry in _entries(names, num_left) if entry is not None}
            num_left -= len(contents[name])
    return contents


def unchanged(contents: Contents, before: Contents) -> dict[str, dict[str, Entry]]:
    """Return `contents` without the names that had another content before."""
    return {
        name: {key: entry for key, entry in entries.items() if before.get(name, {}).get(key, entry) == entry}
        for name, entries in contents.items()
    }


def find_differences(workers: Sequence[Contents]) -> list[Difference]:
    """Return what differs between the modules of this process and those of all workers that have imported them.

    A name that differs between two workers, such as the time of the import, is left out.
    """
    modules = dict.fromkeys(name for contents in workers for name in contents)
    return [
        each
        for name in modules
        for each in _differences_of(name, [contents[name] for contents in workers if name in contents])
    ]


def _differences_of(name: str, reports: Sequence[Mapping[str, Entry]]) -> Iterator[Difference]:
    names = names_of(sys.modules.get(name))
    ours = dict(_entries(names, MAX_ENTRIES))
    for key, entry in reports[0].items():
        if key not in ours or any(report.get(key) != entry for report in reports):
            continue
        own = ours[key] or _entry_of_other_kind(names, key, entry)
        if own is not None and own != entry:
            yield Difference(f"{name}.{key}", own.text, entry.text)


def names_of(module: object) -> dict[str, Any]:
    """Return the names of a module without running its code: modules may load themselves when an attribute is read."""
    if not issubclass(type(module), ModuleType):
        return {}
    found: dict[str, Any] = ModuleType.__getattribute__(cast("ModuleType", module), "__dict__")
    return found


def _entry_of_other_kind(names: Mapping[str, Any], key: str, entry: Entry) -> Entry | None:
    """Return the entry of what cannot be compared here, but could in the workers; None if they agree."""
    first, _, attribute = key.partition(".")
    value = vars(names[first])[attribute] if attribute else names[first]
    # Code may have been rewritten at the import, by pytest for one; None is often a cache that is filled later.
    is_expected = type(value) in _FUNCTIONS or entry.text == "None"
    return None if is_expected else Entry(0, f"a {type(value).__name__}")


def _is_users(name: str, names: Mapping[str, object]) -> bool:
    """Whether a module is the user's own: it has a source file outside the folders of Python and of installed packages."""
    path = names.get("__file__")
    if type(path) is not str or name == "__main__" or name.partition(".")[0] == _OWN_PACKAGE:
        return False
    return "site-packages" not in path and not path.startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    # Without sysconfig, whose tables take each worker milliseconds to load.
    extensions = [entry for entry in sys.path if type(entry) is str and entry.endswith("lib-dynload")]
    return (os.path.dirname(os.__file__), *extensions, *getattr(site, "getsitepackages", list)(), "<")


def _entries(names: Mapping[str, Any], limit: int) -> Iterator[tuple[str, Entry | None]]:
    """Yield the names of a module with their contents; None is content that cannot be compared."""
    has_plain_code = type(names.get("__loader__")) is SourceFileLoader  # pytest, for one, rewrites code
    yield "__file__", _plain_entry(names.get("__file__"))
    for name, value in itertools.islice(_names_and_attributes(names), limit):
        code = _code_of(value)
        if code is not None:
            yield name, Entry(_code_checksum(code), f"the function {code.__qualname__}") if has_plain_code else None
        else:
            yield name, None if name.rpartition(".")[2].startswith("_") else _plain_entry(value)


def _names_and_attributes(names: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in list(names.items()):
        if issubclass(type(value), type) and vars(value).get("__module__") == names.get("__name__"):
            yield from ((f"{name}.{attribute}", item) for attribute, item in list(vars(value).items()))
        elif not name.startswith("__"):
            yield name, value


def _code_of(value: object) -> FunctionType | None:
    inner = value.__func__ if type(value) in (classmethod, staticmethod) else value  # type: ignore[attr-defined]
    return inner if type(inner) is FunctionType else None


def _plain_entry(value: object) -> Entry | None:
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
        is_long = isinstance(value, (str, bytes)) and len(value) > _MAX_LENGTH
        return None if is_long else repr(value)
    if kind not in _CONTAINERS or not 0 < len(value) <= max_items:  # type: ignore[arg-type]
        return None  # also if it is empty: it is often a registry or a cache that is filled later
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
