"""Finds the class of an exception that was raised in another process, and makes classes that have two bases.

This calls no constructor of such a class, and imports no module. Code that can catch an exception by its class has
already imported the class.
"""

from __future__ import annotations

import builtins
import functools
import sys
from types import ModuleType
from typing import Any, TypeVar, cast

# Python ends iterations and generators with these. An error that is also of such a class would end them without a
# message.
_OF_ITERATION = (StopIteration, StopAsyncIteration)
_UNMIXED = "_unmixed"
_Base = TypeVar("_Base", bound=Exception)


def find_class(dotted: str) -> type[Exception] | None:
    """Return an exception class by its dotted name, or None if its module is not loaded.

    A name without dots is that of a built-in class, or of a class in __main__.
    """
    module, dot, rest = dotted.rpartition(".")
    found: object = None if dot else getattr(builtins, dotted, None) or _attribute(sys.modules.get("__main__"), dotted)
    while found is None and dot:  # "module.Class", or "module.Outer.Inner"
        found = functools.reduce(_attribute, rest.split("."), cast("object", sys.modules.get(module)))
        module, dot, last = module.rpartition(".")
        rest = f"{last}.{rest}"
    is_usable = isinstance(found, type) and issubclass(found, Exception) and not issubclass(found, _OF_ITERATION)
    return cast("type[Exception]", found) if is_usable else None


def is_plain(cls: type[Exception]) -> bool:
    """Return whether handlers of an exception class work with an instance that its constructor has not made.

    The constructor must be that of a built-in class. The class must not be a TimeoutError, which means that a wait can
    be repeated, or a SyntaxError, for which Python prints attributes in place of the message.
    """
    own = [each for each in cls.__mro__ if each.__module__ != "builtins"]
    return not issubclass(cls, (TimeoutError, SyntaxError)) and not any(
        name in vars(each) for each in own for name in ("__init__", "__new__")
    )


def mix(base: type[_Base], other: type[Exception]) -> type[_Base]:
    """Return a subclass of both classes with the name of `base`, or `base` itself if this is not possible."""
    return base if issubclass(base, other) else cast("type[_Base]", _mix(cast("Any", base), cast("Any", other)))


@functools.cache
def _mix(base: type[Any], other: type[Any]) -> type[Any]:
    names: dict[str, object] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        _UNMIXED: base,
    }
    try:
        mixed = type(base.__name__, (base, other), names)
        new_instance(mixed)
    except TypeError:  # their memory layouts differ, or instances need arguments, as those of ExceptionGroup do
        return base
    return mixed


def unmixed(cls: type[_Base]) -> type[_Base]:
    """Return the class from which `mix` made this class, or the class itself if `mix` did not make it."""
    found: type[_Base] = getattr(cls, _UNMIXED, cls)
    return found


def new_instance(cls: type[_Base]) -> _Base:
    """Return a new instance of an exception class without calling a constructor, except that of its built-in base class."""
    builtin: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    made: _Base = builtin.__new__(cls)
    return made


def _attribute(holder: object, name: str) -> object:
    return vars(holder).get(name) if isinstance(holder, (ModuleType, type)) else None
