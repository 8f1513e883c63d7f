"""The learner's end of a process: of a worker, of a launcher or of the starter.

The learner itself starts the starter and, in context "fork", the launcher. The starter or a launcher starts all other
processes on request, and reports the pid, the pidfd and the end of each. Both run `ChildServer` of `worker/launcher.py`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.backends.base import Future, num_before
from stepmill.spec.errors import LauncherDied, StepmillError, WorkerDied, describe_exit, worker_died_error
from stepmill.worker.build_progress import BUILT, IN_WORKER_INIT, BuildProgress
from stepmill.worker.channel import NO_FD, Channel, ChannelClosed, wait_ready
from stepmill.worker.env_host import Fault
from stepmill.worker.messages import (
    Attached,
    Closed,
    Exited,
    Failed,
    Launched,
    LauncherSetup,
    LaunchFailed,
    Quit,
    Ready,
    Reply,
    Request,
    Start,
    Value,
    WorkerPlan,
    dump_plain,
    load,
)
from stepmill.worker.process_setup import reap_child, watch_child
from stepmill.worker.signals import defer_signals

SetupResult = Ready | Attached | Failed
TRACE_BYTES = 65_536
NO_RESULT = "the call has no result"
EXIT_CODE_S = 0.2  # how long a process may take to report the exit code of one that it has started


class ProcessLink:
    """One process, from before its start to after its end.

    A handler of a signal must not interrupt the methods that send, close or end something: their callers defer signals.

    Attributes:
        peer: the other end of the channel, which is passed to the process.
        pid: the pid of the process; 0 until it is known to run.
        pidfd: the pidfd of the process; NO_FD until it is known to run, and after `close`.
        server: the process that has started this one, and its number there. None if the learner has started it.
        exit_code: the exit status, or the negative number of the signal that ended the process. None if not known.
        launch_failure: why there is no process, or no pidfd for it.
        has_hung_up: whether all messages of the process have been received, because it has closed its end of the channel.
        is_closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self.channel, self.peer = Channel.pair()
        self.pid, self.pidfd = 0, NO_FD
        self.server: tuple[ServerLink, int] | None = None
        self.exit_code: int | None = None
        self._unreaped = 0  # the pid of a child of the learner, until it is reaped
        self.launch_failure: str | None = None
        self.has_hung_up = False
        self.is_closed = False
        self._has_ended = False  # whether this is known
        self._process = OwnedFd()
        # The lock is reentrant, because a signal handler of the learner may call close() while this thread holds it.
        self._lock = threading.RLock()

    def duplicate(self) -> OwnedFd:
        """Return a duplicate of the descriptor to poll for messages or, after the last, for the end of the process."""
        with self._lock, contextlib.suppress(OSError):  # the descriptor is closed, or no other can be opened
            return OwnedFd.duplicate(self.pidfd if self.has_hung_up else self.channel.fd)
        return OwnedFd()

    @property
    def is_dead(self) -> bool:
        """Whether there is no process any more. `handle_messages` can then receive all its messages."""
        if not self._has_ended and self.pidfd != NO_FD and wait_ready({self.pidfd: select.POLLIN}, 0.0):
            self._has_ended = True
        return self._has_ended

    def set_process(self, pid: int, process: OwnedFd | None = None) -> None:
        """Store the pid and the pidfd of the process, which has been started. `process` is None if it is a child of the learner."""
        self.pid, self._process = pid, process or watch_child(pid)
        self.pidfd = self._process.fileno()
        self._unreaped = 0 if process else pid

    def mark_launch_failed(self, reason: str) -> None:
        """Record why there is no process, or no pidfd for it."""
        self.launch_failure, self._has_ended = reason, True

    def handle_messages(self) -> None:
        """Receive and handle every message that has arrived, without waiting."""
        if self.has_hung_up:
            return
        # A signal handler that raises must not come between receiving a message and handling it.
        with defer_signals(), self._lock:
            while not self.has_hung_up:
                try:
                    frame = self.channel.poll_frame()
                    message = None if frame is None else load(frame.data)
                except Exception as exc:
                    self._hang_up(exc)
                    return
                if frame is None:
                    return
                self._receive(message, frame.fds)

    def _receive(self, message: object, fds: tuple[OwnedFd, ...]) -> None:
        """Handle a message, and the descriptors `fds` that came with it."""
        raise NotImplementedError

    def _hang_up(self, cause: Exception | None = None) -> None:
        """Receive no more messages. If the process has sent malformed data, kill it. This is handled like any other death."""
        self.has_hung_up = True
        if type(cause) is not ChannelClosed:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process if it runs, by pidfd, because another process may have the same pid by now."""
        if self.pidfd != NO_FD and not self._has_ended:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait_until(self, has_come: Callable[[], bool], deadline: float) -> None:
        """Handle messages until `has_come` returns True, the process has ended, or the deadline has passed."""
        while True:
            is_last = self.is_dead or time.monotonic() >= deadline  # asked first: a process sends nothing after its end
            self.handle_messages()
            if is_last or has_come():
                return
            wait_links([self], deadline)

    def wait_end(self, deadline: float) -> bool:
        """Wait until the process has ended or the deadline has passed, and return whether it has ended."""
        self.wait_until(lambda: self.pidfd == NO_FD, deadline)
        return self._has_ended or self.pidfd == NO_FD

    def find_exit_code(self, timeout_s: float) -> int | None:
        """Return the exit code of the process, which has ended or was killed, or None if it is not known.

        The process that has started this one may take `timeout_s` to report the code.
        """
        if self.exit_code is None and self.server is not None:
            self.server[0].wait_exit(self, timeout_s)
        with self._lock:
            pid, self._unreaped = self._unreaped, 0
            if pid:
                self.exit_code = reap_child(pid)
        return self.exit_code

    def renew_channel(self) -> None:
        """Replace the channel. A process that was started with the old channel ends."""
        self.channel.close()
        self.channel, self.peer = Channel.pair()

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            self.has_hung_up = self.is_closed = self._has_ended = True
            self.channel.close()
            self.peer.close()
            self.pidfd = NO_FD
            self._process.close()


def wait_links(links: Iterable[ProcessLink], deadline: float | None) -> Mapping[int, int]:
    """Wait at most POLL_SLICE_S for messages or ends of these processes. Return the descriptors that are ready."""
    wanted = {}
    for link in links:
        wanted[link.pidfd] = select.POLLIN
        if not link.has_hung_up:
            wanted[link.channel.fd] = select.POLLIN
    return wait_ready(wanted, deadline)


class ServerLink(ProcessLink):
    """A process that starts others on request: the starter or a launcher."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._children: dict[int, ProcessLink] = {}  # by the number of the request
        self._is_late = False  # whether a report was late, and none has come since

    def request(
        self, child: ProcessLink, fds: tuple[int, ...] = (), *, worker: int = 0, setup: LauncherSetup | None = None
    ) -> int:
        """Ask for a process, and return the number of the request. `handle_messages` stores in `child` how it started and ended.

        Raises:
            ChannelClosed: the process of this link is gone.
        """
        with self._lock, child.peer as sock:
            number = next(self._numbers)
            self.channel.send(dump_plain(Start(number, worker, setup)), [sock.fileno(), *fds])
            child.server = self, number
            self._children[number] = child
        return number

    def drop(self, number: int) -> None:
        """Forget a process."""
        with self._lock:
            self._children.pop(number, None)

    def _receive(self, message: object, fds: tuple[OwnedFd, ...]) -> None:
        self._is_late = False
        number: int = getattr(message, "number", NO_FD)
        child = self._children.get(number)
        if isinstance(message, (LaunchFailed, Exited)):
            self._children.pop(number, None)
        if child is None or child.is_closed:
            return
        if isinstance(message, Launched) and fds:
            child.set_process(message.pid, fds[0])
        elif isinstance(message, Launched):  # this process may open no more files
            child.mark_launch_failed(os.strerror(errno.EMFILE))
        elif isinstance(message, LaunchFailed):
            child.mark_launch_failed(message.reason)
        elif isinstance(message, Exited):
            child.exit_code = message.code

    def wait_exit(self, child: ProcessLink, timeout_s: float) -> int | None:
        """Return the exit code of a process that has ended, after waiting at most `timeout_s` for the report.

        If the last report was late, this does not wait, because many processes may end while this one is stopped.
        """
        with self._lock:  # if another thread took the report, this one would sleep to the end of its slice of time
            deadline = time.monotonic() + (0.0 if self._is_late else timeout_s)
            self.wait_until(lambda: child.exit_code is not None or child.launch_failure is not None, deadline)
            self._is_late = child.exit_code is None and child.launch_failure is None
        return child.exit_code

    def died_error(self, what: str, hint: str, *, is_final: bool = False) -> LauncherDied:
        """Return the error for this process, which starts `what` and has ended unexpectedly."""
        how, code, name = describe_exit(self.find_exit_code(EXIT_CODE_S))
        text = f"the process that starts {what} {how}; {hint}"
        return LauncherDied(text, exit_code=code, signal_name=name, is_final=is_final)

    def end(self, timeout_s: float) -> None:
        """End the process, which kills the processes that it has started, and reap it. Later calls do nothing."""
        with self._lock:
            if self.is_closed:
                return
            with contextlib.suppress(ChannelClosed):
                self.channel.send(dump_plain(Quit()))
            if not self.wait_end(time.monotonic() + timeout_s):
                self.kill()
            self.find_exit_code(EXIT_CODE_S)
            if self.server is not None:
                self.server[0].drop(self.server[1])
            self.close()


