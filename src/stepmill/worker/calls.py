"""What a slow request is, and what it does to an env. The same code serves every backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepmill.spec.errors import UsageError
from stepmill.worker.messages import Outcome, Record, Reply, Request, RequestKind, Value
from stepmill.worker.records import describe

RESERVED = {"reset": "reset()", "step": "step() or send()", "close": "close()"}
_PHASES = {RequestKind.RENDER: "render"}


@dataclass(frozen=True)
class Unreadable:
    """Stands for a payload that could not be loaded: whoever does the request raises the cause."""

    cause: BaseException


class ServingLoop(Protocol):
    """What serving a request asks of the native loop."""

    def run_until(self, local: int, after_ticket: int) -> object: ...
    def refresh(self) -> object: ...


# ---- making requests -------------------------------------------------------------------------------------------------


def check_call(name: str | Callable[..., object]) -> None:
    """Refuses names that would step an env behind the engine's back.

    Raises:
        UsageError: `name` is one of RESERVED.
    """
    if isinstance(name, str) and name in RESERVED:
        raise UsageError(
            f"call({name!r}) would bypass the engine, for every env; use {RESERVED[name]} of the pool instead"
        )


def call_payload(
    name: str | Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
) -> object:
    """Returns the payload of a CALL request: the method `name`, or the attribute if it is not callable, or a function."""
    check_call(name)
    return (name, tuple(args), dict(kwargs or {}))


def set_payload(name: str, values: Sequence[object]) -> object:
    """Returns the payload of a SET_ATTR request with one value per env of the request."""
    return (name, tuple(values))


# ---- serving them ----------------------------------------------------------------------------------------------------


def answer(
    loop: ServingLoop, envs: Sequence[object], request: Request, *, passes: tuple[type[BaseException], ...] = ()
) -> Reply:
    """Does a request: after the commands sent to its envs before it, and before those sent after.

    Args:
        loop: the native loop of the worker, for commands that are still to be done.
        envs: all envs of the worker, by server.
        request: with its payload loaded.
        passes: exceptions of an env that are raised here; all others become records.
    """
    for server, ticket in zip(request.servers, request.after, strict=True):
        loop.run_until(server, ticket)
    outcomes = tuple(_outcome(envs[server], request, place, passes) for place, server in enumerate(request.servers))
    try:
        loop.refresh()
    except Exception as exc:  # the request took an env's step or reset away
        return Reply(request.id, (describe(exc, _phase(request)),) * len(outcomes))
    return Reply(request.id, outcomes)


def obey(envs: Sequence[object], request: Request) -> tuple[Record | None, ...]:
    """Does a request with envs that no loop serves yet; returns, per env of the request, what it raised."""
    outcomes = (_outcome(envs[server], request, place, ()) for place, server in enumerate(request.servers))
    return tuple(None if isinstance(outcome, Value) else {**outcome, "phase": "restore"} for outcome in outcomes)


def _phase(request: Request) -> str:
    return _PHASES.get(request.kind, "call")


def _outcome(env: object, request: Request, place: int, passes: tuple[type[BaseException], ...]) -> Outcome:
    try:
        return Value(_perform(env, request, place))
    except passes:
        raise
    except BaseException as exc:  # SystemExit and the like are the env's doing, too, and must not end the worker
        return describe(exc, _phase(request))


def _perform(env: object, request: Request, place: int) -> object:
    payload = request.payload
    if isinstance(payload, Unreadable):
        raise payload.cause
    if request.kind is RequestKind.RENDER:
        return get_attr(env, "render")()  # type: ignore[operator]
    if request.kind is RequestKind.GET_ATTR and isinstance(payload, str):
        return get_attr(env, payload)
    if request.kind is RequestKind.SET_ATTR and isinstance(payload, tuple):
        name, values = payload
        set_attr(env, name, values[place])
        return None
    if request.kind is RequestKind.CALL and isinstance(payload, tuple):
        name, args, kwargs = payload
        if callable(name):
            return name(env, *args, **kwargs)
        attribute = get_attr(env, name)
        return attribute(*args, **kwargs) if callable(attribute) else attribute
    raise TypeError(f"a request of kind {request.kind!r} cannot have a payload of type {type(payload).__name__}")


def get_attr(env: object, name: str) -> object:
    """Returns an attribute of an env, looked for through its wrappers where the env offers that."""
    through_wrappers = getattr(env, "get_wrapper_attr", None)
    found: object = through_wrappers(name) if through_wrappers is not None else getattr(env, name)
    return found


def set_attr(env: object, name: str, value: object) -> None:
    """Sets an attribute of an env, on the wrapper that has it where the env offers that."""
    through_wrappers = getattr(env, "set_wrapper_attr", None)
    if through_wrappers is not None:
        through_wrappers(name, value)
    else:
        setattr(env, name, value)
