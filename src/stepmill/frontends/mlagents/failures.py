"""Defines the exceptions of Unity envs with ML-Agents' classes, and sends exceptions from workers to the learner.

If mlagents_envs is installed, the classes below are its classes, so that code that is written for it catches them.
Otherwise they are classes of the same names.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import cloudpickle

from stepmill.spec.errors import ClosedPoolError, EnvError, EnvTimeout, StepmillError, WorkerDied, rebuild_error
from stepmill.worker.error_records import describe_error, env_error


@cache  # a failed import searches the whole path again
def load(module: str, name: str) -> Any:
    """Return a name of a module of mlagents_envs, or None if the library is not installed or lacks the name."""
    try:
        return getattr(import_module(f"mlagents_envs.{module}"), name, None)
    except ImportError:
        return None


MAX_PICKLE_BYTES = 1 << 20  # only the text of a larger exception is sent

Failure = dict[str, Any]
"""An exception as it is sent: its record, the names of its classes, and pickles of it and of its class, or None."""


def _class(name: str, base: type[Exception], what: str) -> type[Exception]:
    found: type[Exception] | None = load("exception", name)
    return found or type(name, (base,), {"__doc__": what, "__module__": __name__})


UnityException = _class("UnityException", Exception, "The base of all errors of a Unity env.")
UnityEnvironmentException = _class(
    "UnityEnvironmentException", UnityException, "The env could not be started or closed."
)
UnityCommunicationException = _class("UnityCommunicationException", UnityException, "The connection to the env broke.")
UnityCommunicatorStoppedException = _class(
    "UnityCommunicatorStoppedException", UnityException, "The env was stopped deliberately."
)
UnityTimeOutException = _class("UnityTimeOutException", UnityException, "The env took too long.")
UnitySideChannelException = _class("UnitySideChannelException", UnityException, "A side channel was misused.")

RESTARTABLE = ("UnityCommunicationException", "UnityTimeOutException", "UnityEnvironmentException")
"""A worker whose env raises one of these is restarted, within its quota. Names: the worker may have a class of its own."""


class UnityWorkerDied(WorkerDied, UnityCommunicationException):  # type: ignore[misc, valid-type]
    """A worker's process ended."""


class UnityWorkerTimeout(EnvTimeout, UnityTimeOutException):  # type: ignore[misc, valid-type]
    """A worker was ended because its env took longer than `step_timeout_s` or `reset_timeout_s`."""


class UnityClosedError(ClosedPoolError, UnityCommunicationException):  # type: ignore[misc, valid-type]
    """The manager is closed."""

    def __init__(self) -> None:
        super().__init__("UnityEnvironment worker: send failed. The manager is closed; make another one")


class UnityStuckError(StepmillError, TimeoutError):
    """Workers did not finish their steps before a reset."""


def died(error: WorkerDied, verb: str) -> UnityWorkerDied:
    """Return the error for a worker's death, which begins with ML-Agents' text. `verb` is what failed, "send" or "recv"."""
    return rebuild_error(UnityWorkerDied, f"UnityEnvironment worker: {verb} failed. {error.message}", error.__dict__)


def timed_out(error: EnvTimeout) -> UnityWorkerTimeout:
    """Return the error for a worker that was ended because of a deadline."""
    return rebuild_error(UnityWorkerTimeout, error.message, error.__dict__)


# ---- between processes -------------------------------------------------------------------------------------------------


def pack(exc: BaseException, phase: str) -> Failure:
    """Return an exception in the form in which it is sent. This raises nothing, even if the exception's methods do."""
    names = [cls.__name__ for cls in type(exc).__mro__]
    return {**describe_error(exc, phase), "names": names, "pickled": _pickled(exc), "cls": _dump(type(exc))}


def _pickled(exc: BaseException) -> bytes | None:
    # An exception that cannot be unpickled here cannot be unpickled in the learner.
    data = _dump(exc)
    if data is None or len(data) > MAX_PICKLE_BYTES:
        return None
    with contextlib.suppress(BaseException):
        if type(pickle.loads(data)) is type(exc):
            return data
    return None


def _dump(value: object) -> bytes | None:
    with contextlib.suppress(BaseException):
        data: bytes = cloudpickle.dumps(value)
        return data
    return None


def rebuild(failure: Failure, worker_id: int) -> Exception:
    """Return the exception that an env raised, with the remote traceback as its cause.

    If the exception cannot be pickled, return an EnvError that is also of the env's class if possible. No constructor
    of that class is called.
    """
    error = to_env_error(failure, worker_id)
    original = _load(failure["pickled"])
    if isinstance(original, Exception):
        original.__cause__ = error
        return original
    cls = _load(failure["cls"])
    return _combine(cls, error) if isinstance(cls, type) and issubclass(cls, Exception) else error


def to_env_error(failure: Failure, worker_id: int) -> EnvError:
    """Return the EnvError for an env's exception."""
    return env_error({key: failure[key] for key in ("phase", "type", "message", "traceback")}, worker_id)


def _load(data: bytes | None) -> object:
    if data is None:
        return None
    with contextlib.suppress(Exception):  # its library may not be installed here
        return pickle.loads(data)
    return None


def _combine(cls: type[Exception], error: EnvError) -> Exception:
    try:
        both = type(cls.__name__, (EnvError, cls), {"__module__": __name__, "__doc__": cls.__doc__})
        made: Exception = BaseException.__new__(both, error.message)
        made.__dict__.update(error.__dict__)
    except TypeError:  # the memory layouts of the classes differ
        return error
    return made


def closed() -> Exception:
    """Return the error for envs that were ended deliberately."""
    return UnityCommunicationException("At least one of the environments has closed.")


def is_restartable(failure: Failure) -> bool:
    """Return whether a restart may help, because the env, its connection or a deadline has failed."""
    return any(name in RESTARTABLE for name in failure["names"])


def is_interrupt(failure: Failure) -> bool:
    """Return whether the env raised KeyboardInterrupt."""
    return "KeyboardInterrupt" in failure["names"]


def is_stop(failure: Failure) -> bool:
    """Return whether the env was stopped deliberately, as by the editor's stop button.

    The two generations report this differently.
    """
    names: Sequence[str] = failure["names"]
    is_old = "UnityCommunicationException" in names and "Communicator has stopped" in failure["message"]
    return is_old or "UnityCommunicatorStoppedException" in names
