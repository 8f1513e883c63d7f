"""The life of a worker process: settle, build, report, attach, serve, close, leave.

What it does with envs is in `host.py`, shared with the other backends. Here is what only a process has: a channel to the
learner, a watcher that ends it with the learner, and an exit code.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence

from stepmill import _native, timers
from stepmill._native import OwnedFd
from stepmill.worker import settle
from stepmill.worker.calls import Unreadable
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.host import Built, attach_own, build, close_envs, make_loop, no_env, obey, serve
from stepmill.worker.messages import (
    Attach,
    Attached,
    Build,
    Building,
    Closed,
    Failed,
    Outcome,
    Ready,
    Reply,
    Request,
    Value,
    WorkerPlan,
    dump,
    load,
)
from stepmill.worker.program_state import ProgramState
from stepmill.worker.records import describe

EXIT_FAILED = 1  # told the learner why it cannot serve
EXIT_BUG = 70  # something of ours went wrong; stderr has the traceback
_LAST_WORDS_S = 1.0  # how long a leaving worker waits for the learner to take its last message


def main(fd: int, facts: Mapping[str, int]) -> None:
    """Begins in a fresh interpreter. `fd` is the worker's end of its channel."""
    settle.settle_signals()
    settle.settle_faults()
    live(Channel(socket.socket(fileno=fd)), facts["learner"], None)


def live(channel: Channel, learner: int, plan: WorkerPlan | None) -> None:
    """Lives as a worker and ends the process. Never returns.

    Args:
        channel: to the learner.
        learner: its pidfd.
        plan: inherited from the learner, in a fork of it; else None, and it comes by the channel.
    """
    code = EXIT_BUG
    try:
        code = _Worker(channel, learner).live(plan)
    except ChannelClosed:
        code = _native.EXIT_LEARNER_GONE
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever happens, nothing of the process that this one was forked from may run here.
        settle.leave(code)


class _Worker:
    """One worker process. It is its own mailbox."""

    def __init__(self, channel: Channel, learner: int) -> None:
        self._channel = channel
        self._learner = learner
        _native.watch_parent(learner)
        settle.spare_children()

    def live(self, plan: WorkerPlan | None) -> int:
        order, fds = self._receive_message()
        if not isinstance(order, Build):
            raise TypeError(f"a worker is told to build first, not {type(order).__name__}")
        for fd in fds:
            settle.trace_into(fd.fileno())
        settle.seed_globals(order.settings.entropy, order.worker)
        settle.limit_threads(order.settings.worker_threads)
        settle.pin_cores(order.settings.affinity)
        timers.enable(order.settings.timers_every)
        try:
            if order.program is not None:
                order.program.apply_filters()  # loading the plan may import modules that warn
            plan = plan if order.plan is None else _load_plan(order.plan)
            if plan is None:
                raise TypeError("this worker was given no plan")
            register_all = _take_over(order.program)
        except BaseException as exc:
            return self._fail(Failed(no_env(exc, "unpickle")))

        def begin_env(env_id: int) -> None:
            self._send(Building(env_id))
            register_all()

        built = build(plan.env_ids, plan.env_fns, on_begin=begin_env)
        settle.limit_threads(order.settings.worker_threads)  # an env may have loaded such a library
        if built.faults:
            return self._fail(Failed(tuple(built.faults)))
        answer = _report(plan.env_ids, built)
        if isinstance(answer, Failed):
            close_envs(plan.env_ids, built.envs)
            return self._fail(answer)
        self._send(answer)
        try:
            return self._attach_and_serve(order, built)
        except ChannelClosed:
            close_envs(plan.env_ids, built.envs)
            raise

    def _attach_and_serve(self, order: Build, built: Built) -> int:
        message, fds = self._receive_message()
        if not isinstance(message, Attach):
            raise TypeError(f"a worker is told to attach after it has built, not {type(message).__name__}")
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            slab = attach_own(
                message.plan, message.num_workers, order.worker, [fd.fileno() for fd in fds], is_process=True
            )
            for fd in fds:  # an env that writes to a stale descriptor must not hit the slab
                fd.close()
            loop = make_loop(slab, order.worker, built, order.settings, is_inline=False)
            faults = obey(loop, order.env_ids, built.envs, [_unpacked(request) for request in message.orders])
        except Exception as exc:
            is_refused = isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE)
            faults = no_env(exc, "launch" if is_refused else "attach")
        if faults:
            close_envs(order.env_ids, built.envs)
            return self._fail(Failed(faults))
        loop.refresh()
        self._send(Attached())
        if not serve(loop, built.envs, self, num_requests=message.num_requests):
            raise ChannelClosed
        self._send(Closed(close_envs(order.env_ids, built.envs)))
        self._channel.flush(_LAST_WORDS_S)
        return 0

    # ---- the mailbox ----------------------------------------------------------------------------------------------

    def next(self) -> Request | None:
        try:
            request = self._receive_message()[0]
        except ChannelClosed:
            return None
        if not isinstance(request, Request):
            raise TypeError(f"a serving worker is sent requests, not {type(request).__name__}")
        return _unpacked(request)

    def reply(self, reply: Reply) -> None:
        self._send(Reply(reply.id, tuple(_packed(outcome) for outcome in reply.outcomes)))

    # ---- talking --------------------------------------------------------------------------------------------------

    def _receive_message(self) -> tuple[object, tuple[OwnedFd, ...]]:
        frame = self._channel.receive(None, peer_fd=self._learner)
        if frame is None:
            raise ChannelClosed
        return load(frame.data), frame.fds

    def _send(self, message: object) -> None:
        self._channel.send(dump(message))

    def _fail(self, message: Failed) -> int:
        self._send(message)
        self._channel.flush(_LAST_WORDS_S)
        return EXIT_FAILED


