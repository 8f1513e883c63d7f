"""The work of every worker, which may be a process, a thread or the calling thread.

A worker builds envs, runs the native loop over them, answers its requests, and closes the envs.

    build_envs(plan)               calls worker_init, returns BuiltEnvs: envs, specs, faults
    make_loop(slab, …)             returns the loop over those envs
    apply_requests(…)              applies requests that must come before the first command; returns faults
    serve(loop, …)                 runs the loop, answers requests that it cannot handle, returns when the stop word is set
    close_envs(…)                  returns the faults of envs that raised an exception in close()
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Protocol, TypeAlias, cast

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.spec.choices import AutoresetMode
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import BusyEnvError, ClosedPoolError, EngineBug, UsageError
from stepmill.spec.remote_env import CallLimits, set_limits
from stepmill.worker import calls
from stepmill.worker.build_progress import IN_WORKER_INIT
from stepmill.worker.error_records import RaisePredicate, describe_error, raise_none
from stepmill.worker.messages import ErrorRecord, Reply, Request, RequestKind, Value, WorkerPlan, WorkerSettings
from stepmill.worker.native_settings import native_settings
from stepmill.worker.shared_state import Shares, StateWatch
from stepmill.worker.signals import allow_signals

Fault = tuple[int | None, ErrorRecord]  # env_id, or None for the whole worker, and the error
Owners: TypeAlias = dict[int, tuple[int, object]]  # by id of an innermost env: its env_id, and the object


_native.register_errors(UsageError, BusyEnvError, ClosedPoolError, EngineBug)

EXIT_STRAY_COPY = 67  # the exit status of a copy that an env forked; _native/shared/forks.hpp has the same value
REQUEST_COUNTER_MASK = 0xFFFFFFFF  # the slab's counter of requests has 32 bits


class AdapterPackage(Protocol):
    """The functions of `stepmill.envs`. That package is imported at run time, because adapters import RL libraries."""

    def describe(self, env: object, like: EnvSpec | None = None) -> EnvSpec: ...
    def adapt(self, env: object) -> object: ...
    def innermost(self, env: object) -> object: ...


class WorkerLoop(calls.ServingLoop, Protocol):
    """The loop of a worker with a thread of its own. If it has a method `begin(mailbox, num_requests)`, it is itself a Mailbox."""

    def run(self) -> int:
        """Run commands until there is a request or the worker must stop. Return LOOP_REQUEST or LOOP_STOP."""

    def requests_seen(self, count: int) -> object:
        """Record that the first `count` requests were served."""


class Mailbox(Protocol):
    """Receives slow requests and sends replies."""

    def next(self) -> Request | None:
        """Wait for the request that was announced. Return None if the learner has exited."""

    def reply(self, reply: Reply) -> None:
        """Send a reply without waiting until it is read."""


def _import_adapters() -> AdapterPackage:
    return cast("AdapterPackage", import_module("stepmill.envs"))


@dataclass
class BuiltEnvs:
    """The envs of one worker. Without faults, all of them are built. If there are faults, all of them have been closed."""

    env_ids: Sequence[int] = ()
    env_fns: Sequence[Callable[[], object]] = ()
    envs: list[object] = field(default_factory=list)
    specs: list[EnvSpec] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def build_envs(
    plan: WorkerPlan,
    *,
    on_begin: Callable[[int], None] = lambda _: None,
    should_raise: RaisePredicate = raise_none,
    limits: CallLimits,
    owners: Owners | None = None,
) -> BuiltEnvs:
    """Call `plan.init`, and then build the envs one after the other.

    If a constructor raises an exception, the others are still called, so that all faults are reported together.

    Args:
        plan: the plan of the worker.
        on_begin: called with the env_id before each construction, and with IN_WORKER_INIT before `plan.init` is called.
        should_raise: returns True for exceptions to raise again after closing the envs. All others become faults.
        limits: the time limits that envs outside this process have to keep by themselves.
        owners: the envs that the workers of this process have built, where others build envs at the same time.
    """
    owners = {} if owners is None else owners
    built = BuiltEnvs(plan.env_ids, plan.env_fns, faults=list(call_worker_init(plan, on_begin, should_raise)))
    if built.faults:
        return built
    adapters = _import_adapters()
    allowed_signals = allow_signals()
    for env_id, env_fn in zip(plan.env_ids, plan.env_fns, strict=True):
        made: list[object] = []
        try:
            on_begin(env_id)
            with allowed_signals, set_limits(limits):
                _native.append_result(made, env_fn)  # atomic: no Ctrl-C between building the env and storing it
                _add_owner(owners, env_id, adapters.innermost(made[0]))
                spec = adapters.describe(made[0], built.specs[-1] if built.specs else None)
                env = adapters.adapt(made[0])
            built.specs.append(spec)
            built.envs.append(env)
        except BaseException as exc:
            close_envs((env_id,), made)
            if should_raise(exc):
                close_envs(plan.env_ids, built.envs)
                raise
            built.faults.append((env_id, describe_error(exc, "construct", should_raise=should_raise)))
    if built.faults:
        close_envs(plan.env_ids, built.envs)
    return built


def _add_owner(owners: Owners, env_id: int, innermost: object) -> None:
    """Refuse an env that another function has returned, perhaps in a wrapper: a step of one would move the other."""
    owner = owners.setdefault(id(innermost), (env_id, innermost))[0]  # atomic: threads build envs at the same time
    if owner != env_id:
        kind = type(innermost)
        raise ValueError(  # the EnvError is then a ValueError, too
            f"envs {min(owner, env_id)} and {max(owner, env_id)} are one object, a {kind.__module__}.{kind.__qualname__}; "
            "return a new env from each call of each function: lambda: make_env(), not env = make_env() and lambda: env"
        )


def call_worker_init(
    plan: WorkerPlan, on_begin: Callable[[int], None], should_raise: RaisePredicate = raise_none
) -> tuple[Fault, ...]:
    """Call the function of the option `workers.init`, if there is one, and return its fault. See `build_envs`."""
    if plan.init is None:
        return ()
    try:
        on_begin(IN_WORKER_INIT)
        with allow_signals():
            plan.init()
    except BaseException as exc:
        if should_raise(exc):
            raise
        return ((None, describe_error(exc, "worker_init", should_raise=should_raise)),)
    return ()


def map_slab(plan: Mapping[str, object], num_lanes: int, lane: int, fds: Sequence[int]) -> _native.Slab:
    """Map a slab in a worker process for one lane, which uses only its own words, rows and memory files.

    The memory of other lanes is read-only. An env that writes to it ends this process by SIGSEGV.

    Args:
        plan: the layout of the slab, with the ranges of bytes that each lane may write.
        num_lanes: the number of lanes in the pool.
        lane: the lane that uses the mapping.
        fds: four descriptors: the slab, this lane's commands, its results, the pool's eventfd. They may be closed afterwards.
    Raises:
        RuntimeError: the memory is not a slab of this version.
    """
    own, event = [*map(OwnedFd.duplicate, fds[1:3])], OwnedFd.duplicate(fds[3])
    of_others = OwnedFd()
    commands, results = ([fd if at == lane else of_others for at in range(num_lanes)] for fd in own)
    writable = cast("Mapping[int, list[tuple[int, int]]]", plan["writable"])
    return _native.Slab(fds[0], dict(plan), commands, results, event, writable[lane], lane)


def make_loop(
    slab: _native.Slab, worker: int, built: BuiltEnvs, settings: WorkerSettings, shares: Shares = Shares.NOTHING
) -> WorkerLoop:
    """Return the loop over a worker's envs, for `serve`. `shares` is the state that they share and that is watched."""
    native = loop_settings(built.specs[0], settings)
    if not any(map(_is_coroutine_env, built.envs)):
        return _watched_loop(slab, worker, built, native, shares)
    # Most workers need no asyncio, which takes 40 ms to import.
    from stepmill.worker.coroutine_server import CoroutineServer

    loop = _native.CoroutineLoop(slab, worker, [None] * len(built.envs), native)
    return CoroutineServer(loop, built.envs, settings, partial(_make_again, built))


