"""The learner's end of one worker process: its channel, its requests, its state and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

from stepmill import _native
from stepmill._native import OwnedFd
from stepmill.backends.base import Future, num_before
from stepmill.spec.errors import StepmillError
from stepmill.worker.build_progress import IN_WORKER_INIT, BuildProgress
from stepmill.worker.channel import NO_FD, Channel, ChannelClosed, ChannelGarbled, Frame, wait_ready
from stepmill.worker.env_host import Fault
from stepmill.worker.messages import (
    Attached,
    Closed,
    Failed,
    Ready,
    Reply,
    Request,
    WorkerPlan,
    dump,
    load,
)
from stepmill.worker.signals import defer_signals

SetupResult = Ready | Attached | Failed
TRACE_BYTES = 65_536


class WorkerLink:
    """One worker process, from its launch to its end. A restarted worker gets a new link.

    Attributes:
        peer: the socket of the worker's channel, for the launcher.
        pid: of the process; 0 until the launcher reports it.
        setup_result: the worker's message after Build or Attach; None until it comes.
        num_posted: how many requests were announced to this worker and its predecessors.
        exit_code: as the launcher reported it, or None.
        close_faults: of envs that raised in close().
        has_hung_up: the worker's end of the channel is closed.
        has_no_process: its process could not be started.
        is_reviving: it is the successor of a worker, and does not serve yet.
    """

    def __init__(self, plan: WorkerPlan, progress: BuildProgress, *, has_trace: bool = False) -> None:
        self.plan = plan
        self._progress = progress
        progress.begin(plan.worker, None)
        self._trace = OwnedFd.memfd("stepmill-trace") if has_trace else OwnedFd()
        self._process = OwnedFd()
        self.channel, self.peer = Channel.pair()
        self.pid = 0
        self.setup_result: SetupResult | None = None
        self.num_posted = 0
        self.exit_code: int | None = None
        self.close_faults: tuple[Fault, ...] = ()
        self.has_hung_up = False
        self.has_no_process = False
        self.is_reviving = False
        self._futures: dict[int, Future] = {}
        self._unsent: list[bytes] = []
        self._is_closed = False
        # Reentrant, because a signal handler of the learner may call close() while this thread waits here.
        self._lock = threading.RLock()

    @property
    def pidfd(self) -> int:
        """The pidfd of the process; NO_FD until the launcher reports it, and after `close`."""
        return self._process.fileno()

    @property
    def building(self) -> int | None:
        """The env_id that the worker is constructing, or constructed last; or IN_WORKER_INIT."""
        found = self._progress.read(self.plan.worker)
        return (
            found if found in (*self.plan.env_ids, IN_WORKER_INIT) else None
        )  # an env may write anywhere in its worker's memory

    @property
    def num_built(self) -> int:
        """How many of its envs the worker has built."""
        if self.setup_result is not None:
            return len(self.plan.env_ids)
        return num_before(self.plan, self.building)

    @property
    def build_fds(self) -> list[int]:
        """The descriptors that are sent with Build. To the second the worker writes its traceback if it crashes or hangs."""
        return [fd for fd in (self._progress.fd, self._trace.fileno()) if fd != NO_FD]

    def set_process(self, pid: int, process: OwnedFd) -> None:
        """Store the pid and the pidfd of the process, which runs now."""
        self.pid, self._process = pid, process

    def mark_launch_failed(self, reason: str) -> None:
        """Record why there is no process, or no pidfd of it."""
        record = {"phase": "launch", "type": "OSError", "message": reason, "traceback": ""}
        self.setup_result, self.has_no_process = Failed(((None, record),)), True
        self.channel.shut()

    @property
    def fds(self) -> dict[int, int]:
        """The descriptors and events to poll for messages and the end of this worker."""
        wanted = {self.pidfd: select.POLLIN}
        if not self.has_hung_up:
            wanted[self.channel.fd] = select.POLLIN
        return wanted

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended. All its messages can then be received by `handle_messages`."""
        return self.has_no_process or (self.pidfd != NO_FD and bool(wait_ready({self.pidfd: select.POLLIN}, 0.0)))

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message. If the worker is gone the message is lost; other code notices its death."""
        with defer_signals(), contextlib.suppress(ChannelClosed):
            self.channel.send(data, fds)

    def post(self, request: Request, future: Future, ring: Callable[[int], None]) -> bool:
        """Send a request and announce it in the slab. Return False if this link is closed."""
        data = dump(request)
        # Both or neither: otherwise the worker would reply to each later request one announcement too late.
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            if self._is_closed:
                return False
            self._futures[request.id] = future
            if self.is_reviving:
                self._unsent.append(data)  # Build and Attach must be sent first
            else:
                self._announce(data, ring)
        return True

    def _announce(self, data: bytes, ring: Callable[[int], None]) -> None:
        self.channel.send(data)
        self.num_posted += 1
        # The doorbell may ring before the request has arrived whole: the worker waits for the rest.
        ring(self.plan.worker)

    def begin_serving(self, ring: Callable[[int], None]) -> None:
        """Send the requests that were posted while the worker was restarted."""
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            self.is_reviving = False
            while self._unsent:
                self._announce(self._unsent.pop(0), ring)

    def handle_messages(self) -> None:
        """Receive and handle every message that has arrived. Never waits."""
        # A signal handler that raises must not come between receiving a message and handling it.
        with defer_signals(), self._lock:
            while (frame := self._take()) is not None:
                try:
                    message = load(frame.data)
                except Exception:  # malformed data
                    message = None
                self._receive(message)

    def _take(self) -> Frame | None:
        if self.has_hung_up:
            return None
        try:
            return self.channel.poll_frame()
        except (ChannelGarbled, MemoryError, OverflowError):
            self._reject()
        except ChannelClosed:
            self.has_hung_up = True
        return None

    def _reject(self) -> None:
        """Kill a worker that sent malformed data. Its death is then handled like any other."""
        self.has_hung_up = True
        self.kill()

    def wait(self, deadline: float | None) -> None:
        """Wait for messages or the end of the process, for a slice of the time until the deadline, and handle them."""
        self.handle_messages()
        wait_ready(self.fds, deadline)  # without the lock, which other threads need to post requests
        self.handle_messages()

    def _receive(self, message: object) -> None:
        if isinstance(message, Reply):
            future = self._futures.pop(message.id, None)
            if future is not None:
                future.finish(message)
        elif isinstance(message, Closed):
            self.close_faults = message.faults
        elif isinstance(message, (Ready, Attached, Failed)):
            self.setup_result = message
        else:
            self._reject()

    def fail_futures(self, make_error: Callable[[], StepmillError]) -> None:
        """Fail every request that has no reply yet."""
        with self._lock:
            waiting = list(self._futures.values())
            self._futures.clear()
        if waiting:
            error = make_error()
            for future in waiting:
                future.fail(error)

    def kill(self) -> None:
        """Send SIGKILL to the process if it runs. By pidfd, because another process may have its pid by now."""
        if self.pidfd != NO_FD:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait_end(self, deadline: float) -> bool:
        """Wait until the process has ended, at most until the deadline; return whether it has."""
        while self.pidfd != NO_FD and not self.is_dead:
            if time.monotonic() >= deadline:
                return False
            self.wait(deadline)
        self.handle_messages()
        return True

    def read_trace(self) -> str:
        """Return the traceback that the worker has written, at most TRACE_BYTES of it; empty if there is none."""
        if self._trace.fileno() == NO_FD:
            return ""
        return os.pread(self._trace.fileno(), TRACE_BYTES, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Close every descriptor."""
        with defer_signals(), self._lock:
            self._trace.close()
            self.channel.close()
            self.peer.close()
            self.has_hung_up = self._is_closed = True
            self._process.close()
