"""Every error that stepmill raises, as one tree.

    StepmillError
    ├── UsageError (ValueError)      the user's mistake
    │   ├── BusyEnvError             an env is still stepping
    │   ├── SpecMismatch             the envs of a pool differ
    │   └── ClosedPoolError          the pool is closed
    ├── EnvError                     the env's: it raised
    ├── BadOutput                    the env's: it returned what its spaces do not allow
    ├── EnvTimeout                   the env's: it took too long
    ├── WorkerDied                   the world's: a worker is gone
    ├── LauncherDied                 the world's: the process that starts workers is gone
    ├── RecvTimeout (TimeoutError)   results did not come in time; nothing is lost
    ├── MissingExtraError (ImportError)
    └── EngineBug                    ours

Exceptions of an env travel as text plus the name of their class, never by calling a stranger's constructor, and
every error here pickles. Several faults at once become one error, by `join_errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MAX_TOLD = 4  # different faults, beside the first, that the text of an error tells
_MAX_RANGES = 16


def _rebuild(cls: type[StepmillError], message: str, state: Mapping[str, object]) -> StepmillError:
    """Make an unpickled error without its own constructor, which may ask for more than a message."""
    error = cls.__new__(cls)
    StepmillError.__init__(error, message)
    error.__dict__.update(state)
    return error


class StepmillError(Exception):
    """What all errors of stepmill have in common.

    Attributes:
        message: what happened, to which env, and what to do; without the faults that came along.
        others: the faults that happened beside this one, each a StepmillError.
        capsule: path of the crash capsule that tells of it; None if there is none.
        is_final: whether the same attempt fails again for as long as the pool lives, so that it is not repeated.
    """

    capsule: str | None = None
    is_final: bool = False

    def __init__(self, message: str, *, others: Sequence[StepmillError] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.others = tuple(others)

    def details(self) -> str:
        """Return what follows the message when the error is printed; empty if nothing does."""
        return ""

    def __str__(self) -> str:
        groups: dict[object, list[StepmillError]] = {}
        for error in (self, *self.others):
            groups.setdefault(error._fault(), []).append(error)
        own, *rest = groups.values()
        told = rest[:_MAX_TOLD]
        lines = [
            *_same(own),
            *(line for group in told for line in (f"and at the same time: {group[0].message}", *_same(group))),
        ]
        if len(rest) > len(told):
            lines.append(f"and {sum(map(len, rest[_MAX_TOLD:]))} more faults, which are in `others` of this error")
        parts = [self.message, "\n".join(lines), *(group[0].details() for group in (own, *told))]
        return "\n\n".join(part for part in parts if part)

    def _fault(self) -> object:
        """Return what faults of several envs have in common if they are one fault; here, nothing but the whole text."""
        return type(self), self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class UsageError(StepmillError, ValueError):
    """The caller asked for something that cannot be done; nothing has been changed."""


class BusyEnvError(UsageError):
    """An env is still stepping or resetting, or the pool is in use by another call.

    Attributes:
        env_ids: the envs concerned; empty if it is the pool as a whole.
    """

    def __init__(self, message: str, *, env_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)


class SpecMismatch(UsageError):
    """The envs cannot share a pool.

    Attributes:
        specs: what each env said of itself, an EnvSpec by env_id.
    """

    def __init__(self, message: str, *, specs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.specs = tuple(specs)


class ClosedPoolError(UsageError):
    """The pool is closed, or belongs to another process."""


class EnvError(StepmillError):
    """An env raised.

    Attributes:
        env_id: the env that raised; None if it is not known which.
        phase: what it was doing: "construct", "reset", "step", "call", "render" or "close".
        error_type: the dotted name of the class of the original exception.
        remote_traceback: the traceback where it was raised, as text; may be empty.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int | None = None,
        phase: str = "",
        error_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.phase = phase
        self.error_type = error_type
        self.remote_traceback = remote_traceback

    def _fault(self) -> object:
        """An env's number makes no other fault of it."""
        return type(self), self.message.replace(f"env {self.env_id} ", "", 1), self.remote_traceback

    def details(self) -> str:
        """Return the traceback from where the env ran."""
        if not self.remote_traceback:
            return ""
        return f"env {self.env_id}, where it raised:\n{self.remote_traceback.rstrip()}"


