"""The learner's end of one worker process: its channel, its requests, its state and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence

from stepmill._native import OwnedFd
from stepmill.backends.base import Future, num_before
from stepmill.backends.process_link import ProcessLink
from stepmill.spec.errors import StepmillError
from stepmill.worker.build_progress import BUILT, IN_WORKER_INIT, BuildProgress
from stepmill.worker.channel import NO_FD, ChannelClosed
from stepmill.worker.env_host import Fault
from stepmill.worker.messages import Attached, Closed, Failed, Ready, Reply, Request, WorkerPlan, dump
from stepmill.worker.signals import defer_signals

SetupResult = Ready | Attached | Failed
TRACE_BYTES = 65_536


class WorkerLink(ProcessLink):
    """One worker process, from its launch to its end. A restarted worker gets a new link.

    Attributes:
        setup_result: the worker's message after Build or Attach; None until it comes.
        num_posted: for each lane, how many requests were announced to this worker and its predecessors.
        close_faults: the faults of envs that raised an exception in close().
        is_reviving: whether this worker is the successor of another and does not serve yet.
    """

    def __init__(self, plan: WorkerPlan, progress: BuildProgress, *, has_trace: bool = False) -> None:
        self._trace = OwnedFd.memfd("stepmill-trace") if has_trace else OwnedFd()
        super().__init__()
        self.plan = plan
        self._progress = progress
        self._lanes = plan.lanes
        for lane in self._lanes:
            progress.begin(lane, None)
        self.setup_result: SetupResult | None = None
        self.num_posted = dict.fromkeys(self._lanes, 0)
        self.close_faults: tuple[Fault, ...] = ()
        self.is_reviving = False
        self._futures: dict[int, Future] = {}
        self._unsent: list[tuple[int, bytes]] = []

    @property
    def building(self) -> int | None:
        """The env_id that the worker is constructing or constructed last, or IN_WORKER_INIT."""
        found = map(self._progress.read, self._lanes)
        # The value is checked, because an env may write anywhere in its worker's memory.
        return next((each for each in found if each in (*self.plan.env_ids, IN_WORKER_INIT)), None)

    @property
    def num_built(self) -> int:
        """How many of its envs the worker has built."""
        if self.setup_result is not None:
            return len(self.plan.env_ids)
        found = {lane: self._progress.read(lane) for lane in self._lanes}
        return sum(
            len(own) if found[lane] == BUILT else num_before(own, found[lane]) for lane, own in self._lanes.items()
        )

    @property
    def build_fds(self) -> list[int]:
        """The descriptors to send with Build. If the worker crashes or hangs, it writes its traceback to the second."""
        return [fd for fd in (self._progress.fd, self._trace.fileno()) if fd != NO_FD]

    def mark_launch_failed(self, reason: str) -> None:
        super().mark_launch_failed(reason)
        record = {"phase": "launch", "type": "OSError", "message": reason, "traceback": ""}
        self.setup_result = Failed(((None, record),))
        self.channel.shut()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message. If the worker is gone, the message is lost, and other code notices the death."""
        with defer_signals(), contextlib.suppress(ChannelClosed):
            self.channel.send(data, fds)

    def post(self, request: Request, future: Future, ring: Callable[[int], None]) -> bool:
        """Send a request, announce it in the slab, and return True. If this link is closed, return False."""
        lane = future.lane
        data = dump(dataclasses.replace(request, lane=list(self._lanes).index(lane)))
        # The request is sent and announced, or neither. Otherwise the worker would reply to each later request too late.
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
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

    def begin_serving(self, ring: Callable[[int], None]) -> None:
        """Send the requests that were posted while the worker was restarted."""
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            self.is_reviving = False
            while self._unsent:
                self._announce(*self._unsent.pop(0), ring)

    def _receive(self, message: object, fds: tuple[OwnedFd, ...]) -> None:
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

    def read_trace(self) -> str:
        """Return the traceback that the worker has written, at most TRACE_BYTES of it, or an empty string."""
        if self._trace.fileno() == NO_FD:
            return ""
        return os.pread(self._trace.fileno(), TRACE_BYTES, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self._trace.close()
        super().close()