def _make_again(built: BuiltEnvs, server: int) -> object:
    adapters = _import_adapters()
    made = built.env_fns[server]()
    if adapters.describe(made, built.specs[server]) is not built.specs[server]:
        raise TypeError("the env was made again, and its spaces are not those that it had before")
    return adapters.adapt(made)


def _watched_loop(
    slab: _native.Slab, worker: int, built: BuiltEnvs, native: dict[str, object], shares: Shares
) -> _native.Loop:
    if shares is Shares.NOTHING:
        return _native.Loop(slab, worker, built.envs, native)
    adapters = _import_adapters()
    watch = StateWatch(built.env_ids, built.envs, [*map(adapters.innermost, built.envs)], shares)
    loop = _native.Loop(slab, worker, watch.envs, native)
    watch.refresh = loop.refresh
    return loop


def make_inline_loop(
    slab: _native.Slab, built: BuiltEnvs, settings: WorkerSettings, shares: Shares = Shares.NOTHING
) -> _native.Loop:
    """Return the native loop over the envs of the only worker, which the calling thread runs (serial backend).

    Raises:
        UsageError: the envs have coroutines, and this thread runs an event loop.
    """
    native = loop_settings(built.specs[0], settings)
    native |= {"inline": True, "describe": partial(describe_error, should_raise=_native.is_from_signal)}
    if any(map(_is_coroutine_env, built.envs)):
        from stepmill.worker.coroutines import BlockingEnv, check_thread

        check_thread()
        envs = [BlockingEnv(env) if _is_coroutine_env(env) else env for env in built.envs]
        return _native.Loop(slab, 0, envs, native)
    return _watched_loop(slab, 0, built, native, shares)


