"""Exceptions as text. They cross processes so, since nobody can know what a stranger's exception class needs or does."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType

from stepmill.spec.errors import EnvError
from stepmill.worker.messages import Record

Passes = Callable[[BaseException], bool]
"""Says which exceptions are raised, in place of becoming a record."""

MAX_TEXT = 65_536  # characters of a message or traceback that are kept: half from its beginning, half from its end


def passes_none(_error: BaseException) -> bool:
    """Lets no exception of an env pass: in a worker none is the learner's."""
    return False


def describe(exc: BaseException, phase: str, *, passes: Passes = passes_none) -> dict[str, str]:
    """Returns the record of an exception: phase, type, message, traceback.

    Args:
        exc: whatever its methods raise is left out of the record.
        phase: what the env was doing.
        passes: says which exceptions that come up meanwhile are raised here.
    """
    return {
        "phase": phase,
        "type": _guard(lambda: _name_of(type(exc)), "an exception whose class has no name", passes),
        "message": _guard(lambda: _cut(str(exc)), "(its text could not be read)", passes),
        "traceback": _guard(lambda: _format(exc, passes), "(its traceback could not be read)", passes),
    }


def env_error(record: Record, env_id: int | None) -> EnvError:
    """Returns the error that tells a user of a record."""
    subject = "an env" if env_id is None else f"env {env_id}"
    text = f": {record['message']}" if record["message"] else ""
    return EnvError(
        f"{subject} raised {record['type']} in {record['phase']}{text}",
        env_id=env_id,
        phase=record["phase"],
        error_type=record["type"],
        remote_traceback=record["traceback"],
    )


def _guard(read: Callable[[], str], otherwise: str, passes: Passes) -> str:
    try:
        # Lone surrogates go by their numbers: not every reader of a record takes them.
        return read().encode("utf-8", "backslashreplace").decode("utf-8")
    except (
        BaseException
    ) as exc:  # an exception's __str__ may raise anything at all, and must not take the worker with it
        if passes(exc):
            raise
        return otherwise


def _name_of(cls: type[BaseException]) -> str:
    module = str(cls.__module__)
    return str(cls.__qualname__) if module in ("builtins", "__main__") else f"{module}.{cls.__qualname__}"


def _format(exc: BaseException, passes: Passes) -> str:
    trace = _skip_own_frames(exc.__traceback__)
    try:
        return _cut("".join(traceback.format_exception(type(exc), exc, trace)))
    except BaseException as failure:  # a broken __str__, __cause__ or __notes__: the frames alone can still be told
        if passes(failure):
            raise
        frames = "".join(traceback.format_tb(trace))
        return _cut(
            f"{frames}{_name_of(type(exc))}: {_guard(lambda: str(exc), '(its text could not be read)', passes)}\n"
        )


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__package__") == __package__:
        inner = inner.tb_next
    return inner if inner is not None else trace


def _cut(text: str) -> str:
    # A copy as plain str: str() of an exception may return an instance of a subclass, which would not travel.
    text = str.__str__(text)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"
