"""Compares the modules of workers with those of the learner's program, and warns of differences.

A fresh worker itself imports modules. It does not have changes that the program made to a module after the import, such
as `config.LIMIT = 99` or a patched method.

    worker   read_contents() ──► Ready ──► learner   warn_of_changed_modules()

Functions and classes are compared by their names and files, and plain values by their texts. Only modules that the worker
has imported are compared, and the comparison imports nothing. These are all modules of the user, and the modules of
installed packages that define the classes of the envs. Of installed packages, only functions, classes and constants in
capitals are compared, because packages may change other values while they are used.

A class that the program has replaced is one difference. A method that the program has added is one, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeAlias, cast

from stepmill.spec.notices import warn
from stepmill.worker.signals import allow_signals

Contents: TypeAlias = Mapping[tuple[str, str], str]
"""Texts by module and by name, which may be "Class.attribute". Equal texts are equal contents."""

MAX_ENTRIES = 600  # names per worker, in at most 2 ms
_MAX_ITEMS = 100  # longer containers are not compared; in other containers the limit is a tenth of this
_MAX_BYTES = 10_000  # of a plain value
# Paths are known by name: an env may need no pathlib, whose import takes 2 % of the start of a starter.
_PLAIN = ("NoneType", "bool", "int", "float", "complex", "str", "bytes", "PosixPath", "PurePosixPath")
_PLAIN_HOMES = ("builtins", "pathlib")
_CODE = ("the function ", "the class ")
_MAX_WRAPPERS = 30
_MAX_SHOWN = 5  # how many differences a warning names
_MAX_TEXT = 80
_OF_PYTHON = (os.path.dirname(os.__file__), "<")


# ---- in a worker -----------------------------------------------------------------------------------------------------


def read_contents(known: Mapping[tuple[str, str], str] = {}, envs: Iterable[object] = ()) -> dict[tuple[str, str], str]:
    """Return `known`, and the contents of the other modules of the user that this process has imported.

    The result also has the modules of packages that define the classes of `envs`, of their wrappers and of their bases.
    """
    names = dict.fromkeys((*filter(_is_users, list(sys.modules)), *_packages_of(envs)))
    others = names.keys() - {module for module, _ in known}
    entries = itertools.chain.from_iterable(_entries_of(module) for module in names if module in others)
    return {**known, **dict(itertools.islice(entries, MAX_ENTRIES))}


def unchanged(contents: Contents, before: Contents) -> dict[tuple[str, str], str]:
    """Return `contents` without the names that had another content before."""
    return {key: text for key, text in contents.items() if before.get(key, text) == text}


def names_of(module: object) -> dict[str, Any]:
    """Return the names of a module without running its code. Modules may load themselves when an attribute is read."""
    is_module = issubclass(type(module), ModuleType)
    found: dict[str, Any] = object.__getattribute__(module, "__dict__") if is_module else {}
    return found


def _is_users(module: str) -> bool:
    """Return whether a module has a source file of the user, outside the folders of Python and of installed packages."""
    path = _path_of(module)
    return not path.startswith(_OF_PYTHON) and not _is_installed(path)


def _path_of(module: str) -> str:
    path = names_of(sys.modules.get(module)).get("__file__")
    return path if type(path) is str and module.partition(".")[0] not in ("__main__", "stepmill") else "<none>"


def _is_installed(path: str) -> bool:
    return "site-packages" in path or "dist-packages" in path


def _packages_of(envs: Iterable[object]) -> Iterator[str]:
    """Yield the modules that define the classes of envs, of the envs that they wrap and of bases, and their packages."""
    kinds: dict[type, None] = {}
    for env in envs:
        layer = env
        for _ in range(_MAX_WRAPPERS):
            if layer is None:
                break
            kinds.update(dict.fromkeys(type(layer).__mro__))
            # The code of the env does not run.
            own = object.__getattribute__(layer, "__dict__") if type(layer).__dictoffset__ else {}
            layer = own.get("env", own.get("_env"))
    for kind in kinds:
        module = str(vars(kind).get("__module__"))
        if _is_installed(_path_of(module)):
            yield from (module, module.partition(".")[0])  # the package itself has functions such as gymnasium.make


def _entries_of(module: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the names of a module and their texts. The attributes of a class that it defines come before the class."""
    names = names_of(sys.modules.get(module))
    found: list[tuple[str, object]] = []
    for name, value in list(names.items()):
        if issubclass(type(value), type) and vars(value).get("__module__") == module:
            found += ((f"{name}.{attribute}", item) for attribute, item in list(vars(value).items()))
        found.append((name, value))
    has_all = _is_users(module)
    for name, value in found:
        own = name.rpartition(".")[2]
        is_constant = name == "__file__" or (not own.startswith("_") and (has_all or own.isupper()))
        text = _text_of(value, names)
        if text is not None and (is_constant or text.startswith(_CODE)):
            yield (module, name), text