def _is_coroutine_env(env: object) -> bool:
    return inspect.iscoroutinefunction(getattr(env, "step", None))


def loop_settings(spec: EnvSpec, settings: WorkerSettings) -> dict[str, object]:
    """Return the settings of a native loop over envs with this spec."""
    return {
        **native_settings(spec, settings.autoreset, settings.seeding),
        "time_step": spec.time_step,
        "overlap": settings.overlap_resets and settings.autoreset is AutoresetMode.NEXT_STEP and not spec.is_batched,
        "inline": False,
        "reset_retries": settings.reset_retries,
        "retry_wait_ns": int(1e9 * settings.reset_retry_wait_s),
        "measures_memory": settings.measures_memory,
        "describe": describe_error,
    }


def serve(loop: WorkerLoop, envs: Sequence[object], mailbox: Mailbox, *, num_requests: int = 0) -> bool:
    """Run the loop until the pool sets the stop word or requests the end. Return False if the learner exits first.

    Args:
        loop: the loop over `envs`.
        envs: the worker's envs.
        mailbox: receives the requests that the slab announces.
        num_requests: how many requests were announced to this worker's predecessors.
    """
    num_seen = num_requests
    own_pid = os.getpid()
    begin = getattr(loop, "begin", None)
    if begin is None:
        loop.requests_seen(num_seen)
    else:
        begin(mailbox, num_seen)
        mailbox = cast("Mailbox", loop)
    while loop.run() == _native.LOOP_REQUEST:
        request = mailbox.next()
        if request is None:
            return False
        if request.kind is RequestKind.END:
            mailbox.reply(Reply(request.id, (Value(None),)))
            return True
        reply = calls.serve_request(loop, envs, request)
        if os.getpid() != own_pid:  # the call forked, and this is the child, which must not send a second reply
            os._exit(EXIT_STRAY_COPY)
        num_seen = (num_seen + 1) & REQUEST_COUNTER_MASK
        loop.requests_seen(num_seen)
        mailbox.reply(reply)
    return True


def apply_requests(
    loop: calls.ServingLoop, env_ids: Sequence[int], envs: Sequence[object], requests: Iterable[Request]
) -> tuple[Fault, ...]:
    """Apply requests to new envs before the loop runs, which then reads their methods. Return the faults of envs that raised."""
    faults: list[Fault] = []
    for request in requests:
        if keep_settings := getattr(loop, "keep_settings", None):
            keep_settings(request)
        records = calls.apply_request(loop, envs, request)
        faults += [(env_ids[server], record) for server, record in zip(request.servers, records, strict=True) if record]
    if not faults:
        loop.refresh()
    return tuple(faults)


def close_envs(env_ids: Sequence[int], envs: Sequence[object]) -> tuple[Fault, ...]:
    """Close all envs that have a method `close`. Return the faults of those that raised an exception."""
    errors = [None if _is_coroutine_env(env) else _close_env(env) for env in envs]
    coroutine_envs = [env for env in envs if _is_coroutine_env(env)]
    if coroutine_envs:
        from stepmill.worker.coroutines import close_all

        errors += close_all(coroutine_envs)
        env_ids = [*env_ids, *(env_id for env_id, env in zip(env_ids, envs, strict=False) if _is_coroutine_env(env))]
    each = zip(env_ids, errors, strict=False)
    return tuple((env_id, describe_error(error, "close")) for env_id, error in each if error is not None)


def _close_env(env: object) -> BaseException | None:
    try:
        close: Callable[[], object] | None = getattr(env, "close", None)
        if close is not None:
            close()
    except BaseException as exc:  # the other envs must be closed even if this one calls sys.exit
        return exc
    return None


def worker_fault(exc: BaseException, phase: str) -> tuple[Fault, ...]:
    """Return the fault of a worker that cannot serve for a reason other than its envs."""
    return ((None, describe_error(exc, phase)),)
