"""Compares the contents of modules in workers with the modules of this program, and warns of differences.

The comparison imports nothing. A class that the program has replaced is one difference. A method that the program has
added is one, too.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmill.spec.notices import warn
from stepmill.worker import module_contents
from stepmill.worker.module_contents import Contents, Entry, code_of
from stepmill.worker.signals import allow_signals

_MAX_SHOWN = 5  # how many differences a warning names
_ABSENT = Entry(0, "nothing")


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
    modules = dict.fromkeys(name for contents in workers for name in contents)
    return [
        each
        for name in modules
        for each in _differences_of(name, [contents[name] for contents in workers if name in contents])
    ]


def _differences_of(name: str, reports: Sequence[Mapping[str, Entry]]) -> Iterator[str]:
    names = module_contents.names_of(sys.modules.get(name))
    ours = dict(module_contents.entries_of(names, module_contents.MAX_ENTRIES)) if names else {}
    classes = dict.fromkeys(key.partition(".")[0] for key in reports[0] if "." in key)
    for each in classes:
        if each in names and not (_is_class(names[each]) and vars(names[each]).get("__module__") == name):
            text = names[each].__qualname__ if _is_class(names[each]) else f"a {type(names[each]).__name__}"
            yield f"{name}.{each} ({text} in the program, the class {each} in the workers)"
    added = (key for key in ours if key.partition(".")[0] in classes and code_of(_value_of(names, key)) is not None)
    for key in dict.fromkeys((*reports[0], *added)):
        entry = reports[0].get(key, _ABSENT)
        if key not in ours or any(report.get(key, _ABSENT) != entry for report in reports):
            continue
        own = ours[key] or _entry_of_other_kind(_value_of(names, key), entry)
        if own is None or own == entry:
            continue
        # A package that only the workers have changed is not reported.
        if (module_contents.is_users(name, names) and entry is not _ABSENT) or not _is_as_written(names, key):
            texts = f"{own.text} in the program, {entry.text} in the workers"
            yield f"{name}.{key} ({'other code or content' if own.text == entry.text else texts})"


def _is_class(value: object) -> bool:
    return issubclass(type(value), type)


def _value_of(names: Mapping[str, Any], key: str) -> object:
    first, _, attribute = key.partition(".")
    return vars(names[first])[attribute] if attribute else names[first]


def _entry_of_other_kind(value: object, entry: Entry) -> Entry | None:
    """Return an entry that names the type of a value without comparable contents, or None if this is not a difference."""
    # An import hook, such as that of pytest, may have rewritten code. None is often a cache that is filled later.
    is_expected = code_of(value) is not None or entry.text == "None"
    return None if is_expected else Entry(0, f"a {type(value).__name__}")


def _is_as_written(names: Mapping[str, Any], key: str) -> bool:
    """Return whether the value in this program is the one that the source of the module says."""
    value = _value_of(names, key)
    code = code_of(value)
    if code is not None:
        return code.__qualname__ == key and code.__code__.co_filename == names.get("__file__")
    if module_contents.plain_entry(value) is None:
        return False
    with contextlib.suppress(Exception):  # the source is missing, or the value there is not a literal
        statements = [
            each for each in ast.parse(Path(names["__file__"]).read_bytes()).body if isinstance(each, ast.Assign)
        ]
        sources = [each.value for each in statements if key in map(ast.unparse, each.targets)]
        return not sources or bool(ast.literal_eval(sources[-1]) == value)
    return True
