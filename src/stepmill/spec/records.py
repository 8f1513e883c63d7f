"""`Record`: a frozen dataclass of options.

The functions below make the fields of records, and define the values that the fields allow.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, field, replace
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from stepmill.spec.errors import ArgumentTypeError, UsageError
from stepmill.spec.option_values import (
    checked_amount,
    checked_choice,
    checked_count,
    checked_switch,
    checked_word,
    plain,
)

if TYPE_CHECKING:
    from dataclasses import Field

    from typing_extensions import Self

Check = Callable[[str, Any], object]
_SomeRecord = TypeVar("_SomeRecord", bound="Record")


class Record:
    """The base class of records. It checks all values when a record is made.

    For a field that is a record, it accepts a mapping.
    """

    _option: ClassVar[str] = ""  # the option that has the record; empty for the options of a pool
    _gone: ClassVar[Mapping[str, str]] = {}  # by field of earlier versions, what to do instead
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    if not TYPE_CHECKING:

        def __new__(cls, **keywords: object) -> Self:
            cls._check_names(keywords)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        prefix = self._path("")
        for name, each in self.__dataclass_fields__.items():
            object.__setattr__(self, name, each.metadata["check"](prefix + name, getattr(self, name)))

    @classmethod
    def _check_names(cls, keywords: Mapping[str, object]) -> None:
        for name in cls._gone.keys() & keywords.keys():
            raise UsageError(f"{cls._option}.{name} is gone; {cls._gone[name]}")
        refuse_unknown(keywords, cls.__dataclass_fields__, f"an option of {cls._option}")

    @classmethod
    def _path(cls, name: str) -> str:
        return f"{cls._option}.{name}" if cls._option else name


def default_of(kind: type[Record], name: str) -> object:
    """Return the default of an option. The name of an option of a record has a dot."""
    name, _, leaf = name.partition(".")
    option = kind.__dataclass_fields__[name]
    value = option.default if option.default_factory is MISSING else option.default_factory()
    return getattr(value, leaf) if leaf else value


def changed(options: Record, names: Iterable[str] = ()) -> list[str]:
    """Return the names whose options have values other than their defaults. Without `names`, all options are checked."""
    names = names or options.__dataclass_fields__
    return [name for name in names if attrgetter(name)(options) != default_of(type(options), name)]


def merged(options: _SomeRecord, keywords: Mapping[str, object]) -> _SomeRecord:
    """Return options in which keywords replace defaults.

    Args:
        keywords: values by name. None counts as not given if None is the default.
    Raises:
        UsageError: an option is given twice with different values, or a name or a value is wrong.
    """
    kind = type(options)
    kind._check_names(keywords)
    given: dict[str, Any] = {
        name: value for name, value in keywords.items() if value is not None or default_of(kind, name) is not None
    }
    for name, value in given.items():
        own = getattr(options, name)
        if isinstance(own, Record):
            given[name] = merged(own, leaves_of(type(own), value))
    result = replace(options, **given)
    for name, value in given.items():
        own = getattr(options, name)
        if not isinstance(own, Record) and own not in (default_of(kind, name), getattr(result, name)):
            raise UsageError(
                f"{kind._path(name)} is given twice: {plain(value)!r}, and {plain(own)!r} in options; give it once"
            )
    return result


def leaves_of(kind: type[Record], value: object) -> Mapping[str, object]:
    """Return the values that a record, or a mapping in its place, sets.

    Raises:
        UsageError: `value` is neither.
    """
    if isinstance(value, kind):
        return {name: getattr(value, name) for name in changed(value)}
    if isinstance(value, Mapping):
        return value
    raise UsageError(
        f"{kind._option}={value!r} is not a record; give stepmill.{kind.__name__}(...), or a mapping such as "
        f"{kind._option}={{{next(iter(kind.__dataclass_fields__))!r}: ...}}"
    )


def refuse_unknown(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuse names that are not known. `what` says what they name. The message suggests the nearest known name."""
    for name in names:
        if name not in known:
            near = next(iter(difflib.get_close_matches(name, known, n=1)), None)
            listed = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise ArgumentTypeError(f"{name} is not {what}; {listed}")


def checked(default: object, check: Check) -> Any:
    """Return a field. `check` gets the name and a value, and returns the value in its final type."""
    if default == {}:
        return field(default_factory=dict, metadata={"check": check})
    return field(default=default, metadata={"check": check})


def count(default: int | None, smallest: int = 0, *, may_be_none: bool = False) -> Any:
    """Return a field for whole numbers."""
    return checked(default, partial(checked_count, smallest=smallest, may_be_none=may_be_none or default is None))


def amount(default: float | None, *, may_be_zero: bool = False) -> Any:
    """Return a field for seconds, or for microseconds if its name ends with `_us`."""
    return checked(default, partial(checked_amount, may_be_zero=may_be_zero, may_be_none=default is None))


def switch(*, default: bool | None) -> Any:
    """Return a field for bools."""
    return checked(default, partial(checked_switch, may_be_none=default is None))


def choice(default: Enum | None, choices: type[Enum]) -> Any:
    """Return a field for members of an enum, or their values. None is allowed if it is the default."""
    return checked(
        default, lambda name, value: None if value is None and default is None else checked_choice(name, value, choices)
    )


def word(default: str, words: Collection[str]) -> Any:
    """Return a field for one of some words."""
    return checked(default, partial(checked_word, words=words))


def record(kind: type[_SomeRecord]) -> Any:
    """Return a field for a record, or for a mapping of its fields."""
    return checked(kind(), lambda _, value: value if isinstance(value, kind) else kind(**leaves_of(kind, value)))