def _take_over(program: ProgramState | None) -> Callable[[], None]:
    """Applies the state of the learner's program; returns what is to be called before each env is built."""
    if program is None:
        return lambda: None
    program.apply_filters()  # once more: the env functions have loaded modules whose categories filters name
    return program.load_registries()


def _load_plan(data: bytes) -> WorkerPlan | None:
    plan = load(data)
    return plan if isinstance(plan, WorkerPlan) else None


def _report(env_ids: Sequence[int], built: Built) -> Ready | Failed:
    """Returns the specs of the envs as bytes, or the fault of the first whose spec cannot be rebuilt from its bytes."""
    # Equal specs of one worker are one object (see `build`), so identity is enough to find them.
    packed: dict[int, bytes] = {}
    for env_id, spec in zip(env_ids, built.specs, strict=True):
        if id(spec) in packed:
            continue
        try:
            packed[id(spec)] = dump(spec)
            load(packed[id(spec)])
        except Exception as exc:
            record = describe(exc, "construct")
            text = f"its spaces or metadata cannot be sent to another process: {record['message']}"
            return Failed(((env_id, {**record, "message": text}),))
    places = {key: place for place, key in enumerate(packed)}
    return Ready(os.getpid(), tuple(packed.values()), tuple(places[id(spec)] for spec in built.specs))


def _unpacked(request: Request) -> Request:
    if not isinstance(request.payload, bytes):
        raise TypeError(f"a request's payload travels as bytes, not as {type(request.payload).__name__}")
    try:
        return dataclasses.replace(request, payload=load(request.payload))
    except BaseException as exc:  # loading runs code of the user's classes
        return dataclasses.replace(request, payload=Unreadable(exc))


def _packed(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Value):
        return outcome
    try:
        return Value(dump(outcome.value))
    except BaseException as exc:
        kind = type(outcome.value)
        error = TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another process: {exc}")
        error.__cause__ = exc
        return describe(error, "call")
