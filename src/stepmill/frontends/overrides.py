"""Refuses subclasses that override a method which only the original library's class calls.

A front-end's class lists such methods in its attribute `NOT_CALLED`, with a text that says what to do instead. Its
`__init__` calls `refuse_overrides(type(self))`.
"""

from __future__ import annotations

import inspect

from stepmill.spec.errors import UsageError


class OverrideError(UsageError, TypeError):
    """A subclass overrides a method that stepmill's class does not call."""


def refuse_overrides(cls: type) -> None:
    """Check that a class overrides no method in `NOT_CALLED` of its bases, which is a dict of texts by name.

    Raises:
        OverrideError: the class overrides such a method. The message contains the method's name and the text.
    """
    for home in cls.__mro__:
        for name, way_out in vars(home).get("NOT_CALLED", {}).items():
            if inspect.getattr_static(cls, name, None) is not inspect.getattr_static(home, name, None):
                raise OverrideError(
                    f"{cls.__name__} overrides {name}, which stepmill's {home.__name__} does not call: {way_out}"
                )


def protected_methods_missing_in(ours: type, theirs: type) -> list[str]:
    """Return the names of the protected methods that the original's class has and ours does not, for `NOT_CALLED`."""
    homes = [base for base in theirs.__mro__ if base not in ours.__mro__]
    names = {name for base in homes for name, value in vars(base).items() if inspect.isroutine(value)}
    return sorted(
        name for name in names if name.startswith("_") and not name.startswith("__") and not hasattr(ours, name)
    )
