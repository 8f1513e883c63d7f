"""The main program of a worker process: sets the process up, builds envs, attaches to the slab, serves, closes, exits.

`env_host.py`, which all backends share, has the code for envs. This module adds the parts that only a process has: a
channel to the learner, a thread that ends the process when the learner is gone, and an exit code.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

from stepmill import _native, timers
from stepmill._native import OwnedFd
from stepmill.worker import by_value, module_contents, process_setup
from stepmill.worker.build_progress import BUILT, BuildProgress
from stepmill.worker.calls import dump_outcome, load_payload
from stepmill.worker.channel import Channel, ChannelClosed
from stepmill.worker.env_host import (
    BuiltEnvs,
    Fault,
    Owners,
    WorkerLoop,
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
    PackedPlan,
    Ready,
    Reply,
    Request,
    RequestKind,
    Value,
    WorkerPlan,
    WorkerSettings,
    dump,
    load,
)
from stepmill.worker.module_contents import Contents
from stepmill.worker.shared_state import Shares

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

T = TypeVar("T")

EXIT_FAILED = 1  # the worker cannot serve, and has reported the reason
EXIT_BUG = 70  # an error in stepmill itself; its traceback is on stderr
_FINAL_FLUSH_S = 1.0  # how long a worker waits at its end until its last message is sent


def main(fd: int, learner: int) -> None:
    """Run a worker in a fresh interpreter. `fd` and `learner` are as for `run_worker`."""
    process_setup.reset_signal_handlers()
    run_worker(fd, learner, None)


def run_worker(fd: int, learner: int, plan: WorkerPlan | None) -> None:
    """Run a worker and end the process. This does not return.

    Args:
        fd: the socket of the channel to the learner.
        learner: the pidfd of the learner.
        plan: the plan that this process has inherited, if it is a fork of the learner. None if the plan is received.
    """
    code = EXIT_BUG
    try:
        process_setup.enable_crash_traceback()
        code = _Worker(Channel(socket.socket(fileno=fd)), learner).run(plan)
    except BaseException as exc:
        _end_process(exc)
    finally:
        # Whatever is raised, the code of the process from which this one was forked must not continue here.
        process_setup.exit_process(code)


class _Lane:
    """One thread of a worker process, with its envs and their loop. It is the mailbox of the loop."""

    def __init__(self, number: int, env_ids: tuple[int, ...], worker: _Worker) -> None:
        self.number = number
        self.env_ids = env_ids
        self.built = BuiltEnvs()
        self.loop: WorkerLoop | None = None
        self.inbox: deque[Request] = deque()
        self._worker = worker
        self._thread: Executor | None = None

    def start(self) -> None:
        """Start the thread, which `submit` then uses."""
        from concurrent.futures import ThreadPoolExecutor  # most workers have one thread, and do not need this module

        thread = ThreadPoolExecutor(1, f"stepmill-lane-{self.number}")
        thread.submit(int).result()
        self._thread = thread

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def submit(self, work: Callable[[_Lane], T]) -> Future[T]:
        """Call `work(self)` in the thread. The process ends if this raises an exception."""
        assert self._thread is not None  # `start` comes first
        return self._thread.submit(self._run, work)

    def _run(self, work: Callable[[_Lane], T]) -> T:
        try:
            return work(self)
        except BaseException as exc:
            _end_process(exc)  # the other lanes may run without limit

    def next(self) -> Request | None:
        request = self._worker.receive_request(self)
        return None if request is None else load_payload(request)

    def reply(self, reply: Reply) -> None:
        outcomes = map(dump_outcome, reply.outcomes)
        self._worker.send((reply.id, *[each.value if type(each) is Value else each for each in outcomes]))

    def close_envs(self) -> tuple[Fault, ...]:
        """Close the envs once. Return the faults of those that raised an exception."""
        envs, self.built.envs = self.built.envs, []
        return close_envs(self.env_ids, envs)


class _Worker:
    """One worker process. Its first lane runs in the calling thread, and each other lane has its own thread."""

    def __init__(self, channel: Channel, learner: int) -> None:
        self._channel = channel
        self._learner = learner
        self._lanes: list[_Lane] = []
        self._receiving = threading.Lock()
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
        self._lanes = [_Lane(number, env_ids, self) for number, env_ids in build_message.lanes.items()]
        answer = self._build(build_message, plan, fds[0] if fds else None)
        process_setup.limit_threads(build_message.settings.worker_threads)  # for libraries that an env has imported
        if isinstance(answer, Failed):
            return self._fail(answer)
        self.send(answer)
        return self._attach_and_serve(build_message.settings)

    def _for_lanes(self, work: Callable[[_Lane], T], *, is_serial: bool = False) -> list[T]:
        """Call `work` with each lane in its thread, one after the other if `is_serial`, and return the results."""
        if is_serial:
            return [work(self._lanes[0]), *(lane.submit(work).result() for lane in self._lanes[1:])]
        others = [lane.submit(work) for lane in self._lanes[1:]]
        return [work(self._lanes[0]), *(other.result() for other in others)]

    def _build(self, message: Build, inherited: WorkerPlan | None, fd: OwnedFd | None) -> Ready | Failed:
        """Build the envs, and return the answer to Build.

        `fd` is the descriptor of the pool's BuildProgress, or None if this process may open no more files.
        """
        with contextlib.ExitStack() as stack:
            progress = None if fd is None else stack.enter_context(contextlib.closing(BuildProgress(fd)))

            def begin(lane: _Lane, env_id: int | None) -> None:
                if progress is not None:
                    progress.begin(lane.number, env_id)

            loaded = _load_plan(message, inherited, partial(begin, self._lanes[0]))
            if loaded.plan is None:
                return Failed(loaded.faults)
            env_fns = dict(zip(loaded.plan.env_ids, loaded.plan.env_fns, strict=True))
            registering = threading.Lock()
            owners: Owners = {}

            def build(lane: _Lane) -> None:
                def begin_env(env_id: int) -> None:
                    begin(lane, env_id)
                    with registering:
                        loaded.register_all()

                timers.enable(message.settings.timers_every)
                own = tuple(env_fns[env_id] for env_id in lane.env_ids)
                limits = message.settings.limits_of_envs(ends_processes=True)
                plan = WorkerPlan(message.worker, lane.env_ids, own)
                lane.built = build_envs(plan, on_begin=begin_env, limits=limits, owners=owners)
                if lane.built.faults:  # its envs are closed
                    lane.built.envs.clear()
                if len(self._lanes) > 1:
                    begin(lane, BUILT)

            try:
                for lane in self._lanes[1:]:
                    lane.start()
            except RuntimeError as exc:  # the system refuses more threads
                return Failed(worker_fault(exc, "launch"))
            self._for_lanes(build, is_serial=message.settings.start_serially)
        faults = tuple(fault for lane in self._lanes for fault in lane.built.faults)
        if faults:
            return Failed(faults)
        modules = loaded.modules
        if inherited is None and not loaded.has_init:
            # An env may have imported more; its own changes do not count as differences.
            modules = module_contents.read_contents(modules, [env for lane in self._lanes for env in lane.built.envs])
        return _make_ready(self._lanes, modules, loaded.load_s)

    def _attach_and_serve(self, settings: WorkerSettings) -> int:
        try:
            message, fds = self._receive_message()
        except ChannelClosed:
            self._for_lanes(_Lane.close_envs)
            raise
        if not isinstance(message, Attach):
            raise TypeError(f"the worker got a {type(message).__name__} after Build; it expects Attach")

        def attach(lane: _Lane) -> tuple[Fault, ...]:
            at = self._lanes.index(lane)
            try:
                is_watched, has_threads = message.is_watched and at == 0, len(self._lanes) > 1
                num_envs = sum(len(each.env_ids) for each in self._lanes)
                shares = Shares.of(num_envs, is_watched=is_watched, has_threads=has_threads)
                lane.loop = make_loop(slabs[at], lane.number, lane.built, settings, shares)
                requests = [load_payload(each) for each in message.settings_requests if each.lane == at]
                return apply_requests(lane.loop, lane.env_ids, lane.built.envs, requests)
            except Exception as exc:
                return _attach_fault(exc)

        def serve_lane(lane: _Lane) -> tuple[Fault, ...]:
            assert lane.loop is not None  # made by `attach`
            num_requests = message.num_requests[self._lanes.index(lane)]
            is_told = serve(lane.loop, lane.built.envs, lane, num_requests=num_requests)
            close_faults = lane.close_envs()
            if not is_told:
                raise ChannelClosed
            return close_faults

        try:
            slabs = self._map_slabs(message, fds)
        except Exception as exc:
            faults = _attach_fault(exc)
        else:
            faults = tuple(fault for own in self._for_lanes(attach) for fault in own)
        if faults:
            return self._fail(Failed(faults))
        self.send(Attached())
        self.send(Closed(tuple(fault for own in self._for_lanes(serve_lane) for fault in own)))
        self._channel.flush(_FINAL_FLUSH_S)
        return 0

    def _map_slabs(self, message: Attach, fds: Sequence[OwnedFd]) -> list[_native.Slab]:
        """Map the slab for each lane. `fds` are closed."""
        if not fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        first, *own, event = (fd.fileno() for fd in fds)
        slabs = [
            map_slab(message.plan, message.num_lanes, lane.number, [first, *own[2 * at : 2 * at + 2], event])
            for at, lane in enumerate(self._lanes)
        ]
        for fd in fds:  # otherwise an env that writes to a closed descriptor could write to the slab
            fd.close()
        return slabs

    # ---- messages -------------------------------------------------------------------------------------------------

    def receive_request(self, lane: _Lane) -> Request | None:
        """Wait for the next request of a lane. Return None if the learner has exited.

        The lane that waits also receives the requests of the other lanes.
        """
        with self._receiving:
            while not lane.inbox:
                try:
                    message = self._receive_message()[0]
                except ChannelClosed:
                    return None
                assert type(message) is tuple  # made by `WorkerLink.post`
                request = Request(message[0], RequestKind(message[1]), *message[2:])
                self._lanes[request.lane].inbox.append(request)
            return lane.inbox.popleft()

    def _receive_message(self) -> tuple[object, tuple[OwnedFd, ...]]:
        frame = self._channel.receive(None, peer_fd=self._learner)
        if frame is None:
            raise ChannelClosed
        return load(frame.data), frame.fds

    def send(self, message: object) -> None:
        """Send a message to the learner, without waiting. Any thread may call this."""
        self._channel.send(dump(message))

    def _fail(self, message: Failed) -> int:
        self._lanes[1:] = [lane for lane in self._lanes[1:] if lane.has_thread]  # the others have built nothing
        self._for_lanes(_Lane.close_envs)
        self.send(message)
        self._channel.flush(_FINAL_FLUSH_S)
        return EXIT_FAILED


def _end_process(exc: BaseException) -> NoReturn:
    """End the process because of an exception that no env has raised."""
    if not isinstance(exc, ChannelClosed):
        traceback.print_exception(exc)
    process_setup.exit_process(_native.EXIT_LEARNER_GONE if isinstance(exc, ChannelClosed) else EXIT_BUG)


def _attach_fault(exc: Exception) -> tuple[Fault, ...]:
    is_refused = isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE)
    return worker_fault(exc, "launch" if is_refused else "attach")


class _LoadedPlan(NamedTuple):
    """The plan of a worker, after `workers.init` was called.

    Attributes:
        plan: the plan; None if there are faults.
        modules: the contents of the user's modules; empty in a fork of the learner.
        register_all: see `ProgramState.load_registries`.
        has_init: whether a function of the user was called.
        load_s: see `Ready`.
    """

    plan: WorkerPlan | None
    faults: tuple[Fault, ...] = ()
    modules: Contents = {}
    register_all: Callable[[], None] = lambda: None
    has_init: bool = False
    load_s: float = 0.0


def _load_plan(message: Build, inherited: WorkerPlan | None, begin: Callable[[int | None], None]) -> _LoadedPlan:
    """Apply the worker's own settings, call `workers.init`, and load the env_fns."""
    if inherited is not None:
        process_setup.apply_own_settings(inherited.environ, inherited.affinity)
        faults = call_worker_init(inherited, begin)
        return _LoadedPlan(None if faults else inherited, faults)
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
            return _LoadedPlan(None, faults)
        begin(None)
        by_value.adopt_on_import()
        begun_s = time.thread_time()
        plan = packed.unpack()
        load_s = time.thread_time() - begun_s
        program.apply_filters()  # a second time, because loading has imported modules to which filters refer
        register_all = program.load_registries()
        # The changes that worker_init has made on purpose do not count as differences.
        modules = module_contents.unchanged(module_contents.read_contents(), before)
    except BaseException as exc:
        return _LoadedPlan(None, worker_fault(exc, phase))
    # Contents that are read after that function was called may be changes that it has made on purpose, so `_build` reads no more of them.
    return _LoadedPlan(plan, (), modules, register_all, packed.plan.init is not None, load_s)


def _make_ready(lanes: Sequence[_Lane], modules: Contents, load_s: float) -> Ready | Failed:
    """Return the specs of the envs as bytes, or the fault of the first env whose spec cannot be rebuilt from its bytes."""
    # Equal specs of one lane are one object (see `build_envs`), so they can be compared by identity.
    packed: dict[int, bytes] = {}
    specs = [spec for lane in lanes for spec in lane.built.specs]
    for env_id, spec in zip((env_id for lane in lanes for env_id in lane.env_ids), specs, strict=True):
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
    return Ready(os.getpid(), tuple(packed.values()), tuple(indices[id(spec)] for spec in specs), modules, load_s)
