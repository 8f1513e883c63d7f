"""Messages between two processes of a pool, over a Unix stream socket on which no send ever blocks.

    frame:  magic u32 | number of descriptors u32 | number of bytes u64 | bytes
            descriptors are sent together with the header (SCM_RIGHTS)

Bytes that the socket does not accept at once are stored in a backlog. A thread sends the backlog, and ends when it is
empty. Therefore two ends can send 100 MB to each other at the same time. A worker also continues to step while its
reply is unread, and the learner may need these steps before it reads the reply.

Every wait has a deadline, and ends when the peer is gone. The channel knows this by the end of file, or by a pidfd of
the peer. If a process that the peer forked has a copy of the peer's end of the socket, there is no end of file.
"""

from __future__ import annotations

import array
import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stepmill._native import OwnedFd

HEADER = struct.Struct("<IIQ")
MAGIC = 0x6D706D73
MAX_FDS_PER_CALL = 250  # the kernel refuses more than 253
POLL_SLICE_S = 0.1  # a signal that arrives just before a wait is seen after at most this time
NO_FD = -1
_ANCILLARY_SIZE = socket.CMSG_SPACE(MAX_FDS_PER_CALL * array.array("i").itemsize)


class ChannelClosed(Exception):
    """The peer is gone, so nothing can be received or sent."""


class ChannelGarbled(ChannelClosed):
    """The peer sent bytes that are not a frame. The channel can no longer be used."""


class Frame(NamedTuple):
    """One received message. It owns its descriptors, which are closed with it unless the receiver stores them.

    `fds` is empty if this process could not receive all of them because of its limit of open files.
    """

    data: bytes | bytearray
    fds: tuple[OwnedFd, ...] = ()


