"""The connection between a pool and a node, without Ray."""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmill.backends.ray import stream as streams
from stepmill.backends.ray.handshake import KEY_BYTES, admit_pool
from stepmill.backends.ray.stream import EMPTY, NodeStream, PoolStream
from tests.harness.hangs import HANG_GUARD_S

LOCAL = "127.0.0.1"


class Node:
    """Listens as a node does, and keeps what arrives."""

    def __init__(self):
        self.key = secrets.token_bytes(KEY_BYTES)
        self.arrived = queue.Queue()
        self.stream = NodeStream(LOCAL, self.key, lambda header, array: self.arrived.put((header, array.tobytes())))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stream.close()

    def connect(self):
        return PoolStream(self.stream.address, self.key)

    def take(self, count):
        return [self.arrived.get(timeout=HANG_GUARD_S) for _ in range(count)]


@contextlib.contextmanager
def connected_pair():
    """Yield a stream, and the socket of its node."""
    key = secrets.token_bytes(KEY_BYTES)
    with socket.create_server((LOCAL, 0)) as server, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(PoolStream, server.getsockname(), key)
        node, _ = server.accept()
        with node:
            admit_pool(node, key)
            stream = joining.result()
            yield stream, node
            stream.close()


def receive(stream, count):
    """Return this many messages of a stream that never waits."""
    found = []
    deadline = time.monotonic() + HANG_GUARD_S
    while len(found) < count:
        assert time.monotonic() < deadline
        found += [(header, array.tobytes()) for header, array in stream.receive()]
    return found


def numbers(size, first=0):
    return (np.arange(size) + first).astype(np.uint8)


def test_messages_arrive_in_order_both_ways():
    with Node() as node:
        stream = node.connect()
        sent = [((i, "name", None), numbers(size, i)) for i, size in enumerate([0, 1, 70_000, 0, 3_000_000])]
        for message in sent:
            stream.send(*message)
        while stream.has_unsent:
            stream.flush()
        expected = [(header, array.tobytes()) for header, array in sent]
        assert node.take(len(sent)) == expected
        threading.Thread(target=lambda: [node.stream.send(*message) for message in sent]).start()
        assert receive(stream, len(sent)) == expected
        stream.close()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 90), min_size=1, max_size=30),
)
def test_a_message_may_arrive_in_any_pieces(sizes, cuts):
    messages = [((number,), numbers(size, number)) for number, size in enumerate(sizes)]
    data = b"".join(bytes(part) for message in messages for part in streams._parts(*message))
    with connected_pair() as (stream, node):
        found = []
        while data:
            cut = cuts.pop() if cuts else len(data)
            node.sendall(data[:cut])
            data = data[cut:]
            found += list(stream.receive())
        found += receive(stream, len(messages) - len(found))
        assert [(header, bytes(array)) for header, array in found] == [(h, a.tobytes()) for h, a in messages]


def test_a_node_that_does_not_read_holds_up_nobody():
    with connected_pair() as (stream, node):
        array = numbers(30_000_000)
        stream.send((1,), array)  # returns, although nobody reads
        assert stream.has_unsent
        received = bytearray()
        expected = b"".join(bytes(part) for part in streams._parts((1,), array))
        while len(received) < len(expected):
            received += node.recv(1 << 20)
            stream.flush()
        assert received == expected
        assert not stream.has_unsent


def test_a_node_that_takes_more_of_a_large_message_counts_as_heard():
    with connected_pair() as (stream, node):
        stream.send((1,), numbers(30_000_000))
        assert stream.has_unsent
        assert not stream.heard_at
        node.recv(10_000_000, socket.MSG_WAITALL)
        deadline = time.monotonic() + HANG_GUARD_S
        while not stream.heard_at:
            assert time.monotonic() < deadline
            stream.flush()


def test_a_probe_is_answered_at_once_and_is_no_message():
    with Node() as node:
        stream = node.connect()
        stream.send(None, EMPTY)
        deadline = time.monotonic() + HANG_GUARD_S
        while not stream.heard_at:
            assert time.monotonic() < deadline
            assert list(stream.receive()) == []
        assert node.arrived.empty()
        stream.close()


def test_a_closed_connection_is_an_error_at_the_next_use():
    with Node() as node:
        stream = node.connect()
        stream.send((1,), EMPTY)
        assert node.take(1) == [((1,), b"")]
        node.stream.close()
        with pytest.raises(ConnectionError):
            receive(stream, 1)
        stream.close()


def test_a_new_connection_replaces_one_that_is_still_open():
    with Node() as node:
        old = node.connect()
        old.send(("old",), EMPTY)
        node.take(1)
        new = node.connect()
        new.send(("new",), EMPTY)
        assert node.take(1) == [(("new",), b"")]
        with pytest.raises(ConnectionError):
            receive(old, 1)
        node.stream.send(("answer",), numbers(5))
        assert receive(new, 1) == [(("answer",), bytes(range(5)))]
        old.close()
        new.close()
