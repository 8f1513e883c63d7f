"""Makes slow requests, and serves them. All backends use this code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepmill import _native, timers
from stepmill.spec.errors import UsageError
from stepmill.worker.error_records import RaisePredicate, describe_error, raise_none
from stepmill.worker.messages import ErrorRecord, Outcome, Reply, Request, RequestKind, Value, dump, load

RESERVED_NAMES = {"reset": "reset()", "step": "step() or send()", "close": "close()"}
SETTING_KINDS = (RequestKind.SET_ATTR, RequestKind.SET_PROPERTY, RequestKind.SET_RESET_OPTIONS)
MODIFYING_KINDS = (RequestKind.CALL, *SETTING_KINDS)


@dataclass(frozen=True)
class UnreadablePayload:
    """Replaces a payload that could not be loaded. Serving the request raises the cause."""

    cause: BaseException


class ServingLoop(Protocol):
    """The methods of a native loop that serving a request needs.

    A loop that neither caches the methods of its envs nor begins episodes before their commands inherits two of them.
    """

    def run_until(self, local: int, after_ticket: int) -> object: ...

    def refresh(self) -> object:
        """Look up the methods of all envs again."""
        return None

    def restart_early_reset(self, local: int) -> object:
        """Begin the next episode of an env again, because a request may change the env."""
        return None

    def restore(self, local: int, position: dict[str, Any]) -> object: ...
    def set_default_options(self, local: int, options: bytes | None) -> object: ...


# ---- making requests -------------------------------------------------------------------------------------------------


def check_call(name: str | Callable[..., object]) -> None:
    """Refuse methods of an env that only the pool may call.

    Raises:
        UsageError: `name` is one of RESERVED_NAMES.
    """
    if isinstance(name, str) and name in RESERVED_NAMES:
        raise UsageError(
            f"call({name!r}) would bypass the engine, for every env; use {RESERVED_NAMES[name]} of the pool instead"
        )


def call_payload(
    name: str | Callable[..., object], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
) -> object:
    """Return the payload of a CALL request.

    Args:
        name: the name of a method of the env; the name of an attribute that is not callable, whose value is then the
            outcome; or a function, which is called with the env as its first argument.
        args: the positional arguments.
        kwargs: the keyword arguments.
    Raises:
        UsageError: `name` is one of RESERVED_NAMES.
    """
    check_call(name)
    return (name, tuple(args), dict(kwargs or {}))


def set_payload(name: str | Callable[..., object], values: Sequence[object]) -> object:
    """Return the payload of a SET_ATTR, SET_PROPERTY or SET_RESET_OPTIONS request, with one value per env of the request.

    The name of a SET_ATTR may be a function, which is called with the env and its value.
    """
    return (name, tuple(values))


# ---- between processes -----------------------------------------------------------------------------------------------


def load_payload(request: Request) -> Request:
    """Return a request that another process has packed, with its payload. Serving it raises what loading it has raised."""
    assert isinstance(request.payload, bytes)  # made by `pack_request`
    try:
        return request._replace(payload=load(request.payload))
    except BaseException as exc:  # loading runs code of the user's classes
        return request._replace(payload=UnreadablePayload(exc))


def dump_outcome(outcome: Outcome) -> Outcome:
    """Return an outcome for another process: its value is bytes."""
    if not isinstance(outcome, Value):
        return outcome
    try:
        return Value(dump(outcome.value))
    except BaseException as exc:
        kind = type(outcome.value)
        error = TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another process: {exc}")
        error.__cause__ = exc
        return describe_error(error, "call")


# ---- serving them ----------------------------------------------------------------------------------------------------


def serve_request(
    loop: ServingLoop, envs: Sequence[object], request: Request, *, should_raise: RaisePredicate = raise_none
) -> Reply:
    """Serve a request, after the commands that were sent to its envs before, and before those that were sent later.

    Args:
        loop: the native loop of the worker, which runs the commands that come first.
        envs: all envs of the worker, by server.
        request: the request, with its payload loaded.
        should_raise: says which exceptions of an env are raised here. All others become records.
    """
    for server, ticket in zip(request.servers, request.after, strict=True):
        loop.run_until(server, ticket)
        if request.kind in MODIFYING_KINDS:
            loop.restart_early_reset(server)
    outcomes = tuple(
        _outcome(loop, envs[server], request, index, should_raise) for index, server in enumerate(request.servers)
    )
    try:
        loop.refresh()
    except Exception as exc:  # the request removed the `step` or `reset` of an env
        if should_raise(exc):
            raise
        return Reply(request.id, (describe_error(exc, _phase(request), should_raise=should_raise),) * len(outcomes))
    return Reply(request.id, outcomes)


def apply_request(loop: ServingLoop, envs: Sequence[object], request: Request) -> tuple[ErrorRecord | None, ...]:
    """Do a request before the loop serves. Return the record of the exception, or None, for each env of the request."""
    outcomes = (
        _outcome(loop, envs[server], request, index, raise_none) for index, server in enumerate(request.servers)
    )
    return tuple(None if isinstance(outcome, Value) else {**outcome, "phase": "restore"} for outcome in outcomes)


def _phase(request: Request) -> str:
    return "render" if request.kind is RequestKind.RENDER else "call"


def _outcome(loop: ServingLoop, env: object, request: Request, index: int, should_raise: RaisePredicate) -> Outcome:
    try:
        return Value(finish(perform(loop, env, request, index), env))
    except BaseException as exc:  # an env may also raise SystemExit, which must not end the worker
        if should_raise(exc):
            raise
        return describe_error(exc, _phase(request), should_raise=should_raise)


def perform(loop: ServingLoop, env: Any, request: Request, index: int) -> object:
    """Do the part of a request for one env. Return the result, which may be an awaitable of the env."""
    payload: Any = request.payload
    if isinstance(payload, UnreadablePayload):
        raise payload.cause
    match request.kind:
        case RequestKind.CALL:
            name, args, kwargs = payload
            if callable(name):
                return name(env, *args, **kwargs)
            attribute: Any = get_attr(env, name)
            return attribute(*args, **kwargs) if callable(attribute) else attribute
        case RequestKind.GET_ATTR:
            return get_attr(env, payload)
        case RequestKind.SET_ATTR:
            set_attr(env, payload[0], payload[1][index])
        case RequestKind.RENDER:
            render: Any = get_attr(env, "render")
            return render()
        case RequestKind.SET_RESET_OPTIONS:
            options = payload[1][index]
            options = None if options is None else _native.encode(options, dump)
            loop.set_default_options(request.servers[index], options)
        case RequestKind.SET_PROPERTY:
            set_property(env, payload[0], payload[1][index])
        case RequestKind.GET_PROPERTIES:
            return get_properties(env)
        case RequestKind.TIMERS:
            return timers.snapshot()
        case RequestKind.RESTORE:
            set_state, values = payload
            value, position = values[index]
            seed = position["reset_seed"]
            finish(env.reset() if seed is None else env.reset(seed=seed), env)  # because wrappers require it
            finish(set_state(env, value), env)
            loop.restore(request.servers[index], position)
        case RequestKind.END:
            raise TypeError("a request to end is not for an env")
    return None


def finish(value: object, env: object) -> object:
    """Return the result of a method of an env. If it is awaitable, run it and return its result."""
    if not inspect.isawaitable(value):
        return value
    from stepmill.worker.coroutines import run_here  # most workers need no asyncio, which takes 40 ms to import

    return run_here(value, env)


def get_attr(env: object, name: str | Callable[[object], object]) -> object:
    """Return an attribute of an env, searched through its wrappers if the env supports that.

    "engine.gravity" names an attribute of the attribute `engine`. A function is called with the env.
    """
    if callable(name):
        return name(env)
    name, *inner = [name] if getattr(type(env), "finds_paths", False) else name.split(".")
    through_wrappers = getattr(env, "get_wrapper_attr", None)
    found: object = through_wrappers(name) if through_wrappers is not None else getattr(env, name)
    return functools.reduce(getattr, inner, found)


def has_named(name: str, env: object) -> bool:
    """Return whether an env or one of its wrappers has an attribute. In the worker, so that the value need not be picklable."""
    try:
        get_attr(env, name)
    except AttributeError:
        return False
    return True


def set_attr(env: object, name: str | Callable[[object, object], object], value: object) -> None:
    """Set an attribute of an env, on the wrapper that has it if the env supports this.

    If `name` is a function, it is called with the env and the value instead.
    """
    if callable(name):
        name(env, value)
        return
    through_wrappers = getattr(env, "set_wrapper_attr", None)
    if through_wrappers is not None:
        through_wrappers(name, value)
    else:
        setattr(env, name, value)


def set_property(env: object, name: str, value: object) -> None:
    """Set a property with the env's method `set_property`. Without one, use the dict `properties` of the innermost env."""
    hook = _hook(env, "set_property")
    if hook is not None:
        hook(name, value)
    else:
        _properties_of(env)[name] = value


def get_properties(env: object) -> dict[str, object]:
    """Return a copy of the properties from the env's method `get_properties` or else from its dict `properties`."""
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
            f"the attribute `properties` of {inner} is not a dict; give the env a method set_property(name, value)"
        )
    return found
