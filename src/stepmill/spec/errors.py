"""Every error that stepmill raises, as one tree.

    StepmillError
    ├── UsageError (ValueError)      the caller made a mistake
    │   ├── BusyEnvError             an env is still stepping
    │   ├── ArgumentTypeError (TypeError)   an argument is missing, unknown, or has a wrong type
    │   ├── SpecMismatch             the envs of a pool differ
    │   └── ClosedPoolError          the pool is closed
    ├── EnvError                     an env raised an exception
    ├── BadOutput                    an env returned a value that its spaces do not allow
    ├── EnvTimeout                   an env took too long
    ├── WorkerDied                   a worker process ended
    ├── LauncherDied                 the process that starts workers ended
    ├── RecvTimeout (TimeoutError)   results did not arrive in time; nothing is lost
    ├── MissingExtraError (ImportError)
    └── EngineBug                    a bug in stepmill

An env's exception is transferred as text with the name of its class. Its constructor is not called. An EnvError is also
an instance of that class if the program has imported the class, so that `except ValueError` catches an env's
ValueError. Every error here can be pickled. `join_errors` makes one error of several faults.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from stepmill.spec.exception_classes import find_class, is_plain, mix, new_instance, unmixed

if TYPE_CHECKING:
    from typing_extensions import Self

_Error = TypeVar("_Error", bound="StepmillError")
_NUMBER = re.compile(r"\b(env|worker) \d+\b ?")
_MAX_SHOWN = 4  # how many different faults the text of an error shows besides the first
_MAX_RANGES = 16


def rebuild_error(cls: type[_Error], message: str, state: Mapping[str, object]) -> _Error:
    """Return an error with a message, and with the attributes `state` of another error.

    The constructor is not called, because it may require more arguments than a message.
    """
    error = cls.__new__(cls, **{name: state[name] for name in ("error_type",) if name in state})
    StepmillError.__init__(error, message)
    error.__dict__.update({**state, "message": message})
    return error


class StepmillError(Exception):
    """The base class of all errors of stepmill.

    Attributes:
        message: what happened, to which env, and what to do. It does not include the faults in `others`.
        others: the faults that happened at the same time, each as a StepmillError.
        capsule: the path of the crash capsule of this fault; None if there is none.
        is_final: whether every further attempt in this pool would fail in the same way. No further attempt is then made.
    """

    capsule: str | None = None
    is_final: bool = False

    def __init__(self, message: str, *, others: Sequence[StepmillError] = ()) -> None:
        Exception.__init__(self, message)  # a class of the user that comes next may have any constructor
        self.message = message
        self.others = tuple(others)

    def details(self) -> str:
        """Return the text that follows the message when the error is printed, or an empty string."""
        return ""

    def __str__(self) -> str:
        groups: dict[object, list[StepmillError]] = {}
        for error in (self, *self.others):
            groups.setdefault(error._fault(), []).append(error)
        own, *rest = groups.values()
        shown = rest[:_MAX_SHOWN]
        lines = [
            *_other_envs(own),
            *(line for group in shown for line in (f"and at the same time: {group[0].message}", *_other_envs(group))),
        ]
        if len(rest) > len(shown):
            lines.append(f"and {sum(map(len, rest[_MAX_SHOWN:]))} more faults, which are in `others` of this error")
        parts = [self.message, "\n".join(lines), *(group[0].details() for group in (own, *shown))]
        return "\n\n".join(part for part in parts if part)

    def _fault(self) -> object:
        """Return a key that is equal for the same fault in several envs; here the whole text."""
        return type(self), self.message

    def __reduce__(self) -> tuple[object, ...]:
        return rebuild_error, (unmixed(type(self)), self.message, dict(self.__dict__))


class UsageError(StepmillError, ValueError):
    """The caller asked for something that cannot be done. Nothing has been changed."""


class ArgumentTypeError(UsageError, TypeError):
    """An argument is missing, unknown, given twice, or has a wrong type."""


class BusyEnvError(UsageError):
    """An env is still stepping or resetting, or the pool is in use by another call.

    Attributes:
        env_ids: the busy envs; empty if the pool as a whole is in use.
    """

    def __init__(self, message: str, *, env_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)


class SpecMismatch(UsageError):
    """The envs cannot share a pool.

    Attributes:
        specs: the EnvSpec of each env, by env_id.
    """

    def __init__(self, message: str, *, specs: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.specs = tuple(specs)


class ClosedPoolError(UsageError):
    """The pool is closed, or belongs to another process."""


class EnvError(StepmillError):
    """An env raised an exception.

    An EnvError is also an instance of the class of that exception, if the class is built in or its module is imported
    in this process, and if the class has the constructor of a built-in class. TimeoutError, which is the class of
    RecvTimeout, and SyntaxError are excluded. An EnvError has none of the attributes of the original exception, such as
    `errno`.

    Attributes:
        env_id: the env that raised the exception; None if it is not known.
        phase: what the env was doing: "construct", "reset", "step", "call", "render" or "close"; or "worker_init" if
            the function of the option `workers.init` raised the exception.
        error_type: the dotted name of the class of the original exception.
        remote_traceback: the traceback of the exception in the worker, as text. It may be empty.
    """

    _takes_all_classes = False  # whether an error is also an instance of classes that are not plain

    def __new__(cls, *_args: object, error_type: str = "", **_keywords: object) -> Self:
        original = find_class(error_type)
        if original is None or not (cls._takes_all_classes or is_plain(original)):
            return new_instance(cls)
        return new_instance(mix(cls, original))

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
        """Ignore the number of the env or worker. The same message and traceback in another one is the same fault."""
        return type(self), _NUMBER.sub("", self.message, count=1), self.remote_traceback

    def details(self) -> str:
        """Return the traceback from the worker."""
        if not self.remote_traceback:
            return ""
        owner = "the worker" if self.env_id is None else f"env {self.env_id}"
        return f"traceback of {owner}:\n{self.remote_traceback.rstrip()}"


class BadOutput(StepmillError):
    """An env returned a value that its spaces, or the rules of its API, do not allow.

    Attributes:
        env_id: the env; None if it is not known.
        leaf: the position of the bad value in the result, for example "observation['camera'][0]" or "reward".
        phase: "reset", "step" or "info".
    """

    def __init__(self, message: str, *, env_id: int | None = None, leaf: str = "", phase: str = "") -> None:
        super().__init__(message)
        self.env_id = env_id
        self.leaf = leaf
        self.phase = phase

    def _fault(self) -> object:
        return type(self), _NUMBER.sub("", self.message, count=1)


class EnvTimeout(StepmillError):
    """An env took longer than its time limit, and its worker was killed.

    If the methods of the env are coroutines, the env was cancelled instead.

    Attributes:
        env_id: the env; None if a worker as a whole was late.
        phase: "construct", "reset", "step", "call", "render" or "close".
        timeout_s: the time limit in seconds.
        env_ids: the envs that need a reset: the env that was late and, if its worker was killed, the worker's other envs.
        remote_traceback: where the env was cancelled; empty if its worker was killed.
    """

    def __init__(
        self,
        message: str,
        *,
        env_id: int | None = None,
        phase: str = "",
        timeout_s: float = 0.0,
        env_ids: Sequence[int] = (),
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.env_id = env_id
        self.env_ids = tuple(env_ids)
        self.remote_traceback = remote_traceback
        self.phase = phase
        self.timeout_s = timeout_s


class WorkerDied(StepmillError):
    """A worker process ended, and its envs are lost.

    Attributes:
        worker: the number of the worker.
        env_ids: its envs.
        running_env_id: the env that it was running; None if it was running none or several, or if this is not known.
        exit_code: its exit status; None if a signal killed it or if the status is not known.
        signal_name: for example "SIGKILL"; None if no signal killed it.
        node: the node where it ran, with backend="ray"; None if it ran on this machine.
    """

    def __init__(
        self,
        message: str,
        *,
        worker: int,
        env_ids: Sequence[int] = (),
        exit_code: int | None = None,
        signal_name: str | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message)
        self.node = node
        self.worker = worker
        self.env_ids = tuple(env_ids)
        self.running_env_id: int | None = None
        self.exit_code = exit_code
        self.signal_name = signal_name


class LauncherDied(StepmillError):
    """The process that starts a pool's workers ended.

    The next restart of a worker starts a new launcher. With context="fork" this is not possible, because the launcher
    is a fork of the learner from the time when the pool was made. In this case `is_final` is True, and no worker can be
    restarted.

    Attributes:
        exit_code: its exit status; None if a signal killed it or if the status is not known.
        signal_name: for example "SIGKILL"; None if no signal killed it.
    """

    def __init__(
        self, message: str, *, exit_code: int | None = None, signal_name: str | None = None, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.is_final = is_final


class RecvTimeout(StepmillError, TimeoutError):
    """Too few results arrived before the deadline. Nothing is lost; call recv() again.

    Attributes:
        env_ids: the envs that were still stepping or resetting.
        timeout_s: the time limit in seconds.
    """

    def __init__(self, message: str, *, env_ids: Sequence[int] = (), timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.env_ids = tuple(env_ids)
        self.timeout_s = timeout_s


class MissingExtraError(StepmillError, ImportError):
    """An optional library is not installed.

    Attributes:
        module: the module that could not be imported.
        extra: the extra of stepmill that installs it.
    """

    def __init__(self, *, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed; run: pip install 'stepmill[{extra}]'")
        self.module = module
        self.extra = extra


@contextmanager
def raising_as(translate: Callable[..., Exception], *args: Any) -> Iterator[None]:
    """Raise `translate(error, *args)` in place of an error of stepmill that the block raises."""
    try:
        yield
    except StepmillError as error:
        raise translate(error, *args) from error


@contextmanager
def needs_extra(module: str, extra: str, error: type[ImportError] = ModuleNotFoundError) -> Iterator[None]:
    """Raise MissingExtraError if the block cannot find a module; with `error=ImportError`, also if its import fails."""
    try:
        yield
    except error as exc:
        raise MissingExtraError(module=module, extra=extra) from exc


class EngineBug(StepmillError):
    """An internal invariant of stepmill is broken. Please report it."""


def _other_envs(errors: Sequence[StepmillError]) -> list[str]:
    """Return a line with the envs of all errors except the first. The errors are one fault in several envs or workers."""
    if len(errors) == 1:
        return []
    ids = [env_id for error in errors[1:] if (env_id := getattr(error, "env_id", None)) is not None]
    if not ids:
        return [f"the same happened {len(errors) - 1} more time{'s' if len(errors) > 2 else ''}"]
    return [f"the same happened to env{'s' if len(ids) > 1 else ''} {_ranges(ids)}"]


def _ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, such as "1-3, 5", with at most `_MAX_RANGES` ranges."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts[:_MAX_RANGES])
    return shown if len(parts) <= _MAX_RANGES else f"{shown} and others, {len(numbers)} in total"


def add_clause(error: StepmillError, text: str) -> StepmillError:
    """Add a clause to the message of an error, and return the error."""
    error.message = f"{error.message}; {text}"
    error.args = (error.message,)
    return error


def join_errors(errors: Sequence[StepmillError]) -> StepmillError:
    """Return one error for several faults: a copy of the first, with the rest in `others`.

    Its text shows all faults. A fault that several envs share is shown once, with the env_ids. The arguments do not
    change.
    """
    first, *rest = errors
    if not rest:
        return first
    joined = rebuild_error(type(first), first.message, first.__dict__)
    joined.others = (*first.others, *(flat for error in rest for flat in (error, *error.others)))
    joined.__cause__ = first.__cause__
    return joined


def describe_exit(status: int | None) -> tuple[str, int | None, str | None]:
    """Return how a process ended: as a text for an error, its exit code, and the name of the signal that ended it."""
    if status is None:
        return "ended", None, None
    if status >= 0:
        return f"ended with exit code {status}", status, None
    names = {each.value: each.name for each in signal.Signals}
    name = names.get(-status, f"signal {-status}")  # signals of real time have no names
    return f"was ended by {name}", None, name


def worker_died_error(
    worker: int,
    env_ids: Sequence[int],
    exit_code: int | None,
    *,
    hint: str,
    node: str | None = None,
    cause: str | None = None,
) -> WorkerDied:
    """Return the error for a worker that has ended.

    Args:
        worker: the number of the worker.
        env_ids: the envs of the worker.
        exit_code: its exit status, or minus the number of the signal that ended it; None if it is not known.
        hint: what the user can do, or what the worker was doing.
        node: the node where the worker ran. None if it ran on this machine.
        cause: why the worker ended. None if its exit status says so.
    """
    how, code, name = describe_exit(exit_code)
    text = f"worker {worker}{f' on {node}' if node else ''} {cause or how}; {_lost(env_ids)}; {hint}"
    return WorkerDied(text, worker=worker, env_ids=env_ids, exit_code=code, signal_name=name, node=node)


def name_envs(error: WorkerDied, env_ids: Sequence[int]) -> None:
    """Change which envs the error names. With spares, a worker may serve other envs than those of its plan."""
    error.message = error.message.replace(_lost(error.env_ids), _lost(env_ids), 1)
    error.env_ids, error.args = tuple(env_ids), (error.message,)


def _lost(env_ids: Sequence[int]) -> str:
    return f"its envs {list(env_ids)} are lost" if env_ids else "it served no env"
