"""Messages between two processes of a pool, over a Unix stream socket on which no send ever blocks.

    frame:  magic u32 | number of descriptors u32 | number of bytes u64 | bytes
                                                                        descriptors ride on the header (SCM_RIGHTS)

What the socket does not take at once goes to a backlog, which a thread empties; the thread lives only as long as the
backlog. So two ends that send 100 MB to each other at the same time both get through, and a worker whose reply nobody
reads yet goes on stepping: the learner may wait for its step, not for the reply.

Every wait has a deadline, and ends when the peer is gone: by end of file, or by a descriptor that polls readable when the
peer is dead (a pidfd), since a grandchild may hold a copy of the peer's end and keep the end of file away.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stepmill._native import OwnedFd

HEADER = struct.Struct("<IIQ")
MAGIC = 0x6D706D73
MAX_FDS_PER_CALL = 250  # the kernel refuses more than 253
POLL_SLICE_S = 0.1  # a signal that lands just before a wait is seen after at most this long
NO_FD = -1


class ChannelClosed(Exception):
    """The other end is gone: nothing more will come, and nothing can be sent."""


class ChannelGarbled(ChannelClosed):
    """The other end sends what is no frame: whatever it is now, there is no talking to it."""


@dataclass(frozen=True)
class Frame:
    """One received message. It owns its descriptors: those that the receiver does not keep are closed with it.

    `fds` is empty if this process could not take all of them, because it may open no more files.
    """

    data: bytes | bytearray
    fds: tuple[OwnedFd, ...] = ()


@dataclass
class _Outgoing:
    parts: list[memoryview]
    fds: list[OwnedFd]  # duplicates, closed once they are sent


class Channel:
    """One end of a socket pair. Any thread may send; one thread at a time receives."""

    def __init__(self, sock: socket.socket, *, use_thread: bool = True) -> None:
        """Takes the socket over. Without `use_thread` the code that polls the channel must call `push` when it is writable."""
        sock.setblocking(False)
        self._sock = sock
        self._use_thread = use_thread
        self._lock = threading.Lock()  # guards _backlog, _pusher, _is_broken
        self._backlog: deque[_Outgoing] = deque()
        self._pusher: threading.Thread | None = None
        self._is_broken = False
        self._is_closed = False
        self._header = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._fds: list[OwnedFd] = []  # of the frame that is being received
        self._has_lost_fds = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Returns our end, and the socket to hand to the peer."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    @property
    def fd(self) -> int:
        """The descriptor to poll, or NO_FD once closed."""
        return self._sock.fileno()

    @property
    def has_backlog(self) -> bool:
        """Whether something that was sent has not left this process yet."""
        return bool(self._backlog)

    # ---- sending --------------------------------------------------------------------------------------------------

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Sends one frame without ever waiting. The caller keeps its descriptors and may close them at once.

        Raises:
            ChannelClosed: the peer is gone, as far as is known now.
            OSError: a descriptor cannot be duplicated. Nothing is sent.
        """
        header = HEADER.pack(MAGIC, len(fds), len(data))
        duplicates = [OwnedFd.duplicate(fd) for fd in fds]
        with self._lock:
            if self._is_closed or self._is_broken:
                raise ChannelClosed
            self._backlog.append(_Outgoing([memoryview(header), memoryview(data)], duplicates))
            self._push_backlog()
            if self._is_broken:
                raise ChannelClosed
            if self._backlog and self._use_thread and self._pusher is None:
                pusher = threading.Thread(target=self._run_pusher, name="stepmill-channel", daemon=True)
                pusher.start()
                self._pusher = pusher

    def push(self) -> None:
        """Sends what the socket takes now of the backlog."""
        with self._lock:
            self._push_backlog()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was sent has left this process. Returns False if it has not in time."""
        deadline = time.monotonic() + timeout_s
        while self._backlog and not self._is_broken and not self._is_closed:
            if time.monotonic() >= deadline:
                return False
            wait_ready({self.fd: select.POLLOUT}, deadline)
            self.push()
        return not self._backlog

    def _push_backlog(self) -> None:
        try:
            while self._backlog:
                self._send_part(self._backlog[0])
                if not self._backlog[0].parts:
                    self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._is_broken = True
            self._drop_backlog()

    def _send_part(self, outgoing: _Outgoing) -> None:
        parts, fds = outgoing.parts, outgoing.fds
        if fds:
            # Each call carries one byte of the header and as many descriptors as the kernel allows.
            some = fds[:MAX_FDS_PER_CALL]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.fileno() for fd in some]))]
            self._sock.sendmsg([parts[0][:1]], rights)
            parts[0] = parts[0][1:]
            del fds[: len(some)]
            for fd in some:
                fd.close()
            return
        sent = self._sock.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]

    def _drop_backlog(self) -> None:
        for outgoing in self._backlog:
            for fd in outgoing.fds:
                fd.close()
        self._backlog.clear()

    def _run_pusher(self) -> None:
        while True:
            with self._lock:
                self._push_backlog()
                if not self._backlog:
                    self._pusher = None
                    return
            wait_ready({self.fd: select.POLLOUT}, None)

    # ---- receiving ------------------------------------------------------------------------------------------------

    def take(self) -> Frame | None:
        """Returns the next frame that is here already, or None.

        Raises:
            ChannelClosed: the peer is gone and every frame it sent whole has been taken.
        """
        try:
            return self._read_frame()
        except BlockingIOError:
            return None
        except OSError as exc:
            raise ChannelClosed from exc

    def receive(self, deadline: float | None, *, peer_fd: int = NO_FD) -> Frame | None:
        """Waits for the next frame; None at the deadline (of time.monotonic, in seconds; None waits on).

        Args:
            deadline: when to give up.
            peer_fd: polls readable once the peer is dead; NO_FD if there is none.
        Raises:
            ChannelClosed: the peer is gone and every frame it sent whole has been taken.
        """
        while True:
            frame = self.take()
            if frame is not None:
                return frame
            if deadline is not None and time.monotonic() >= deadline:
                return None
            ready = wait_ready({self.fd: select.POLLIN, peer_fd: select.POLLIN}, deadline)
            if peer_fd in ready and self.fd not in ready:
                raise ChannelClosed

    def _read_frame(self) -> Frame | None:
        while len(self._header) < HEADER.size:
            self._header += self._receive_header(HEADER.size - len(self._header))
        magic, num_fds, size = HEADER.unpack(self._header)
        if magic != MAGIC or (num_fds != len(self._fds) and not self._has_lost_fds):
            raise ChannelGarbled
        if self._body is None:
            self._body, self._filled = bytearray(size), 0
        with memoryview(self._body) as view:
            while self._filled < size:
                count = self._sock.recv_into(view[self._filled :])
                if count == 0:
                    raise ChannelClosed
                self._filled += count
        frame = Frame(self._body, () if self._has_lost_fds else tuple(self._fds))
        self._header.clear()
        self._body, self._fds, self._has_lost_fds = None, [], False
        return frame

    def _receive_header(self, size: int) -> bytes:
        ancillary_size = socket.CMSG_SPACE(MAX_FDS_PER_CALL * array.array("i").itemsize)
        data, ancillary, flags, _ = self._sock.recvmsg(size, ancillary_size, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(map(OwnedFd, received))
        self._has_lost_fds |= bool(flags & socket.MSG_CTRUNC)
        if not data:
            raise ChannelClosed
        return data

    # ---- the end --------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """Ends the conversation at once and wakes every thread that waits on it, here and at the peer. Frees nothing."""
        with contextlib.suppress(OSError):
            # By shutdown and not only by close: processes forked by others may hold copies of our end.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shuts, and frees every descriptor. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._drop_backlog()
            pusher = self._pusher
        self.shut()
        if pusher is not None and pusher is not threading.current_thread():
            pusher.join(timeout=1.0)
        self.release()

    def release(self) -> None:
        """Closes this process's copy of the descriptors and leaves the conversation to other processes that hold one."""
        self._is_closed = True
        self._sock.close()
        for fd in self._fds:
            fd.close()
        self._fds.clear()


def wait_ready(wanted: dict[int, int], deadline: float | None) -> set[int]:
    """Waits until a descriptor is ready for its poll events, has an error or hangs up; returns the ready ones.

    Sleeps in slices of POLL_SLICE_S, and may return an empty set after one: ask again. NO_FD is passed over.
    """
    poller = select.poll()
    for fd, events in wanted.items():
        if fd != NO_FD:
            poller.register(fd, events)
    left_s = POLL_SLICE_S if deadline is None else min(POLL_SLICE_S, max(0.0, deadline - time.monotonic()))
    return {fd for fd, _ in poller.poll(left_s * 1000)}