class WorkerLink(ProcessLink):
    """One worker process, from its launch to its end. A restarted worker gets a new link.

    Attributes:
        progress: shows what the workers of the pool build.
        build_fds: the descriptors to send with Build. If the worker crashes or hangs, it writes its traceback to the second.
        setup_result: the worker's newest answer to Build or Attach; None until it comes.
        awaited: the class of the answer to the last of these messages that was sent.
        ready: the answer to Build, if the worker has built its envs.
        num_posted: for each lane, how many requests were announced to this worker and its predecessors.
        close_faults: the faults of envs that raised an exception in close().
        is_reviving: whether this worker is the successor of another and does not serve yet.
    """

    def __init__(self, plan: WorkerPlan, progress: BuildProgress, *, has_trace: bool = False) -> None:
        self._trace = OwnedFd.memfd("stepmill-trace") if has_trace else OwnedFd()
        super().__init__()
        self.plan, self.progress = plan, progress
        self.build_fds = [progress.fd, self._trace.fileno()] if has_trace else [progress.fd]
        for lane in self.plan.lanes:
            progress.begin(lane, None)
        self.setup_result: SetupResult | None = None
        self.awaited: type[Ready | Attached] = Ready
        self.ready: Ready | None = None
        self.num_posted = dict.fromkeys(self.plan.lanes, 0)
        self.close_faults: tuple[Fault, ...] = ()
        self.is_reviving = False
        self._futures: dict[int, Future] = {}
        self._unsent: list[tuple[int, bytes]] = []

    @property
    def building(self) -> int | None:
        """The env_id that the worker is constructing or constructed last, or IN_WORKER_INIT."""
        found = map(self.progress.read, self.plan.lanes)
        # The value is checked, because an env may write anywhere in its worker's memory.
        return next((each for each in found if each in (*self.plan.env_ids, IN_WORKER_INIT)), None)

    @property
    def num_built(self) -> int:
        """How many of its envs the worker has built."""
        if self.setup_result is not None:
            return len(self.plan.env_ids)
        found = {lane: self.progress.read(lane) for lane in self.plan.lanes}
        return sum(
            len(own) if found[lane] == BUILT else num_before(own, found[lane]) for lane, own in self.plan.lanes.items()
        )

    def mark_launch_failed(self, reason: str) -> None:
        super().mark_launch_failed(reason)
        record = {"phase": "launch", "type": "OSError", "message": reason, "traceback": ""}
        self.setup_result = Failed(((None, record),))
        self.channel.shut()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message. If the worker is gone, other code notices its death."""
        with contextlib.suppress(ChannelClosed):
            self.channel.send(data, fds)

    def post(self, request: Request, future: Future, ring: Callable[[int], None]) -> bool:
        """Send a request, announce it in the slab, and return True. If this link is closed, return False."""
        lane = future.lane
        data = dump_plain((request.id, int(request.kind), *request[2:5], list(self.plan.lanes).index(lane)))
        # The request is sent and announced, or neither. Otherwise the worker would reply to each later request too late.
        with self._lock, contextlib.suppress(ChannelClosed):
            if self.is_closed:
                return False
            self._futures[request.id] = future
            if self.is_reviving:
                self._unsent.append((lane, data))  # Build and Attach must be sent first
            else:
                self._announce(lane, data, ring)
        return True

    def _announce(self, lane: int, data: bytes, ring: Callable[[int], None]) -> None:
        self.channel.send(data)
        self.num_posted[lane] += 1
        # The doorbell may ring before the whole request has arrived. The worker waits for the rest.
        ring(lane)

    @property
    def is_set_up(self) -> bool:
        """Whether the worker has given the answer that is awaited, and can be watched, or has failed.

        Its message may come before Launched, which is sent on another channel. Without its pidfd, a process can neither be watched
        nor ended, and a pidfd that comes later would be mistaken for that of the next process.
        """
        is_known = self.pidfd != NO_FD or self.launch_failure is not None
        return is_known and isinstance(self.setup_result, (self.awaited, Failed))

    def begin_serving(self, ring: Callable[[int], None]) -> None:
        """Send the requests that were posted while the worker was restarted."""
        with self._lock, contextlib.suppress(ChannelClosed):
            self.is_reviving = False
            while self._unsent:
                self._announce(*self._unsent.pop(0), ring)

    def _receive(self, message: object, fds: tuple[OwnedFd, ...]) -> None:
        if type(message) is tuple and message:
            future = self._futures.pop(message[0], None)
            if future is not None:
                number, *outcomes = message  # bytes are values
                future.finish(Reply(number, tuple([Value(each) if type(each) is bytes else each for each in outcomes])))
        elif isinstance(message, Closed):
            self.close_faults = message.faults
        elif isinstance(message, (Ready, Attached, Failed)):
            self.setup_result = message
            self.ready = message if isinstance(message, Ready) else self.ready
        else:
            self._hang_up()

    def died_error(self, hint: str, timeout_s: float = EXIT_CODE_S) -> WorkerDied:
        """Return the error for this worker, which has ended. `timeout_s` is as for `find_exit_code`."""
        code = self.find_exit_code(timeout_s) if self.is_dead else self.exit_code
        return worker_died_error(self.plan.worker, self.plan.env_ids, code, hint=hint)

    def fail_futures(self, make_error: Callable[[], StepmillError] | None = None) -> None:
        """Fail every request that has no reply yet, by default with the error that the worker has died."""
        with self._lock:
            waiting = list(self._futures.values())
            self._futures.clear()
        if waiting:
            error = self.died_error(NO_RESULT) if make_error is None else make_error()
            for future in waiting:
                future.fail(error)

    def read_trace(self) -> str:
        """Return the traceback that the worker has written, at most TRACE_BYTES of it, or an empty string."""
        if self._trace.fileno() == NO_FD:
            return ""
        return os.pread(self._trace.fileno(), TRACE_BYTES, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self._trace.close()
        super().close()
