"""Errors that are stepmill's and, at the same time, of the class that DI-engine raises: code written for either catches them."""

from __future__ import annotations

import builtins
import copy
import sys
from typing import Any

from stepmill.spec.errors import BadOutput, ClosedPoolError, EnvError, EnvTimeout, StepmillError, UsageError


class ManagerClosedError(ClosedPoolError, AssertionError):
    """The manager is closed, or was not launched yet."""


class ManagerUsageError(UsageError, AssertionError):
    """Something was asked that the manager's state, or the shape of an argument, does not allow."""


class SeedTypeError(UsageError, TypeError):
    """Seeds are neither a number, a list nor a dict."""


class MissingAttributeError(UsageError, AttributeError):
    """The envs have no such attribute."""


class MethodError(UsageError, RuntimeError):
    """A method of the envs was asked for that is not in `method_name_list`."""


class UnknownCommandError(UsageError, KeyError):
    """A command is not in `method_name_list`."""


class RetriesError(EnvError, RuntimeError):
    """An env was tried as often as `max_retry` allows.

    Attributes:
        timesteps: of a step, what the other envs gave, by env_id. They have lost nothing.
    """

    timesteps: dict[int, Any]


class ConnectionTimeout(EnvTimeout, ConnectionError):
    """An env did not answer a reset within `connect_timeout`."""


class StepTimeout(EnvTimeout, TimeoutError):
    """An env took longer than `step_timeout` or `reset_timeout`."""


class TornError(BadOutput):
    """A timestep came that cannot be read."""


def closing(error: StepmillError) -> StepmillError:
    """Return the error that a manager raises which closes because of an env: of the env's own class, too, if that is known here."""
    hint = ". The manager is closed; launch() it again"
    if isinstance(error, EnvTimeout):
        message = error.message + hint
        return StepTimeout(message, env_id=error.env_id, phase=error.phase, timeout_s=error.timeout_s)
    return mirrored(error, hint) if isinstance(error, EnvError) else error


def payload_error(error: StepmillError) -> StepmillError:
    """Return an error of an env as a payload has it: of the env's own class, too, or a TimeoutError."""
    if isinstance(error, EnvTimeout):
        return StepTimeout(error.message, env_id=error.env_id, phase=error.phase, timeout_s=error.timeout_s)
    return mirrored(error) if isinstance(error, EnvError) else error


def detached(error: StepmillError) -> StepmillError:
    """Return a copy of what `payload_error` made, without traceback and cause, for an array.

    A traceback holds frames, and those what was received: Python's garbage collector does not see that circle, since
    arrays do not tell it what they hold.
    """
    return mirrored(error) if isinstance(error, EnvError) else copy.copy(error)


def mirrored(error: EnvError, hint: str = "") -> EnvError:
    """Return the same error, of the class that the env raised, too, if that class is known here."""
    mirror = _mirror(error.error_type)
    made = mirror.__new__(mirror)
    # Constructors call each other's, and a stranger's would be among them.
    made.__dict__.update(error.__dict__)
    made.message = error.message + hint
    made.args = (made.message,)
    return made


class _EnvException(EnvError):
    """What `mirrored` makes; its text has the words by which DI-engine's users know it."""

    def details(self) -> str:
        """Return the traceback from where the env ran."""
        return f"\nEnv Process Exception:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""


def _mirror(dotted: str) -> type[EnvError]:
    """Return a class of errors that is ours and the named one, too; just ours if it is unknown, or cannot be inherited."""
    cls = _find_class(dotted)
    if cls is None:
        return _EnvException
    home: Any = next(base for base in cls.__mro__ if base.__module__ == "builtins")
    # A stranger's constructor is never called: what it wants nobody knows.
    body: dict[str, Any] = {"__new__": lambda made, *args, **kwargs: home.__new__(made), "__reduce__": _reduce}
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
