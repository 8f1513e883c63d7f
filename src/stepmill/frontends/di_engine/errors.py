"""Errors that are also instances of the classes that DI-engine raises, so that code written for DI-engine catches them."""

from __future__ import annotations

import copy
from typing import Any

from stepmill.spec.errors import (
    BadOutput,
    ClosedPoolError,
    EnvError,
    EnvTimeout,
    StepmillError,
    UsageError,
    rebuild_error,
)


class ManagerClosedError(ClosedPoolError, AssertionError):
    """The manager is closed, or was not launched yet."""


class ClosedAttributeError(ManagerClosedError, AttributeError):
    """An attribute of the envs was read while the manager is closed."""


class ManagerUsageError(UsageError, AssertionError):
    """The manager's state does not allow a request, or an argument has a wrong shape."""


class MissingAttributeError(UsageError, AttributeError):
    """The envs have no such attribute."""


class MethodError(UsageError, RuntimeError):
    """A method of the envs is not in `method_name_list`."""


class UnknownCommandError(UsageError, KeyError):
    """A command is not in `method_name_list`."""


class UnknownManagerError(UsageError, KeyError):
    """There is no manager of that type."""


class UnknownEnvError(ManagerUsageError, KeyError, IndexError):
    """There is no env of that number, or there are no envs."""


class ResetParamError(ManagerUsageError, RuntimeError):
    """The arguments of a reset are neither a dict nor None."""


class ObservationError(BadOutput, ValueError):
    """An env returned a value that its spaces do not allow."""


class RetriesError(EnvError, RuntimeError):
    """An env has failed `max_retry` times.

    Attributes:
        timesteps: after a failed step, the timesteps of the other envs, by env_id.
    """

    timesteps: dict[int, Any]


def retries_error(limit: str, env_id: int | None, phase: str, cause: Exception) -> RetriesError:
    """Return the error of an env that is out of attempts; `limit` begins its text."""
    error = RetriesError(
        f"{limit}, and the latest exception is: {cause}",
        env_id=env_id,
        phase=phase,
        error_type=getattr(cause, "error_type", type(cause).__name__),
        remote_traceback=getattr(cause, "remote_traceback", ""),
    )
    error.__cause__ = cause
    return error


class ConnectionTimeout(EnvTimeout, ConnectionError):
    """An env did not finish a reset within `connect_timeout`."""


class StepTimeout(EnvTimeout, TimeoutError):
    """An env took longer than `step_timeout` or `reset_timeout`."""


class TornError(BadOutput):
    """A timestep cannot be read."""


def with_closing_hint(error: StepmillError) -> StepmillError:
    """Return the error that a manager raises when an env's error closes it; see `with_env_class`."""
    return as_payload_error(error, ". The manager is closed; launch() it again")


def as_payload_error(error: StepmillError, hint: str = "") -> StepmillError:
    """Return the error that a payload contains: a TimeoutError, a ValueError, or `with_env_class`."""
    if isinstance(error, EnvTimeout):
        return rebuild_error(StepTimeout, error.message + hint, error.__dict__)
    if isinstance(error, BadOutput):
        return rebuild_error(ObservationError, error.message + hint, error.__dict__)
    return with_env_class(error, hint) if isinstance(error, EnvError) else error


def without_traceback(error: StepmillError) -> StepmillError:
    """Return a copy of a payload's error without traceback and cause, which an object array may contain.

    A traceback refers to frames, and the frames to the array. Python's garbage collector cannot free that cycle,
    because arrays do not report the objects that they contain.
    """
    return with_env_class(error) if isinstance(error, EnvError) else copy.copy(error)


def with_env_class(error: EnvError, hint: str = "") -> EnvError:
    """Return an equal error with the text that DI-engine gives it."""
    return rebuild_error(_EnvException, error.message + hint, error.__dict__)


class _EnvException(EnvError):
    """The base class of the errors that `with_env_class` returns. Its text begins as DI-engine's does."""

    _takes_all_classes = True

    def details(self) -> str:
        """Return the traceback of the env's process."""
        return f"\nEnv Process Exception:\n{self.remote_traceback.rstrip()}" if self.remote_traceback else ""
