"""The learner's end of one worker process: what has been sent, what came back, and whether it lives."""

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
from stepmill.backends.base import Future
from stepmill.spec.errors import StepmillError
from stepmill.worker.channel import NO_FD, Channel, ChannelClosed, ChannelGarbled, Frame, wait_ready
from stepmill.worker.host import Fault
from stepmill.worker.messages import (
    Attached,
    Building,
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

Answer = Ready | Attached | Failed
TRACE_BYTES = 65_536


class WorkerLink:
    """One worker process, from its launch to its end. A revived worker gets a new link.

    Attributes:
        peer: the worker's end of the channel, for the launcher.
        pid: of the process; 0 before the launcher has told of it.
        building: the env_id that the worker has last begun to construct.
        answer: to what the worker was last told; None while it is at work.
        num_posted: how many requests were announced to this worker and its predecessors.
        exit_code: as the launcher told it, or None.
        close_faults: of envs that raised in close().
        trace_fds: of a memfd into which the worker writes where it stood when it crashed or hung; none if it need not.
        is_cut: the worker's end of the channel is closed.
        is_void: its process never came to be.
        is_reviving: it takes a dead one's place and does not serve yet.
    """

    def __init__(self, plan: WorkerPlan, *, has_trace: bool = False) -> None:
        self.plan = plan
        self._trace = OwnedFd.memfd("stepmill-trace") if has_trace else OwnedFd()
        self._process = OwnedFd()
        self.channel, self.peer = Channel.pair()
        self.pid = 0
        self.building: int | None = None
        self.answer: Answer | None = None
        self.num_posted = 0
        self.exit_code: int | None = None
        self.close_faults: tuple[Fault, ...] = ()
        self.is_cut = False
        self.is_void = False
        self.is_reviving = False
        self._futures: dict[int, Future] = {}
        self._held: list[bytes] = []
        self._is_closed = False
        # Reentrant: a signal handler of the learner may call close() while its thread waits in here.
        self._lock = threading.RLock()

    @property
    def pidfd(self) -> int:
        """The descriptor of the process; NO_FD before the launcher has told of it, and after `close`."""
        return self._process.fileno()

    @property
    def trace_fds(self) -> list[int]:
        return [fd for fd in (self._trace.fileno(),) if fd != NO_FD]

    def begin_life(self, pid: int, process: OwnedFd) -> None:
        """Takes the descriptor of the process, which runs now."""
        self.pid, self._process = pid, process

    def refuse(self, reason: str) -> None:
        """Notes that there is no process, or none that can be watched, and why."""
        record = {"phase": "launch", "type": "OSError", "message": reason, "traceback": ""}
        self.answer, self.is_void = Failed(((None, record),)), True
        self.channel.shut()

    @property
    def fds(self) -> dict[int, int]:
        """What to poll for news of this worker: descriptors and poll events."""
        wanted = {self.pidfd: select.POLLIN}
        if not self.is_cut:
            wanted[self.channel.fd] = select.POLLIN
        return wanted

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended. Whatever it sent can be pumped then."""
        return self.is_void or (self.pidfd != NO_FD and bool(wait_ready({self.pidfd: select.POLLIN}, 0.0)))

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends a message; a worker that is gone does not get it, and that is noticed elsewhere."""
        with defer_signals(), contextlib.suppress(ChannelClosed):
            self.channel.send(data, fds)

    def post(self, request: Request, future: Future, ring: Callable[[int], None]) -> bool:
        """Sends a request and announces it, unless the worker is known to be gone; False if this link is out of use."""
        data = dump(request)
        # Sent and announced or neither: a worker that lacks one of the two would answer every later request one too late.
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            if self._is_closed:
                return False
            self._futures[request.id] = future
            if self.is_reviving:
                self._held.append(data)  # it has yet to be told to build
            else:
                self._announce(data, ring)
        return True

    def _announce(self, data: bytes, ring: Callable[[int], None]) -> None:
        self.channel.send(data)
        self.num_posted += 1
        # The bell rings as soon as the request is on its way: who is woken early reads until it is whole.
        ring(self.plan.worker)

    def begin_serving(self, ring: Callable[[int], None]) -> None:
        """Sends what was posted to a worker while it was being revived."""
        with defer_signals(), self._lock, contextlib.suppress(ChannelClosed):
            self.is_reviving = False
            while self._held:
                self._announce(self._held.pop(0), ring)

    def pump(self) -> None:
        """Takes in every message that is here. Never waits."""
        # Without signals: a message that was taken from the channel must not be lost before it is looked at.
        with defer_signals(), self._lock:
            while (frame := self._take()) is not None:
                try:
                    message = load(frame.data)
                except Exception:  # bytes that no worker of ours sends
                    message = None
                self._receive(message)

    def _take(self) -> Frame | None:
        if self.is_cut:
            return None
        try:
            return self.channel.take()
        except (ChannelGarbled, MemoryError, OverflowError):
            self._give_up()
        except ChannelClosed:
            self.is_cut = True
        return None

    def _give_up(self) -> None:
        """Kills a worker that sent malformed data, so that its death is noticed like any other."""
        self.is_cut = True
        self.kill()

    def wait(self, deadline: float | None) -> None:
        """Waits for news until the deadline, in a slice, and takes it in."""
        with self._lock:
            self.pump()
            wait_ready(self.fds, deadline)
            self.pump()

    def _receive(self, message: object) -> None:
        if isinstance(message, Reply):
            future = self._futures.pop(message.id, None)
            if future is not None:
                future.finish(message)
        elif isinstance(message, Building):
            self.building = message.env_id
        elif isinstance(message, Closed):
            self.close_faults = message.faults
        elif isinstance(message, (Ready, Attached, Failed)):
            self.answer = message
        else:
            self._give_up()

    def fail_futures(self, make_error: Callable[[], StepmillError]) -> None:
        """Fails every request that has no reply yet."""
        with self._lock:
            waiting = list(self._futures.values())
            self._futures.clear()
        if waiting:
            error = make_error()
            for future in waiting:
                future.fail(error)

    def kill(self) -> None:
        """Sends SIGKILL to the process, if it runs. By pidfd: its number may be another process's by now."""
        if self.pidfd != NO_FD:
            with contextlib.suppress(ProcessLookupError):
                _native.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def wait_end(self, deadline: float) -> bool:
        """Waits until the process has ended; returns whether it has, at the deadline at the latest."""
        while self.pidfd != NO_FD and not self.is_dead:
            if time.monotonic() >= deadline:
                return False
            self.wait(deadline)
        self.pump()
        return True

    def read_trace(self) -> str:
        """Returns what the worker has written of where it stood; empty if nothing, and at most TRACE_BYTES of it."""
        if not self.trace_fds:
            return ""
        return os.pread(self._trace.fileno(), TRACE_BYTES, 0).decode("utf-8", "replace")

    def close(self) -> None:
        """Closes every descriptor."""
        with defer_signals(), self._lock:
            self._trace.close()
            self.channel.close()
            self.peer.close()
            self.is_cut = self._is_closed = True
            self._process.close()
