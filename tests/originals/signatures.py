"""Compares the public interface of a class of stepmill with that of the original class which it replaces.

What differs on purpose is listed by the tests, each difference with words of the row of the page's table that describes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from tests.originals.pages import ROOT

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def differences(ours: Any, theirs: Any) -> list[str]:
    """Return how `ours` differs from `theirs`, which are classes or functions: what a caller of `theirs` would notice.

    That is a public name that ours lacks, and that no method of it sets; a parameter that it lacks, or that has another place or default; a parameter without
    a default that theirs lacks. Further names and optional parameters of ours are no difference.
    """
    if not inspect.isclass(theirs):
        return list(_of_calls(ours, theirs, theirs.__name__))
    found = list(_of_calls(ours, theirs, "__init__"))
    for name in _public_names(theirs):
        if not hasattr(ours, name) and f"self.{name} = " not in inspect.getsource(ours):
            found.append(f"{name}: missing")
            continue
        original = inspect.getattr_static(theirs, name)
        if isinstance(original, (staticmethod, classmethod)) or inspect.isfunction(original):
            found += _of_calls(getattr(ours, name), getattr(theirs, name), name)
    return found


def protected_methods(ours: type, theirs: type) -> dict[str, bool]:
    """Return the protected methods of `theirs` that take no effect when a subclass of `ours` overrides them.

    The value is whether this is refused, by `NOT_CALLED` of `ours` (see stepmill.frontends.overrides); otherwise the method
    is missing, and an override is ignored in silence.
    """
    library = theirs.__module__.partition(".")[0]
    homes = [base for base in theirs.__mro__ if base.__module__.partition(".")[0] == library]
    own = [base for base in ours.__mro__ if base.__module__.partition(".")[0] == "stepmill"]
    refused = {name for base in own for name in vars(base).get("NOT_CALLED", ())}
    names = {name for base in homes for name in vars(base) if name.startswith("_") and not name.startswith("__")}
    methods = {name for name in names if inspect.isroutine(inspect.getattr_static(theirs, name))}
    shared = [base for base in ours.__mro__ if base in theirs.__mro__]
    known = {name for base in (*own, *shared) for name in vars(base)}
    return {name: name in refused for name in sorted(methods) if name in refused or name not in known}


def _public_names(cls: type) -> Iterator[str]:
    """Yield the names that a class and its bases in the same library define."""
    library = cls.__module__.partition(".")[0]
    homes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == library]
    yield from sorted({name for base in homes for name in vars(base) if not name.startswith("_")})


def _of_calls(ours: Callable[..., Any], theirs: Callable[..., Any], name: str) -> Iterator[str]:
    mine = _parameters(ours)
    places = [parameter.name for parameter in mine.values() if parameter.kind in _POSITIONAL]
    original_kinds = {each.kind for each in _parameters(theirs).values()}
    wanted = [each for each in _parameters(theirs).values() if each.kind not in _VARIABLE]
    kinds = {parameter.kind for parameter in mine.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    for place, original in enumerate(wanted):
        if original.name not in mine and kinds.issuperset(_VARIABLE):
            continue  # `*limits, **named_limits`: by position or by name
        if original.name not in mine and takes_any and original.kind is inspect.Parameter.KEYWORD_ONLY:
            continue
        if original.name not in mine:
            yield f"{name}({original.name}): {'by keyword only' if takes_any else 'missing'}"
            continue
        if original.kind in _POSITIONAL and places[place : place + 1] != [original.name]:
            yield f"{name}({original.name}): another place"
        if _value(original.default) != _value(mine[original.name].default):
            yield f"{name}({original.name}): another default"
    if original_kinds.issuperset(_VARIABLE):
        return  # a decorator's own parameters
    known = {original.name for original in wanted}
    for parameter in mine.values():
        if parameter.name not in known and parameter.default is parameter.empty and parameter.kind not in _VARIABLE:
            yield f"{name}({parameter.name}): required"


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or a method. Of a class whose metaclass hides them, those of `__init__`."""
    found = inspect.signature(function).parameters
    if not inspect.isclass(function) or any(each.kind not in _VARIABLE for each in found.values()):
        return found
    return dict(list(inspect.signature(function.__init__).parameters.items())[1:])


def _value(default: object) -> object:
    if type(default) is object:  # a sentinel: the function itself refuses that the argument is missing
        return inspect.Parameter.empty
    return default.value if isinstance(default, Enum) else default  # ours has enums of its own


def check_listed(page: str, found: list[str], listed: Mapping[str, str]) -> None:
    """Fail unless exactly the listed differences were found, and a table of docs/switching/PAGE.md has the words of each."""
    unlisted, gone = sorted(set(found) - listed.keys()), sorted(listed.keys() - set(found))
    assert not unlisted, f"differences that are not listed: {unlisted}"
    assert not gone, f"listed, and no difference: {gone}"
    text = (ROOT / "docs" / "switching" / f"{page}.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    missing = [words for words in listed.values() if not any(words in row for row in rows)]
    assert not missing, f"no table of {page}.md has {missing}"


def check_protected(page: str, pairs: Iterable[tuple[type, type]], *, inert: Iterable[str] = ()) -> None:
    """Fail unless all protected methods that take no effect are refused, and docs/switching/PAGE.md names them.

    Args:
        page: the name of the page; a row begins with "Overriding", and the names are in that row or below it.
        pairs: our class, and the original's.
        inert: methods that the original's class does not call either.
    """
    text = (ROOT / "docs" / "switching" / f"{page}.md").read_text(encoding="utf-8")
    (_, described) = text.split("\n| Overriding ")
    for ours, theirs in pairs:
        found = protected_methods(ours, theirs)
        silent = [name for name, is_refused in found.items() if not is_refused and name not in inert]
        assert not silent, f"overrides of {ours.__name__} that are ignored in silence: {silent}"
        assert [name for name in found if f"`{name}`" not in described and name not in inert] == [], ours.__name__
