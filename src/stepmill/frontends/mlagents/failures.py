"""What goes wrong with a Unity env, as exceptions: ML-Agents' own classes, and the env's, rebuilt where that is safe.

The classes below are those of mlagents_envs where it is installed, so that code written for it catches them; ours of the
same names where it is not.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle

from stepmill.frontends.mlagents.optional_imports import load
from stepmill.spec.errors import EnvError, EnvTimeout, StepmillError, WorkerDied
from stepmill.worker.error_records import describe_error, env_error

MAX_PICKLE_BYTES = 1 << 20  # an exception that drags more along is told by its text

Failure = dict[str, Any]
"""An exception on its way: its record, the names of its classes, and pickles of it and of its class, or None."""


def _class(name: str, base: type[Exception], what: str) -> type[Exception]:
    found: type[Exception] | None = load("exception", name)
    return found or type(name, (base,), {"__doc__": what, "__module__": __name__})


UnityException = _class("UnityException", Exception, "Whatever goes wrong with a Unity env.")
UnityEnvironmentException = _class(
    "UnityEnvironmentException", UnityException, "The env could not be started or ended."
)
UnityCommunicationException = _class("UnityCommunicationException", UnityException, "The connection to the env broke.")
UnityCommunicatorStoppedException = _class(
    "UnityCommunicatorStoppedException", UnityException, "The env was stopped deliberately."
)
UnityTimeOutException = _class("UnityTimeOutException", UnityException, "The env took too long.")
UnitySideChannelException = _class("UnitySideChannelException", UnityException, "A side channel was misused.")

RECOVERABLE = ("UnityCommunicationException", "UnityTimeOutException", "UnityEnvironmentException")
"""A worker whose env raises one of these is restarted, within its quota; by name, since a worker's class may be another."""


class UnityWorkerDied(WorkerDied, UnityCommunicationException):  # type: ignore[misc, valid-type]
    """A worker's process is gone, and its env with it."""


class UnityWorkerTimeout(EnvTimeout, UnityTimeOutException):  # type: ignore[misc, valid-type]
    """A worker was ended because its env took longer than `step_timeout_s` or `reset_timeout_s`."""


class UnityStuckError(StepmillError, TimeoutError):
    """Workers did not finish what they were at before a reset."""


def died(error: WorkerDied, verb: str) -> UnityWorkerDied:
    """Return a worker's death in ML-Agents' words. `verb`: what of the worker failed, "send" or "recv"."""
    return UnityWorkerDied(
        f"UnityEnvironment worker: {verb} failed. {error.message}",
        worker=error.worker,
        env_ids=error.env_ids,
        exit_code=error.exit_code,
        signal_name=error.signal_name,
    )


def overdue(error: EnvTimeout) -> UnityWorkerTimeout:
    """Return a worker's end by a deadline in ML-Agents' words."""
    return UnityWorkerTimeout(error.message, env_id=error.env_id, phase=error.phase, timeout_s=error.timeout_s)


# ---- between processes -------------------------------------------------------------------------------------------------


def pack(exc: BaseException, phase: str) -> Failure:
    """Return what travels of an exception. Never raises, whatever the exception does."""
    names = [cls.__name__ for cls in type(exc).__mro__]
    return {**describe_error(exc, phase), "names": names, "pickled": _pickled(exc), "cls": _dump(type(exc))}


def _pickled(exc: BaseException) -> bytes | None:
    # Tried here first: what does not come back whole in the process that made it will not elsewhere.
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
    """Return the exception that an env raised: itself, with the remote traceback as its cause.

    Where it cannot be carried over, it is an EnvError that is also of the env's class if that allows it; no constructor
    of that class is called then.
    """
    error = env_error({key: failure[key] for key in ("phase", "type", "message", "traceback")}, worker_id)
    original = _load(failure["pickled"])
    if isinstance(original, Exception):
        original.__cause__ = error
        return original
    cls = _load(failure["cls"])
    return _both(cls, error) if isinstance(cls, type) and issubclass(cls, Exception) else error


def _load(data: bytes | None) -> object:
    if data is None:
        return None
    with contextlib.suppress(Exception):  # its library may not be here
        return pickle.loads(data)
    return None


def _both(cls: type[Exception], error: EnvError) -> Exception:
    try:
        both = type(cls.__name__, (EnvError, cls), {"__module__": __name__, "__doc__": cls.__doc__})
        made: Exception = BaseException.__new__(both, error.message)
        made.__dict__.update(error.__dict__)
    except TypeError:  # classes of other memory layouts do not mix
        return error
    return made


def is_recoverable(failure: Failure) -> bool:
    """Whether a restart may help: the env, the connection to it, or a deadline."""
    return any(name in RECOVERABLE for name in failure["names"])


def is_stop(failure: Failure) -> bool:
    """Whether the env was stopped deliberately, as by the editor's stop button, in the words of either generation."""
    names: Sequence[str] = failure["names"]
    is_old = "UnityCommunicationException" in names and "Communicator has stopped" in failure["message"]
    return is_old or "UnityCommunicatorStoppedException" in names
