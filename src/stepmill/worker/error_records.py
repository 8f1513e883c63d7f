"""Converts exceptions to text and back to errors.

Exceptions are sent to other processes as text, because an unknown class may not be picklable, or may run code when it
is loaded.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from types import TracebackType

from stepmill.spec.errors import EnvError
from stepmill.spec.remote_env import RemoteError
from stepmill.worker.messages import ErrorRecord

RaisePredicate = Callable[[BaseException], bool]
"""Says which exceptions are raised instead of becoming a record."""

_OLD_RESET = re.compile(r"unexpected keyword argument '(seed|options)'")
MAX_TEXT = 65_536  # a record has at most this many characters of a message or traceback: its beginning and its end


def raise_none(_error: BaseException) -> bool:
    """Return False, so that no exception of an env is raised. Workers use this: all their exceptions are of envs."""
    return False


def describe_error(exc: BaseException, phase: str, *, should_raise: RaisePredicate = raise_none) -> dict[str, str]:
    """Return the record of an exception: phase, type, message, traceback.

    Args:
        exc: the exception. If its methods raise exceptions, the record says that a part could not be read.
        phase: what the env was doing.
        should_raise: says which exceptions of those methods are raised here.
    """
    if isinstance(exc, RemoteError):
        text, trace = _cut(exc.message), _cut(exc.remote_traceback)
        return {"phase": phase, "type": exc.error_type, "message": text, "traceback": trace}
    return {
        "phase": phase,
        "type": _guard(lambda: _name_of(type(exc)), "an exception whose class has no name", should_raise),
        "message": _guard(lambda: _cut(str(exc)), "(its text could not be read)", should_raise),
        "traceback": _guard(lambda: _format(exc, should_raise), "(its traceback could not be read)", should_raise),
    }


def env_error(record: ErrorRecord, env_id: int | None) -> EnvError:
    """Return the error that reports a record to the user."""
    subject = "an env" if env_id is None else f"env {env_id}"
    text = f": {record['message']}" if record["message"] else ""
    if record["phase"] == "reset" and record["type"] == "TypeError" and _OLD_RESET.search(record["message"]):
        text += "; Gymnasium's envs have reset(self, *, seed=None, options=None), which returns (observation, info)"
    is_pdbs = record["type"] == "SystemExit" and "in do_quit" in record["traceback"]  # since Python 3.14
    if is_pdbs or record["type"] == "bdb.BdbQuit":
        text = ": a worker process has no terminal; use backend='serial' for breakpoint() and pdb"
    return EnvError(
        f"{subject} raised {record['type']} in {record['phase']}{text}",
        env_id=env_id,
        phase=record["phase"],
        error_type=record["type"],
        remote_traceback=record["traceback"],
    )


def _guard(read: Callable[[], str], otherwise: str, should_raise: RaisePredicate) -> str:
    try:
        # Lone surrogates are escaped, because not every reader of a record accepts them.
        return read().encode("utf-8", "backslashreplace").decode("utf-8")
    except BaseException as exc:  # an exception's __str__ may raise anything, which must not end the worker
        if should_raise(exc):
            raise
        return otherwise


def _name_of(cls: type[BaseException]) -> str:
    module = str(cls.__module__)
    return str(cls.__qualname__) if module in ("builtins", "__main__") else f"{module}.{cls.__qualname__}"


def _format(exc: BaseException, should_raise: RaisePredicate) -> str:
    trace = _skip_own_frames(exc.__traceback__)
    try:
        return _cut("".join(traceback.format_exception(type(exc), exc, trace)))
    except BaseException as failure:  # __str__, __cause__ or __notes__ is broken, so only the frames are shown
        if should_raise(failure):
            raise
        frames = "".join(traceback.format_tb(trace))
        return _cut(
            f"{frames}{_name_of(type(exc))}: {_guard(lambda: str(exc), '(its text could not be read)', should_raise)}\n"
        )


def _skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__package__") == __package__:
        inner = inner.tb_next
    return inner if inner is not None else trace


def _cut(text: str) -> str:
    # str() of an exception may return an instance of a subclass of str, which need not be picklable.
    text = str.__str__(text)
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"
