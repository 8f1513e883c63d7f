"""Errors of stepmill that are also RuntimeErrors, as in ALF, and contain the texts of ALF's errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stepmill.spec.errors import BadOutput, EnvError, EnvTimeout, StepmillError, UsageError, WorkerDied, rebuild_error
from stepmill.spec.exception_classes import unmixed

_INTERRUPTED = "ProcessEnvironment is interruptted"
_STRUCTURE = "array structure mismatch."
_NOT_AN_ARRAY = "It is likely that one of the field is not converted to numpy array or scalar."
_PLACE = re.compile(r"^(?:env \d+ gave a wrong [^:]*: )?(?:leaf )?\[(\d+)\]")
_WRONG_STRUCTURE = re.compile(r"must be a (dict|tuple)|lacks the key|has the keys|has \d+ items|must return a TimeStep")


class InterruptedEnvError(EnvError, RuntimeError):
    """An env raised an exception. The text names the env and has the traceback."""


class InterruptedWorkerError(WorkerDied, RuntimeError):
    """A process ended. ALF's own class would wait without limit."""


class EnvTimeoutError(EnvTimeout, RuntimeError):
    """An env took longer than its time limit."""


class TimeStepError(BadOutput, RuntimeError):
    """An env returned a TimeStep that its specs do not allow."""


class ActionError(UsageError, RuntimeError):
    """Actions do not fit the action spec. Nothing was stepped."""


class NotAnArrayError(ActionError, AttributeError):
    """An action is no tensor."""


class SpareEnvError(UsageError, RuntimeError):
    """Spare envs were requested for batched envs."""


class StartMethodError(UsageError, AssertionError):
    """The start method is unknown."""


class NotStartedError(UsageError, AssertionError):
    """A ProcessEnvironment was used before it was started, or started twice."""


_RUNTIME: dict[type[StepmillError], type[StepmillError]] = {
    EnvError: InterruptedEnvError,
    WorkerDied: InterruptedWorkerError,
    EnvTimeout: EnvTimeoutError,
    BadOutput: TimeStepError,
}


def as_runtime_error(error: StepmillError, fields: Sequence[str] = ()) -> StepmillError:
    """Return an error of an env or a worker as a RuntimeError. Return other errors unchanged.

    Args:
        error: the error that the pool raised.
        fields: names of the fields of a TimeStep, which replace their numbers in the text.
    """
    cls = _RUNTIME.get(unmixed(type(error)))
    if cls is None:
        return error
    text = error.message
    if isinstance(error, BadOutput):
        text = _explain(text, fields)
    elif getattr(error, "phase", "") in ("reset", "step", ""):
        text = f"{_INTERRUPTED}: {text}"
    copy = rebuild_error(cls, text, error.__dict__)
    copy.others = tuple(as_runtime_error(other, fields) for other in error.others)
    return copy


def _explain(text: str, fields: Sequence[str]) -> str:
    """Return the text for a wrong TimeStep, with the field's name and ALF's text for this kind of error."""

    def name(match: re.Match[str]) -> str:
        index = int(match[1])
        return match[0].replace(f"[{index}]", fields[index]) if index < len(fields) else match[0]

    head = _STRUCTURE if _WRONG_STRUCTURE.search(text) else _NOT_AN_ARRAY if "has dtype" in text else ""
    named = _PLACE.sub(name, text)
    return f"{head} {named}".strip()


def wrong_structure(detail: str) -> ActionError:
    """Return the error for actions whose structure differs from the action spec."""
    return ActionError(f"{_STRUCTURE} {detail}; give actions in the structure of action_spec()")


def wrong_batch(path: str, expected: int, got: int, shape: tuple[int, ...]) -> ActionError:
    """Return the error for actions for another number of envs."""
    return ActionError(f"Incorrect batch size. Expected: {expected}, got {got}, in {path} of shape {shape}")


def wrong_array(path: str, expected: object, got: object, shape: tuple[int, ...]) -> ActionError:
    """Return the error for an array of another dtype or shape."""
    return ActionError(f"{path} must be {expected}, but is {got} of shape {shape}; give actions that the spec allows")


def not_an_array(path: str, value: object) -> NotAnArrayError:
    """Return the error for a value that is not an array."""
    return NotAnArrayError(f"{_NOT_AN_ARRAY} {path} is a {type(value).__name__}; give a tensor or an array")
