"""What a slow request is, and what it does to an env. The same code serves every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepmill import _native, timers
from stepmill.spec.errors import UsageError
from stepmill.worker.messages import Outcome, Record, Reply, Request, RequestKind, Value, dump
from stepmill.worker.records import Passes, describe, passes_none

RESERVED = {"reset": "reset()", "step": "step() or send()", "close": "close()"}
SETTING = (RequestKind.SET_ATTR, RequestKind.SET_PROPERTY, RequestKind.KEEP_OPTIONS)
CHANGING = (RequestKind.CALL, *SETTING)
_PHASES = {RequestKind.RENDER: "render"}


@dataclass(frozen=True)
class Unreadable:
    """Stands for a payload that could not be loaded: whoever does the request raises the cause."""

    cause: BaseException


class ServingLoop(Protocol):
    """What serving a request asks of the native loop."""

    def run_until(self, local: int, after_ticket: int) -> object: ...
    def refresh(self) -> object: ...
    def begin_again(self, local: int) -> object: ...
    def keep_options(self, local: int, options: bytes | None) -> object: ...


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


def set_payload(name: str | Callable[..., object], values: Sequence[object]) -> object:
    """Returns the payload of a SET_ATTR, SET_PROPERTY or KEEP_OPTIONS request with one value per env of the request.

    The name of a SET_ATTR may be a function, to be called with the env and its value.
    """
    return (name, tuple(values))


# ---- serving them ----------------------------------------------------------------------------------------------------


def answer(loop: ServingLoop, envs: Sequence[object], request: Request, *, passes: Passes = passes_none) -> Reply:
    """Does a request: after the commands sent to its envs before it, and before those sent after.

    Args:
        loop: the native loop of the worker, for commands that are still to be done.
        envs: all envs of the worker, by server.
        request: with its payload loaded.
        passes: says which exceptions that come out of an env are raised here; all others become records.
    """
    for server, ticket in zip(request.servers, request.after, strict=True):
        loop.run_until(server, ticket)
        if request.kind in CHANGING:
            loop.begin_again(server)
    outcomes = tuple(
        _outcome(loop, envs[server], request, place, passes) for place, server in enumerate(request.servers)
    )
    try:
        loop.refresh()
    except Exception as exc:  # the request took an env's step or reset away
        if passes(exc):
            raise
        return Reply(request.id, (describe(exc, _phase(request), passes=passes),) * len(outcomes))
    return Reply(request.id, outcomes)


def obey(loop: ServingLoop, envs: Sequence[object], request: Request) -> tuple[Record | None, ...]:
    """Does a request before the loop serves; returns, per env of the request, what it raised."""
    outcomes = (
        _outcome(loop, envs[server], request, place, passes_none) for place, server in enumerate(request.servers)
    )
    return tuple(None if isinstance(outcome, Value) else {**outcome, "phase": "restore"} for outcome in outcomes)


def _phase(request: Request) -> str:
    return _PHASES.get(request.kind, "call")


def _outcome(loop: ServingLoop, env: object, request: Request, place: int, passes: Passes) -> Outcome:
    try:
        if request.kind is RequestKind.KEEP_OPTIONS:
            _keep_options(loop, request, place)
            return Value(None)
        return Value(_perform(env, request, place))
    except BaseException as exc:  # SystemExit and the like are the env's doing, too, and must not end the worker
        if passes(exc):
            raise
        return describe(exc, _phase(request), passes=passes)


def _perform(env: object, request: Request, place: int) -> object:
    payload = request.payload
    if isinstance(payload, Unreadable):
        raise payload.cause
    if request.kind is RequestKind.RENDER:
        return get_attr(env, "render")()  # type: ignore[operator]
    if request.kind is RequestKind.GET_PROPERTIES:
        return get_properties(env)
    if request.kind is RequestKind.TIMERS:
        return timers.snapshot()
    if request.kind is RequestKind.GET_ATTR and (isinstance(payload, str) or callable(payload)):
        return get_attr(env, payload)
    if request.kind in _SETTERS and isinstance(payload, tuple):
        name, values = payload
        _SETTERS[request.kind](env, name, values[place])
        return None
    if request.kind is RequestKind.CALL and isinstance(payload, tuple):
        name, args, kwargs = payload
        if callable(name):
            return name(env, *args, **kwargs)
        attribute = get_attr(env, name)
        return attribute(*args, **kwargs) if callable(attribute) else attribute
    raise TypeError(f"a request of kind {request.kind!r} cannot have a payload of type {type(payload).__name__}")


def get_attr(env: object, name: str | Callable[[object], object]) -> object:
    """Returns an attribute of an env, looked for through its wrappers where the env offers that.

    "engine.gravity" is the attribute of an attribute. A function reads what it likes itself.
    """
    if callable(name):
        return name(env)
    name, *inner = name.split(".")
    through_wrappers = getattr(env, "get_wrapper_attr", None)
    found: object = through_wrappers(name) if through_wrappers is not None else getattr(env, name)
    return functools.reduce(getattr, inner, found)


def set_attr(env: object, name: str | Callable[[object, object], object], value: object) -> None:
    """Sets an attribute of an env, on the wrapper that has it where the env offers that; a function does it itself."""
    if callable(name):
        name(env, value)
        return
    through_wrappers = getattr(env, "set_wrapper_attr", None)
    if through_wrappers is not None:
        through_wrappers(name, value)
    else:
        setattr(env, name, value)


def set_property(env: object, name: str, value: object) -> None:
    """Gives an env a property: by its method `set_property`, or else in the dict `properties` of the innermost env."""
    hook = _hook(env, "set_property")
    if hook is not None:
        hook(name, value)
    else:
        _properties_of(env)[name] = value


def get_properties(env: object) -> dict[str, object]:
    """Returns a copy of an env's properties: of its method `get_properties`, or else of its dict."""
    hook = _hook(env, "get_properties")
    return dict(_properties_of(env) if hook is None else hook())


def _hook(env: object, name: str) -> Callable[..., Any] | None:
    try:
        hook = get_attr(env, name)
    except AttributeError:
        return None
    return hook if callable(hook) else None


def _properties_of(env: object) -> MutableMapping[str, object]:
    inner = getattr(env, "unwrapped", env)
    found = getattr(inner, "properties", None)
    if found is None:
        found = {}
        set_attr(inner, "properties", found)
    if not isinstance(found, MutableMapping):
        raise TypeError(
            f"{inner} has an attribute `properties` that is no dict; give the env a method set_property(name, value)"
        )
    return found


def _keep_options(loop: ServingLoop, request: Request, place: int) -> None:
    if isinstance(request.payload, Unreadable):
        raise request.payload.cause
    options = request.payload[1][place]  # type: ignore[index]  # made by set_payload
    loop.keep_options(request.servers[place], None if options is None else _native.encode(options, dump))


_SETTERS: dict[RequestKind, Callable[[object, str, object], None]] = {
    RequestKind.SET_ATTR: set_attr,
    RequestKind.SET_PROPERTY: set_property,
}