def _text_of(value: object, names: Mapping[str, Any]) -> str | None:
    """Return the content of a name of a module, which has these names. Return None if it cannot be compared."""
    function = value.__func__ if type(value) in (classmethod, staticmethod) else value  # type: ignore[attr-defined]
    if type(function) is FunctionType:
        code, text = function.__code__, f"{_CODE[0]}{function.__qualname__}"
        is_own = code.co_filename == names.get("__file__") and text.endswith(code.co_name)
        return text if is_own else f"{text} ({code.co_name} of {os.path.basename(code.co_filename)})"
    if issubclass(type(value), type):
        kind = cast("type", value)
        return (
            f"{_CODE[1]}{'' if kind.__module__ == names.get('__name__') else f'{kind.__module__}.'}{kind.__qualname__}"
        )
    with contextlib.suppress(TypeError, ValueError):
        return repr(_plain(value, _MAX_ITEMS))
    return None


def _plain(value: Any, max_items: int) -> object:
    """Return a plain value, with sorted lists in place of sets, whose order differs between processes.

    Raises:
        TypeError, ValueError: this value is not plain, or too large, as is an integer that Python refuses to write.
    """
    kind = type(value)
    is_plain = kind.__name__ in _PLAIN and kind.__module__.partition(".")[0] in _PLAIN_HOMES
    if is_plain and sys.getsizeof(value) <= _MAX_BYTES:
        return value
    if kind not in (tuple, list, dict, set, frozenset) or not 0 < len(value) <= max_items:
        raise TypeError  # an empty container is often a registry or a cache that is filled later
    items = [_plain(item, max_items // 10) for item in value]
    if kind is dict:
        return dict(zip(items, [_plain(item, max_items // 10) for item in value.values()], strict=True))
    return sorted(items, key=repr) if kind in (set, frozenset) else kind(items)


# ---- in the learner's process -----------------------------------------------------------------------------------------


def warn_of_changed_modules(workers: Sequence[Contents]) -> None:
    """Warn if the modules of workers that have built their envs differ from those of this program."""
    found = find_differences(workers)
    if found:
        shown = ", ".join(found[:_MAX_SHOWN])
        more = f", and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        with allow_signals():  # a filter may raise the warning, or run code of the user
            warn(
                f"what this program has changed in modules does not reach the workers, which import them themselves: {shown}{more}; "
                "pass values to the function that makes an env, make the changes in a function that workers call first "
                "(workers={'init': ...}), or use context='fork'"
            )


def find_differences(workers: Sequence[Contents]) -> list[str]:
    """Return the names that differ between the modules of this process and those of all workers that have imported them.

    A name that differs between two workers, such as the time of the import, is left out.
    """
    merged = {key: text for contents in reversed(workers) for key, text in contents.items()}
    differing = {key for contents in workers for key, text in contents.items() if text != merged[key]}
    names = {module: names_of(sys.modules.get(module)) for module in {module for module, _ in merged}}
    return [each for key in merged if key not in differing for each in _differences_at(*key, merged, names[key[0]])]


def _differences_at(module: str, name: str, workers: Contents, names: Mapping[str, Any]) -> Iterator[str]:
    theirs, (class_name, dot, own) = workers[module, name], name.partition(".")
    owner, own = (names.get(class_name), own) if dot else (None, name)
    holder = names if not dot else vars(owner) if issubclass(type(owner), type) else {}
    text = _text_of(holder.get(own), names)
    if own not in holder or (text is None and theirs == "None"):  # None is often a cache that is filled later
        return
    ours = text or f"a {type(holder[own]).__name__}"
    if ours != theirs and dot and _text_of(owner, names) != workers.get((module, class_name), ""):
        return  # the program has replaced the class, which is a difference of its own
    if ours != theirs and (_is_users(module) or not _is_as_written(names, name, holder[own])):
        yield f"{module}.{name} ({_shorten(ours)} in the program, {_shorten(theirs)} in the workers)"
    for added, item in list(vars(holder[own]).items()) if ours == theirs == f"{_CODE[1]}{name}" else ():
        key, text = f"{name}.{added}", None
        if (module, key) not in workers:
            text = _text_of(item, names)
        if text and text.startswith(_CODE[0]) and not _is_as_written(names, key, item):
            yield f"{module}.{key} ({_shorten(text)} in the program, nothing in the workers)"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 4] + " ..."


def _is_as_written(names: Mapping[str, Any], name: str, value: object) -> bool:
    """Return whether the source of a module gives this value to the name. What only workers have changed is not reported."""
    text = _text_of(value, names)
    if text is None or text.startswith(_CODE):
        return text in (f"{_CODE[0]}{name}", f"{_CODE[1]}{name}")
    import ast  # not needed by workers

    with contextlib.suppress(Exception), open(names["__file__"], "rb") as source:
        body = [each for each in ast.parse(source.read()).body if isinstance(each, ast.Assign)]
        return bool(
            ast.literal_eval([each.value for each in body if name in map(ast.unparse, each.targets)][-1]) == value
        )
    return True  # the source is missing, or the value there is not a literal
