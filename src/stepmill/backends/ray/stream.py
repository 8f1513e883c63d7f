"""A TCP connection between a pool and a node, for commands and results. Ray starts and ends nodes, and says whether they live.

A call of an actor takes about a millisecond of processor time in the processes of Ray. A message on a connection takes
a hundredth of that.

A message is a header, which is pickled, and an array of bytes, which may be empty. The first one follows the handshake
(`handshake.py`). The connection may break and be made again at any time, so an end that sends a message keeps it until
the other end has answered, and may send it again. A probe is a message whose header is None. The node sends it back at
once, even while its workers need long for an answer.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepmill.backends.ray.handshake import admit_pool, join_node
from stepmill.spec.closing import close_on_error

PREFIX = struct.Struct("<QQ")  # bytes of the pickled header, bytes of the array
CONNECT_S = 5.0  # how long a connection may take, without the handshake
RETRY_S = 0.1  # after this time, an operation that failed is tried again
MAX_STRANGERS = 16  # connections without a proof of the key; another one ends the oldest
EMPTY = np.empty(0, np.uint8)

Bytes = NDArray[np.uint8]
OnMessage = Callable[[Any, Bytes], None]


class Message(NamedTuple):
    """A message that one end has received."""

    header: Any
    array: Bytes


class _Assembler:
    """Assembles messages. The next bytes are written to `target`, and `count` is called with their number."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._prefix, self._header, self._array = bytearray(PREFIX.size), bytearray(), EMPTY
        self.target = memoryview(self._prefix)
        self._later: list[memoryview] = []  # the parts that follow the target

    def count(self, num_bytes: int) -> Message | None:
        """Record that bytes were written. Return the message if they completed one, or None."""
        self.target = self.target[num_bytes:]
        if self.target:
            return None
        if not self._header:
            header_bytes, array_bytes = PREFIX.unpack(self._prefix)
            self._header, self._array = bytearray(header_bytes), np.empty(array_bytes, np.uint8)
            self._later = [self._array.data] if array_bytes else []
            self.target = memoryview(self._header)
            return None
        if self._later:
            self.target = self._later.pop()
            return None
        message = Message(pickle.loads(self._header), self._array)
        self._begin()
        return message


class PoolStream:
    """The pool's end. Only the constructor waits, because a node that has stopped must not delay the others.

    Attributes:
        heard_at: the time.monotonic() at which the node last sent bytes, or its machine last accepted bytes.
    """

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        """Connect to the node that has this key, within CONNECT_S + HANDSHAKE_S seconds.

        Raises:
            OSError: the node cannot be reached, or another program has its port.
        """
        self._socket = socket.create_connection(address, timeout=CONNECT_S)
        with close_on_error(self._socket.close):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            join_node(self._socket, key)
            self._socket.setblocking(False)
        self.heard_at = 0.0
        self._unsent: deque[memoryview] = deque()
        self._incoming = _Assembler()

    def fileno(self) -> int:
        """Return the file descriptor; -1 after `close`."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return bool(self._unsent)

    def send(self, header: Any, array: Bytes) -> None:
        """Send a message, or the part that the connection takes now. If it is broken, `receive` raises an error."""
        self._unsent.extend(_parts(header, array))
        self._push()

    def flush(self) -> None:
        """Send more of what is unsent."""
        if self._unsent and self._push():  # it did not fit before, so the node has accepted something
            self.heard_at = time.monotonic()

    def _push(self) -> int:
        total = 0
        with contextlib.suppress(OSError):  # the connection takes no more, or is broken
            while self._unsent:
                num_sent = self._socket.sendmsg(list(self._unsent)[:16])
                total += num_sent
                while self._unsent and num_sent >= len(self._unsent[0]):
                    num_sent -= len(self._unsent.popleft())
                if num_sent:
                    self._unsent[0] = self._unsent[0][num_sent:]
        return total

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have arrived.

        Raises:
            OSError: the connection is broken.
        """
        with contextlib.suppress(BlockingIOError):
            while num_bytes := self._socket.recv_into(self._incoming.target):
                self.heard_at = time.monotonic()
                message = self._incoming.count(num_bytes)
                if message is not None and message.header is not None:
                    yield message
            raise ConnectionResetError("the node has closed the connection")

    def shut_down(self) -> None:
        """Break the connection. Any thread may call this."""
        _shut_down(self._socket)

    def close(self) -> None:
        """Close the socket. Only the thread that uses the stream calls this."""
        self._socket.close()


class NodeStream:
    """The node's end: listens for the pool, and calls a function for each message that arrives."""

    def __init__(self, host: str, key: bytes, on_message: OnMessage) -> None:
        """Listen on a free port.

        Args:
            host: an address of this machine.
            key: the key of this node. Connections from programs without it are closed.
            on_message: called by a thread for each connection, in the order of its messages.
        """
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._key, self._on_message = key, on_message
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None  # the newest one
        self._strangers: deque[socket.socket] = deque()  # connections that have not proved yet that they have the key
        self._room = threading.Semaphore(MAX_STRANGERS)
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="stepmill-accept", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                self._admit(self._server.accept()[0])
            except (OSError, RuntimeError):  # no descriptor or no thread is left
                self._closed.wait(RETRY_S)

    def _admit(self, connection: socket.socket) -> None:
        """Serve a connection in a thread."""
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(IndexError):  # all have ended meanwhile
                _shut_down(self._strangers.popleft())
            self._room.acquire()
        self._strangers.append(connection)
        try:
            threading.Thread(target=self._serve, args=[connection], name="stepmill-stream", daemon=True).start()
        except RuntimeError:
            self._dismiss(connection)
            connection.close()
            raise

    def _dismiss(self, stranger: socket.socket) -> None:
        with contextlib.suppress(ValueError):  # it was ended as the oldest
            self._strangers.remove(stranger)
        self._room.release()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            try:
                admit_pool(connection, self._key)
            finally:
                self._dismiss(connection)
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            old, self._connection = self._connection, connection
            if old is not None:
                _shut_down(old)
            incoming = _Assembler()
            while num_bytes := connection.recv_into(incoming.target):
                message = incoming.count(num_bytes)
                if message is not None and message.header is None:
                    self.send(*message)
                elif message is not None:
                    self._on_message(*message)

    def send(self, header: Any, array: Bytes) -> None:
        """Send a message on the newest connection. If the connection breaks, the message may be lost."""
        connection = self._connection
        if connection is None:
            return
        with self._sending, contextlib.suppress(OSError):
            parts = list(_parts(header, array))
            num_sent = connection.sendmsg(parts)
            for part in parts:
                connection.sendall(part[num_sent:])
                num_sent = max(0, num_sent - len(part))

    def close(self) -> None:
        """Stop listening, and break all connections."""
        self._closed.set()
        for each in (self._server, self._connection, *self._strangers.copy()):
            if each is not None:
                _shut_down(each)  # also ends the threads that wait for it
        self._server.close()


def _shut_down(each: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the connection is closed or broken
        each.shutdown(socket.SHUT_RDWR)


def _parts(header: Any, array: Bytes) -> Iterator[memoryview]:
    pickled = pickle.dumps(header, pickle.HIGHEST_PROTOCOL)
    yield memoryview(PREFIX.pack(len(pickled), array.nbytes) + pickled)
    if array.nbytes:
        yield array.data
