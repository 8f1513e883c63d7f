"""The main program of a worker process: set the process up, build envs, attach to the slab, serve, close, exit.

What a worker does with envs is in `env_host.py`, which all backends share. This module adds what only a process has: a channel
to the learner, a thread that ends the process when the learner is gone, and an exit code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence

from stepmill import _native, timers
from stepmill._native import OwnedFd
from stepmill.worker import module_contents, process_setup
from stepmill.worker.build_progress import BuildProgress
from stepmill.worker.calls import UnreadablePayload
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.env_host import (
    BuiltEnvs,
    apply_requests,
    build_envs,
    call_worker_init,
    close_envs,
    make_loop,
    map_slab,
    serve,
    worker_fault,
)
from stepmill.worker.error_records import describe_error
from stepmill.worker.messages import (
    Attach,
    Attached,
    Build,
    Closed,
    Failed,
    Outcome,
    PackedPlan,
    Ready,
    Reply,
    Request,
    Value,
    WorkerPlan,
    dump,
    load,
)
from stepmill.worker.module_contents import Contents

EXIT_FAILED = 1  # the worker cannot serve, and has reported the reason
EXIT_BUG = 70  # an error in stepmill itself; its traceback is on stderr
_FINAL_FLUSH_S = 1.0  # how long a worker waits at its end until its last message is sent


def main(fd: int, arguments: Mapping[str, int]) -> None:
    """Run a worker in a fresh interpreter. `fd` is the socket of its channel."""
    process_setup.reset_signal_handlers()
    process_setup.enable_crash_traceback()
    run_worker(Channel(socket.socket(fileno=fd)), arguments["learner"], None)


def run_worker(channel: Channel, learner: int, plan: WorkerPlan | None) -> None:
    """Run a worker and end the process. Never returns.

    Args:
        channel: to the learner.
        learner: pidfd of the learner.
        plan: if this process is a fork of the learner, the plan that it has inherited; else None, and the plan is received.
    """
    code = EXIT_BUG
    try:
        code = _Worker(channel, learner).run(plan)
    except ChannelClosed:
        code = _native.EXIT_LEARNER_GONE
    except BaseException:
        traceback.print_exc()
    finally:
        # Code of the process that this one was forked from must not go on here, whatever is raised.
        process_setup.exit_process(code)


class _Worker:
    """One worker process. It is the mailbox of its own loop."""

    def __init__(self, channel: Channel, learner: int) -> None:
        self._channel = channel
        self._learner = learner
        _native.watch_parent(learner)
        process_setup.restore_sigint_in_children()

    def run(self, plan: WorkerPlan | None) -> int:
        build_message, fds = self._receive_message()
        if not isinstance(build_message, Build):
            raise TypeError(f"the worker got a {type(build_message).__name__} as its first message; it expects Build")
        for fd in fds[1:]:
            process_setup.write_traces_to(fd.fileno())
        process_setup.seed_global_generators(build_message.settings.entropy, build_message.worker)
        process_setup.limit_threads(build_message.settings.worker_threads)
        timers.enable(build_message.settings.timers_every)
        built, modules = _build(build_message, plan, fds[0] if fds else None)
        process_setup.limit_threads(build_message.settings.worker_threads)  # for libraries that an env has imported
        if built.faults:
            return self._fail(Failed(tuple(built.faults)))
        ready_or_failed = _make_ready(build_message.env_ids, built, modules)
        if isinstance(ready_or_failed, Failed):
            close_envs(build_message.env_ids, built.envs)
            return self._fail(ready_or_failed)
        self._send(ready_or_failed)
        try:
            return self._attach_and_serve(build_message, built)
        except ChannelClosed:
            close_envs(build_message.env_ids, built.envs)
            raise

    def _attach_and_serve(self, build_message: Build, built: BuiltEnvs) -> int:
        message, fds = self._receive_message()
        if not isinstance(message, Attach):
            raise TypeError(f"the worker got a {type(message).__name__} after Build; it expects Attach")
        try:
            if not fds:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            slab = map_slab(message.plan, message.num_workers, build_message.worker, [fd.fileno() for fd in fds])
            for fd in fds:  # so that an env that writes to a closed descriptor of its own cannot write into the slab
                fd.close()
            loop = make_loop(slab, build_message.worker, built, build_message.settings, is_inline=False)
            faults = apply_requests(
                loop,
                build_message.env_ids,
                built.envs,
                [_load_payload(request) for request in message.settings_requests],
            )
        except Exception as exc:
            is_refused = isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE)
            faults = worker_fault(exc, "launch" if is_refused else "attach")
        if faults:
            close_envs(build_message.env_ids, built.envs)
            return self._fail(Failed(faults))
        loop.refresh()
        self._send(Attached())
        if not serve(loop, built.envs, self, num_requests=message.num_requests):
            raise ChannelClosed
        self._send(Closed(close_envs(build_message.env_ids, built.envs)))
        self._channel.flush(_FINAL_FLUSH_S)
        return 0

    # ---- the mailbox ----------------------------------------------------------------------------------------------

    def next(self) -> Request | None:
        try:
            request = self._receive_message()[0]
        except ChannelClosed:
            return None
        if not isinstance(request, Request):
            raise TypeError(f"the worker got a {type(request).__name__} while it serves; it expects Request")
        return _load_payload(request)

    def reply(self, reply: Reply) -> None:
        self._send(Reply(reply.id, tuple(_dump_value(outcome) for outcome in reply.outcomes)))

    # ---- messages -------------------------------------------------------------------------------------------------

    def _receive_message(self) -> tuple[object, tuple[OwnedFd, ...]]:
        frame = self._channel.receive(None, peer_fd=self._learner)
        if frame is None:
            raise ChannelClosed
        return load(frame.data), frame.fds

    def _send(self, message: object) -> None:
        self._channel.send(dump(message))

    def _fail(self, message: Failed) -> int:
        self._send(message)
        self._channel.flush(_FINAL_FLUSH_S)
        return EXIT_FAILED


def _build(message: Build, inherited: WorkerPlan | None, fd: OwnedFd | None) -> tuple[BuiltEnvs, Contents]:
    """Build the envs; return them, and the content of the user's modules, which is empty in a fork of the learner.

    `fd` is that of the pool's BuildProgress; None if this process may open no more files.
    """
    with contextlib.ExitStack() as stack:
        progress = None if fd is None else stack.enter_context(contextlib.closing(BuildProgress(fd)))

        def begin(env_id: int | None) -> None:
            if progress is not None:
                progress.begin(message.worker, env_id)

        if inherited is not None:
            process_setup.apply_own_settings(inherited.environ, inherited.affinity)
            return build_envs(inherited, on_begin=begin), {}
        return _load_and_build(message, begin)


def _load_and_build(message: Build, begin: Callable[[int | None], None]) -> tuple[BuiltEnvs, Contents]:
    phase = "load_init"
    try:
        packed, program = load(message.plan or b""), message.program
        if not isinstance(packed, PackedPlan) or program is None:
            raise TypeError("the worker got no plan")
        process_setup.apply_own_settings(packed.plan.environ, packed.plan.affinity)
        phase = "unpickle"
        program.apply_filters()  # loading env_fns may import modules that warn
        before = module_contents.read_contents() if packed.plan.init is not None else {}
        faults = call_worker_init(packed.plan, begin)
        if faults:
            return BuiltEnvs(faults=list(faults)), {}
        begin(None)
        plan = dataclasses.replace(packed.unpack(), init=None)
        program.apply_filters()  # a second time, because loading them has imported modules that filters refer to
        register_all = program.load_registries()
        # What worker_init has changed on purpose is no difference.
        modules = module_contents.unchanged(module_contents.read_contents(), before)
    except BaseException as exc:
        return BuiltEnvs(faults=list(worker_fault(exc, phase))), {}

    def begin_env(env_id: int) -> None:
        begin(env_id)
        register_all()

    built = build_envs(plan, on_begin=begin_env)
    if not built.faults:  # an env may have imported more; what it has changed itself is no difference
        envs = built.envs if packed.plan.init is None else ()  # a function of the user may change packages on purpose
        modules.update(module_contents.read_contents(modules, envs))
    return built, modules


def _make_ready(env_ids: Sequence[int], built: BuiltEnvs, modules: module_contents.Contents) -> Ready | Failed:
    """Return the specs of the envs as bytes, or the fault of the first env whose spec cannot be rebuilt from its bytes."""
    # Equal specs of one worker are one object (see `build_envs`), so they can be compared by identity.
    packed: dict[int, bytes] = {}
    for env_id, spec in zip(env_ids, built.specs, strict=True):
        if id(spec) in packed:
            continue
        try:
            packed[id(spec)] = dump(spec)
            load(packed[id(spec)])
        except Exception as exc:
            record = describe_error(exc, "construct")
            text = f"its spaces or metadata cannot be sent to another process: {record['message']}"
            return Failed(((env_id, {**record, "message": text}),))
    indices = {key: index for index, key in enumerate(packed)}
    return Ready(os.getpid(), tuple(packed.values()), tuple(indices[id(spec)] for spec in built.specs), modules)


def _load_payload(request: Request) -> Request:
    if not isinstance(request.payload, bytes):
        raise TypeError(f"the payload of a request is a {type(request.payload).__name__}; it must be bytes")
    try:
        return dataclasses.replace(request, payload=load(request.payload))
    except BaseException as exc:  # loading runs code of the user's classes
        return dataclasses.replace(request, payload=UnreadablePayload(exc))


def _dump_value(outcome: Outcome) -> Outcome:
    if not isinstance(outcome, Value):
        return outcome
    try:
        return Value(dump(outcome.value))
    except BaseException as exc:
        kind = type(outcome.value)
        error = TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another process: {exc}")
        error.__cause__ = exc
        return describe_error(error, "call")
