"""Strangers on the port of a node, and strangers that connect to one: nothing of theirs is unpickled, and they hold up nobody."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmill.backends.ray import handshake, stream
from stepmill.backends.ray.stream import EMPTY, PoolStream
from tests.harness.hangs import HANG_GUARD_S
from tests.harness.scripts import start_script
from tests.harness.strangers import bomb_message
from tests.unit.test_ray_stream import LOCAL, Node, receive

MAC_BYTES = NONCE_BYTES = 32


@contextlib.contextmanager
def stranger_listening(behave):
    """Listen on a port as the node that had it did. Yield the address, and what arrived from the pool.

    `behave(connection, heard)` sends what it likes to; `heard()` waits for bytes of the pool.
    """
    received = bytearray()

    def serve():
        with server.accept()[0] as connection, contextlib.suppress(OSError):

            def heard():
                received.extend(data := connection.recv(1 << 16))
                return bytes(data)

            behave(connection, heard)
            while heard():
                pass

    with socket.create_server((LOCAL, 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname(), received
        finally:
            thread.join(HANG_GUARD_S)
            assert not thread.is_alive()


def use(address, key):
    """Do what a pool does: connect, send, and read what comes."""
    connected = PoolStream(address, key)
    try:
        connected.send(("secret commands",), EMPTY)
        receive(connected, 1)
    finally:
        connected.close()


def refuse(behave, folder, key=None):
    """Check that a stranger gets neither the key nor a command, and that what it sends is not unpickled."""
    key = key or secrets.token_bytes(handshake.KEY_BYTES)
    with stranger_listening(behave) as (address, received), pytest.raises(PermissionError):
        use(address, key)
    assert list(folder.iterdir()) == []
    assert key not in received
    assert b"secret commands" not in received
    assert len(received) <= NONCE_BYTES + MAC_BYTES


def test_a_stranger_on_the_port_of_a_dead_node_is_not_unpickled(tmp_path):
    def guess(connection, heard):
        connection.sendall(secrets.token_bytes(NONCE_BYTES + MAC_BYTES) + bomb_message(tmp_path))

    refuse(guess, tmp_path)


def test_a_stranger_that_only_sends_messages_is_not_unpickled(tmp_path):
    refuse(lambda connection, heard: connection.sendall(bomb_message(tmp_path)), tmp_path)


def test_a_stranger_cannot_repeat_the_handshake_of_the_node_before_it(tmp_path):
    with Node() as node:
        recorded = record_handshake(node)

    def replay(connection, heard):
        connection.sendall(recorded[:NONCE_BYTES])
        heard()
        connection.sendall(recorded[NONCE_BYTES:] + bomb_message(tmp_path))

    assert len(recorded) == NONCE_BYTES + MAC_BYTES
    refuse(replay, tmp_path, node.key)


def record_handshake(node):
    """Return what a node sends in a handshake with its pool, as a program between them would hear it."""
    recorded = bytearray()

    def forward():
        with server.accept()[0] as pool, socket.create_connection(node.stream.address) as target:
            recorded.extend(nonce := target.recv(NONCE_BYTES, socket.MSG_WAITALL))
            pool.sendall(nonce)
            target.sendall(pool.recv(NONCE_BYTES + MAC_BYTES, socket.MSG_WAITALL))
            recorded.extend(proof := target.recv(MAC_BYTES, socket.MSG_WAITALL))
            pool.sendall(proof)

    with socket.create_server((LOCAL, 0)) as server:
        thread = threading.Thread(target=forward)
        thread.start()
        PoolStream(server.getsockname(), node.key).close()
        thread.join(HANG_GUARD_S)
    return bytes(recorded)


def test_a_stranger_cannot_reflect_what_the_pool_sends(tmp_path):
    def reflect(connection, heard):
        connection.sendall(secrets.token_bytes(NONCE_BYTES))
        said = heard()
        while len(said) < NONCE_BYTES + MAC_BYTES:
            said += heard()
        connection.sendall(said[NONCE_BYTES:] + bomb_message(tmp_path))

    refuse(reflect, tmp_path)


def test_a_stranger_gets_no_proof_of_a_node_from_two_pools_that_connect(tmp_path):
    key = secrets.token_bytes(handshake.KEY_BYTES)
    proofs = []

    def relay(connection, heard):
        """Give each pool the other one's nonce, and the other one's proof."""
        own_nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(own_nonce)
        said = heard()
        connection.sendall((proofs[-1] if proofs else bytes(MAC_BYTES)) + bomb_message(tmp_path))
        proofs.append(said[NONCE_BYTES:])

    for _ in range(3):
        refuse(relay, tmp_path, key)
    assert len(set(proofs)) == 3


@pytest.mark.parametrize("interval_s", [0.03, HANG_GUARD_S], ids=["a byte at a time", "silent"])
def test_a_slow_stranger_is_left_after_a_time_limit(tmp_path, monkeypatch, interval_s):
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    left = threading.Event()

    def drip(connection, heard):
        while not left.wait(interval_s):
            connection.sendall(b"x")

    with stranger_listening(drip) as (address, _):
        with pytest.raises(TimeoutError, match=r"no proof|timed out"):
            use(address, secrets.token_bytes(handshake.KEY_BYTES))
        left.set()


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300))
def test_garbage_is_refused_by_both_ends(data):
    def send(connection, heard):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)

    with stranger_listening(send) as (address, _), pytest.raises((PermissionError, ConnectionError)):
        use(address, secrets.token_bytes(handshake.KEY_BYTES))
    with Node() as node:
        with socket.create_connection(node.stream.address) as connection:
            assert len(connection.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            with contextlib.suppress(ConnectionError):  # it may have closed the connection before all has been read
                send(connection, None)
                assert connection.recv(1) == b""
        assert node.arrived.empty()


def test_a_program_without_the_key_is_not_heard():
    with Node() as node:
        with pytest.raises(ConnectionResetError):
            PoolStream(node.stream.address, secrets.token_bytes(handshake.KEY_BYTES))
        pool = node.connect()
        pool.send(("wanted",), EMPTY)
        assert node.take(1) == [(("wanted",), b"")]
        pool.close()


def test_a_stranger_does_not_replace_the_connection_of_the_pool():
    with Node() as node, contextlib.ExitStack() as strangers:
        pool = node.connect()
        for _ in range(3):
            connection = strangers.enter_context(socket.create_connection(node.stream.address))
            nonce = connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
            connection.sendall(nonce + secrets.token_bytes(MAC_BYTES))
            assert connection.recv(1) == b""
        pool.send(("wanted",), EMPTY)
        assert node.take(1) == [(("wanted",), b"")]
        node.stream.send(("answer",), EMPTY)
        assert receive(pool, 1) == [(("answer",), b"")]
        pool.close()


def test_strangers_that_wait_give_way_to_the_pool():
    with Node() as node, contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(node.stream.address)) for _ in range(5 * stream.MAX_STRANGERS)
        ]
        for stranger in strangers[: -stream.MAX_STRANGERS]:
            assert not stranger.recv(NONCE_BYTES + 1, socket.MSG_WAITALL)[NONCE_BYTES:]  # closed by the node
        pool = node.connect()
        pool.send(("wanted",), EMPTY)
        assert node.take(1) == [(("wanted",), b"")]
        assert sum(thread.name == "stepmill-stream" for thread in threading.enumerate()) <= stream.MAX_STRANGERS + 1
        pool.close()


def test_a_node_without_free_descriptors_listens_again_when_it_has_some():
    script = f"""
        import os, resource, sys, threading
        from stepmill.backends.ray.stream import NodeStream
        arrived = threading.Event()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        node = NodeStream({LOCAL!r}, bytes(32), lambda header, array: arrived.set())
        taken = []
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            print(node.address[1], flush=True)
        sys.stdin.readline()
        for descriptor in taken:
            os.close(descriptor)
        print(arrived.wait({HANG_GUARD_S}), flush=True)
    """
    with start_script(script, interpreter=()) as program:
        address = LOCAL, int(program.stdout.readline())
        with contextlib.ExitStack() as opened:
            early = [opened.enter_context(socket.create_connection(address)) for _ in range(30)]
            early[0].settimeout(0.3)
            with contextlib.suppress(TimeoutError):
                early[0].recv(1)  # the node has tried to accept it meanwhile
            program.stdin.write("go on\n")
            program.stdin.flush()
            pool = PoolStream(address, bytes(32))
            pool.send(("wanted",), EMPTY)
            assert program.stdout.readline().strip() == "True"
            pool.close()