class Channel:
    """One end of a socket pair. Any thread may send, and one thread at a time may receive."""

    def __init__(self, sock: socket.socket, *, use_thread: bool = True) -> None:
        """Make a channel, which owns `sock` from now on.

        Without `use_thread`, the caller polls the channel, and must call `push` when it is writable.
        """
        sock.setblocking(False)
        self._sock = sock
        self.fd = sock.fileno()  # the descriptor to poll; NO_FD after `close`
        self._use_thread = use_thread
        self._lock = threading.Lock()  # guards _backlog, _pusher, _is_broken
        # The parts of each frame, and duplicates of its descriptors, which are closed once they are sent.
        self._backlog: deque[tuple[list[bytes | memoryview], list[OwnedFd]]] = deque()
        self._pusher: threading.Thread | None = None
        self._is_broken = False
        self._is_closed = False
        self._header = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self._fds: list[OwnedFd] = []  # those of the frame that is being received
        self._has_lost_fds = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return a channel, and the socket for the channel of the peer."""
        own, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(own), peer

    @property
    def has_backlog(self) -> bool:
        """Whether bytes that were passed to `send` have not left this process yet."""
        return bool(self._backlog)

    # ---- sending --------------------------------------------------------------------------------------------------

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one frame without waiting. The caller still owns `fds`, and may close them at once.

        Raises:
            ChannelClosed: the peer is known to be gone.
            OSError: a descriptor cannot be duplicated. Nothing is sent.
        """
        header = HEADER.pack(MAGIC, len(fds), len(data))
        duplicates = list(map(OwnedFd.duplicate, fds))
        with self._lock:
            if self._is_closed or self._is_broken:
                raise ChannelClosed
            self._backlog.append(([header, data], duplicates))
            self._push_backlog()
            if self._is_broken:
                raise ChannelClosed
            if self._backlog and self._use_thread and self._pusher is None:
                pusher = threading.Thread(target=self._run_pusher, name="stepmill-channel", daemon=True)
                pusher.start()
                self._pusher = pusher

    def push(self) -> None:
        """Send as much of the backlog as the socket accepts now."""
        with self._lock:
            self._push_backlog()

    def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until the backlog is empty. Return whether it is."""
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
                parts, fds = self._backlog[0]
                some, rights = fds[:MAX_FDS_PER_CALL], []
                if some:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", map(OwnedFd.fileno, some)))]
                # If the kernel does not allow all descriptors at once, they are sent with one byte of the header each time.
                sent = self._sock.sendmsg(parts if len(some) == len(fds) else [parts[0][:1]], rights)
                del fds[: len(some)]
                for fd in some:
                    fd.close()
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = memoryview(parts[0])[sent:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._is_broken = True
            self._drop_backlog()

    def _drop_backlog(self) -> None:
        for _, fds in self._backlog:
            for fd in fds:
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

    def poll_frame(self) -> Frame | None:
        """Return the next frame if all of it has arrived, else None. This does not wait.

        Raises:
            ChannelClosed: the peer is gone, and every frame that it sent whole has been returned.
        """
        header = self._header
        try:
            while len(header) < HEADER.size:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    HEADER.size - len(header), _ANCILLARY_SIZE, socket.MSG_CMSG_CLOEXEC
                )
                if ancillary:
                    self._store_fds(ancillary)
                self._has_lost_fds |= bool(flags & socket.MSG_CTRUNC)
                if not data:
                    raise ChannelClosed
                header += data
            magic, num_fds, size = HEADER.unpack(header)
            if magic != MAGIC or (num_fds != len(self._fds) and not self._has_lost_fds):
                raise ChannelGarbled
            if self._body is None:
                self._body, self._filled = bytearray(size), 0
            while self._filled < size:
                count = self._sock.recv_into(memoryview(self._body)[self._filled :])
                if count == 0:
                    raise ChannelClosed
                self._filled += count
        except BlockingIOError:
            return None
        except OSError as exc:
            raise ChannelClosed from exc
        frame = Frame(self._body, () if self._has_lost_fds else tuple(self._fds))
        header.clear()
        self._body, self._fds, self._has_lost_fds = None, [], False
        return frame

    def _store_fds(self, ancillary: Iterable[tuple[int, int, bytes]]) -> None:
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._fds.extend(map(OwnedFd, received))

    def receive(self, deadline: float | None, *, peer_fd: int = NO_FD) -> Frame | None:
        """Wait for the next frame; return None at the deadline.

        Args:
            deadline: on the clock of time.monotonic, in seconds; None waits without limit.
            peer_fd: a descriptor that polls readable once the peer is dead, or NO_FD.
        Raises:
            ChannelClosed: the peer is gone, and every frame that it sent whole has been returned.
        """
        while True:
            frame = self.poll_frame()
            if frame is not None:
                return frame
            if deadline is not None and time.monotonic() >= deadline:
                return None
            ready = wait_ready({self.fd: select.POLLIN, peer_fd: select.POLLIN}, deadline)
            if peer_fd in ready and self.fd not in ready:
                raise ChannelClosed

    # ---- the end --------------------------------------------------------------------------------------------------

    def shut(self) -> None:
        """Shut the connection down, and wake all threads that wait for it, here and at the peer. Close no descriptor."""
        with contextlib.suppress(OSError):
            # Closing alone may not end the connection, because other processes may have inherited copies of this end.
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close all descriptors. Later calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._drop_backlog()
            pusher = self._pusher
        self.shut()
        if pusher is not None and pusher is not threading.current_thread():
            pusher.join(timeout=1.0)
        self.close_local_copy()

    def close_local_copy(self) -> None:
        """Close the descriptors in this process only. Other processes that inherited them can still use the connection."""
        self._is_closed, self.fd = True, NO_FD
        self._sock.close()
        for fd in self._fds:
            fd.close()
        self._fds.clear()


def wait_ready(wanted: Mapping[int, int], deadline: float | None, slice_s: float = POLL_SLICE_S) -> Mapping[int, int]:
    """Wait until a descriptor is ready for its poll events, has an error or hangs up. Return the events of the ready descriptors.

    The wait takes at most `slice_s`, which may be infinity, and may then return nothing. NO_FD is ignored.
    """
    poller = select.poll()
    for fd, events in wanted.items():
        if fd != NO_FD:
            poller.register(fd, events)
    left_s = slice_s if deadline is None else max(0.0, min(slice_s, deadline - time.monotonic()))
    return dict(poller.poll(None if left_s == math.inf else left_s * 1000))


def deadline_after(timeout_s: float | None) -> float:
    """Return the end of a timeout that begins now, on the clock of time.monotonic. It is infinity for None."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s