class BadOutput(StepmillError):
    """An env returned something that its spaces, or the rules of its API, do not allow.

    Attributes:
        env_id: the env; None if it is not known which.
        leaf: where in the result the bad value is, for example "observation['camera'][0]" or "reward".
        phase: "reset", "step" or "info".
    """

    def __init__(self, message: str, *, env_id: int | None = None, leaf: str = "", phase: str = "") -> None:
        super().__init__(message)
        self.env_id = env_id
        self.leaf = leaf
        self.phase = phase


class EnvTimeout(StepmillError):
    """An env was given up because it took longer than its deadline.

    Attributes:
        env_id: the env; None if a whole worker was late.
        phase: "construct", "reset", "step", "call", "render" or "close".
        timeout_s: the deadline that passed, in seconds.
        env_ids: the envs that are lost, since their worker was ended: the env, and those that shared the worker with it.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int | None = None,
        phase: str = "",
        timeout_s: float = 0.0,
        env_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.env_ids = tuple(env_ids)
        self.phase = phase
        self.timeout_s = timeout_s


class WorkerDied(StepmillError):
    """A worker is gone, and with it the envs that it served.

    Attributes:
        worker: number of the worker.
        env_ids: the envs that it served.
        exit_code: its exit status; None if a signal ended it or if the status is not known.
        signal_name: for example "SIGKILL"; None if no signal ended it.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int,
        env_ids: Sequence[int] = (),
        exit_code: int | None = None,
        signal_name: str | None = None,
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.env_ids = tuple(env_ids)
        self.exit_code = exit_code
        self.signal_name = signal_name


class LauncherDied(StepmillError):
    """The process that starts a pool's workers is gone.

    It is replaced at the next restart, except with context="fork": a fork of the learner as it was when the pool was made
    cannot be had again. Then `is_final` is set, and no worker of the pool can be restarted any more.

    Attributes:
        exit_code: its exit status; None if a signal ended it or if the status is not known.
        signal_name: for example "SIGKILL"; None if no signal ended it.
    """

    def __init__(
        self, message: str, *, exit_code: int | None = None, signal_name: str | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.is_final = is_final


class RecvTimeout(StepmillError, TimeoutError):
    """Too few results came before the deadline. Nothing is lost: wait again.

    Attributes:
        env_ids: the envs that were still at work.
        timeout_s: the deadline that passed, in seconds.
    """

    def __init__(self, message: str, *, env_ids: Sequence[int] = (), timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)
        self.timeout_s = timeout_s


class MissingExtraError(StepmillError, ImportError):
    """An optional library is not installed.

    Attributes:
        module: the module that could not be imported.
        extra: the extra of stepmill that brings it.
    """

    def __init__(self, *, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed; run: pip install 'stepmill[{extra}]'")
        self.module = module
        self.extra = extra


class EngineBug(StepmillError):
    """Something that stepmill rules out has happened; please report it."""


def _same(errors: Sequence[StepmillError]) -> list[str]:
    """Return a line that names the envs of all these errors but the first, which are the same fault; none if there are none."""
    if len(errors) == 1:
        return []
    ids = [error.env_id for error in errors[1:] if isinstance(error, EnvError) and error.env_id is not None]
    return [f"the same happened to env{'s' if len(ids) > 1 else ''} {_ranges(ids)}"]


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, "1-3, 5"; at most so many of its parts that a line stays short."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    told = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts[:_MAX_RANGES])
    return told if len(parts) <= _MAX_RANGES else f"{told} and others, {len(numbers)} in all"


def join_errors(errors: Sequence[StepmillError]) -> StepmillError:
    """Return one error that stands for several faults: a copy of the first, with the rest in `others`.

    Its text mentions them: what several envs raised alike, once, with the envs. The arguments are not changed.
    """
    first, *rest = errors
    if not rest:
        return first
    joined = _rebuild(type(first), first.message, first.__dict__)
    joined.others = (*first.others, *(flat for error in rest for flat in (error, *error.others)))
    joined.__cause__ = first.__cause__
    return joined
