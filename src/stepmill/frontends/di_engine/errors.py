"""Errors that are also of the classes that DI-engine raises, so that code written for DI-engine catches them."""

from __future__ import annotations

import builtins
import copy
import sys
from typing import Any

from stepmill.spec.errors import BadOutput, ClosedPoolError, EnvError, EnvTimeout, StepmillError, UsageError


class ManagerClosedError(ClosedPoolError, AssertionError):
    """The manager is closed, or was not launched yet."""


class ManagerUsageError(UsageError, AssertionError):
    """A request that the manager's state does not allow, or an argument of a wrong shape."""


class SeedTypeError(UsageError, TypeError):
    """Seeds that are neither a number, a list nor a dict."""


class MissingAttributeError(UsageError, AttributeError):
    """The envs have no such attribute."""


class MethodError(UsageError, RuntimeError):
    """A method of the envs that is not in `method_name_list`."""


class UnknownCommandError(UsageError, KeyError):
    """A command that is not in `method_name_list`."""


class RetriesError(EnvError, RuntimeError):
    """An env has failed `max_retry` times.

    Attributes:
        timesteps: after a failed step, the timesteps of the other envs, by env_id.
    """

    timesteps: dict[int, Any]


class ConnectionTimeout(EnvTimeout, ConnectionError):
    """An env did not finish a reset within `connect_timeout`."""


class StepTimeout(EnvTimeout, TimeoutError):
    """An env took longer than `step_timeout` or `reset_timeout`."""


class TornError(BadOutput):
    """A timestep that cannot be read."""


def with_closing_hint(error: StepmillError) -> StepmillError:
    """Return the error that a manager raises when an env's error closes it; see `with_env_class`."""
    hint = ". The manager is closed; launch() it again"
    if isinstance(error, EnvTimeout):
        message = error.message + hint
        return StepTimeout(message, env_id=error.env_id, phase=error.phase, timeout_s=error.timeout_s)
    return with_env_class(error, hint) if isinstance(error, EnvError) else error


def as_payload_error(error: StepmillError) -> StepmillError:
    """Return the error that a payload contains: a TimeoutError, or `with_env_class`."""
    if isinstance(error, EnvTimeout):
        return StepTimeout(error.message, env_id=error.env_id, phase=error.phase, timeout_s=error.timeout_s)
    return with_env_class(error) if isinstance(error, EnvError) else error


def without_traceback(error: StepmillError) -> StepmillError:
    """Return a copy of a payload's error without traceback and cause, which an object array may contain.

    A traceback refers to frames, and these to the array. Python's garbage collector cannot free that cycle, since arrays do
    not report the objects that they contain.
    """
    return with_env_class(error) if isinstance(error, EnvError) else copy.copy(error)


def with_env_class(error: EnvError, hint: str = "") -> EnvError:
    """Return an equal error that is also of the class that the env raised, if the module of that class is loaded here."""
    cls = _mixed_class(error.error_type)
    made = cls.__new__(cls)
    # No constructor is called: that of the env's class may have any signature.
    made.__dict__.update(error.__dict__)
    made.message = error.message + hint
    made.args = (made.message,)
    return made


class _EnvException(EnvError):
    """Base class of what `with_env_class` returns. Its text begins as DI-engine's does."""

    def details(self) -> str:
        """Return the traceback of the env's process."""
        return f"\nEnv Process Exception:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""


def _mixed_class(dotted: str) -> type[EnvError]:
    """Return a subclass of `_EnvException` and of the class of that name; `_EnvException` if that is not possible."""
    cls = _find_class(dotted)
    if cls is None:
        return _EnvException
    builtin_base: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    # `__new__` of the env's class may have any signature; that of the built-in base takes none.
    body: dict[str, Any] = {"__new__": lambda made, *args, **kwargs: builtin_base.__new__(made), "__reduce__": _reduce}
    try:
        made: type[EnvError] = type(cls.__name__, (_EnvException, cls), body)
        return made
    except TypeError:
        return _EnvException


def _reduce(error: StepmillError) -> tuple[object, ...]:
    plain = _EnvException.__new__(_EnvException)
    StepmillError.__init__(plain, error.message)
    plain.__dict__.update(error.__dict__)
    return plain.__reduce__()


def _find_class(dotted: str) -> type[Exception] | None:
    """Return the class of a remote exception, if its module is loaded here; none is imported."""
    found: Any = getattr(builtins, dotted, None) or getattr(sys.modules.get("__main__"), dotted, None)
    module, dot, rest = dotted.rpartition(".")
    while found is None and dot:
        found = sys.modules.get(module)
        for name in rest.split(".") if found is not None else ():
            found = getattr(found, name, None)
        module, dot, last = module.rpartition(".")
        rest = f"{last}.{rest}"
    return found if isinstance(found, type) and issubclass(found, Exception) else None
